//! Everything that attaching a pod changes, to compare before and after.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use culvert_abi::names::{MAPS, SOCKET_LABELS};

use crate::{host::Host, lab::Lab};

/// Settings that are readings, not settings.
const READINGS: [&str; 2] = ["nf_conntrack_count", "neigh"];

/// Texts by what they describe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint(BTreeMap<String, String>);

impl Footprint {
    /// Panics with what differs, and nothing else.
    #[track_caller]
    pub fn expect_same(&self, now: &Self) {
        let mut differences = String::new();
        for (what, before) in &self.0 {
            let after = now.0.get(what).map_or("(absent)", String::as_str);
            if before != after {
                writeln!(differences, "{what}\n before:\n{before}\n now:\n{after}").expect("a String");
            }
        }
        for (what, text) in now.0.iter().filter(|(what, _)| !self.0.contains_key(*what)) {
            writeln!(differences, "{what}\n before: (absent)\n now:\n{text}").expect("a String");
        }
        assert!(differences.is_empty(), "{differences}");
    }
}

impl Host {
    /// Rules, routes, XFRM policies, queueing disciplines, filters and link attributes of all interfaces, and every
    /// setting below /proc/sys/net, as they are in this netns.
    pub fn footprint(&self) -> Footprint {
        let mut footprint = BTreeMap::new();
        for line in [
            "ip -4 -details rule show",
            "ip -6 -details rule show",
            "ip -4 -details route show table all",
            "ip -6 -details route show table all",
            "ip xfrm policy",
            "ip -details link show",
            "tc qdisc show",
        ] {
            let mut words = line.split(' ');
            let program = words.next().expect("a program");
            let output = self.command(program).args(words).output().expect("iproute2");
            assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
            let mut lines: Vec<_> =
                String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
            // The bridge's timers run, and those of its ports.
            for line in &mut lines {
                let timer = [" hello_timer", " hold_timer"].iter().find_map(|timer| line.find(timer));
                line.truncate(timer.unwrap_or(line.len()));
            }
            // Rules come in the order in which they apply, routes of one metric in any.
            if line.contains("route") {
                lines.sort();
            }
            footprint.insert(line.to_owned(), lines.join("\n"));
        }
        self.run(|| read_settings(Path::new("/proc/sys/net"), &mut footprint));
        Footprint(footprint)
    }
}

fn read_settings(directory: &Path, into: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if READINGS.iter().any(|name| path.ends_with(name)) {
            continue;
        }
        if path.is_dir() {
            read_settings(&path, into);
        } else if let Ok(value) = fs::read_to_string(&path) {
            into.insert(path.display().to_string(), value);
        }
    }
}

impl Lab {
    /// Pins, the keys of all shared maps, and the links on the lab's cgroup, netns and interfaces that
    /// the kernel knows, pinned or not.
    pub fn kernel_footprint(&self) -> Footprint {
        let mut pins = Vec::new();
        list(&self.config().bpffs, &mut pins);
        let mut footprint = BTreeMap::from([
            ("pins".to_owned(), format!("{pins:#?}")),
            ("links".to_owned(), self.links().join("\n")),
        ]);
        // Storage of sockets goes with them, and cannot be listed.
        for name in MAPS.into_iter().filter(|name| *name != SOCKET_LABELS) {
            let mut keys = self.map(name).raw_keys();
            keys.sort();
            let keys: Vec<_> = keys.iter().map(|key| format!("{key:02x?}")).collect();
            footprint.insert(format!("keys of {name}"), keys.join("\n"));
        }
        Footprint(footprint)
    }

    /// Those of the machine that are the lab's.
    fn links(&self) -> Vec<String> {
        let namespaces: Vec<_> = self.hosts().iter().map(|host| inode(&host.netns_path())).collect();
        links(&namespaces, Some(inode(&self.config().cgroup)))
    }
}

/// The links on netns and on a cgroup with these inodes, as bpftool lists them.
pub(crate) fn links(namespaces: &[u64], cgroup: Option<u64>) -> Vec<String> {
    let output = Command::new("bpftool").args(["--json", "link", "show"]).output();
    let output = output.expect("bpftool must be installed");
    let links: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).expect("a list of links");
    let mut found: Vec<String> = links
        .iter()
        .filter(|link| {
            let number = |key: &str| link.get(key).and_then(serde_json::Value::as_u64);
            cgroup.is_some() && number("cgroup_id") == cgroup
                || number("netns_ino").is_some_and(|inode| namespaces.contains(&inode))
        })
        .map(|link| format!("{} {}", link["id"], link["type"]))
        .collect();
    found.sort();
    found
}

/// Inode of a file, a netns for example; 0 if it is not there.
pub(crate) fn inode(path: &Path) -> u64 {
    fs::metadata(path).map(|metadata| metadata.ino()).unwrap_or_default()
}

fn list(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            list(&entry.path(), into);
        } else {
            into.push(entry.path());
        }
    }
    into.sort();
}
