//! The netns of running pods is found by their processes: real cgroups, namespaces and addresses.
#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::atomic::{AtomicU32, Ordering},
};

use culvert_agent::{
    discover::{self, Found, Unfound, Wanted},
    enroll::{HostPaths, NetnsId},
};
use culvert_tests::{Host, Lab, eventually};

/// A pod uid of this test alone: a scan sees the processes of every test that runs.
fn uid(number: u32) -> String {
    format!("{:08x}-29e7-460b-9bfe-{number:012x}", std::process::id())
}

/// A process in a cgroup as kubelet names them.
struct Container {
    process: Child,
    cgroup: PathBuf,
    root: PathBuf,
}

impl Container {
    /// In `netns`, which is a command line that begins with a way into it.
    fn start(lab: &Lab, cgroup: &str, netns: &str) -> Self {
        let root = lab.config().cgroup.clone();
        let cgroup = root.join(cgroup);
        fs::create_dir_all(&cgroup).unwrap();
        let procs = cgroup.join("cgroup.procs");
        let script = format!("echo $$ > {} && exec {netns} sleep 600", procs.display());
        let process = Command::new("sh").args(["-ec", &script]).spawn().unwrap();
        let pid = process.id();
        eventually("sleep", || {
            let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            (command.trim() == "sleep").then_some(())
        });
        Self { process, cgroup, root }
    }

    fn of_pod(lab: &Lab, uid: &str, netns: &str) -> Self {
        static STARTED: AtomicU32 = AtomicU32::new(1);
        let id = format!("{:064x}", STARTED.fetch_add(1, Ordering::Relaxed));
        Self::start(lab, &format!("kubepods/burstable/pod{uid}/{id}"), netns)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        let below = self.cgroup.ancestors().take_while(|path| *path != self.root);
        // Those that another container is in stay.
        below.for_each(|path| drop(fs::remove_dir(path)));
    }
}

fn inside(host: &Host) -> String {
    format!("nsenter --net={}", host.netns_path().display())
}

fn wanted(uid: &str, host: &Host) -> Wanted {
    Wanted { uid: uid.into(), hash: None, addresses: [host.v4().into()].into() }
}

fn scan(lab: &Lab, wanted: &[Wanted]) -> BTreeMap<String, Result<Found, Unfound>> {
    let paths = HostPaths { proc: "/proc".into(), netns_prefix: "/".into() };
    let host = discover::id_of(&lab.config().host_netns);
    assert!(host.is_some(), "the node's netns is known");
    discover::scan(&*lab.dataplane(), &paths, host, wanted).unwrap()
}

fn id(host: &Host) -> NetnsId {
    discover::id_of(&host.netns_path()).unwrap()
}

#[test]
fn one_scan_finds_the_netns_of_every_pod_under_its_lasting_name() {
    let lab = Lab::builder().without_ztunnel().start();
    let (one, two) = (lab.pod("one"), lab.pod("two"));
    let _one = Container::of_pod(&lab, &uid(1), &inside(&one));
    let _two = Container::start(
        &lab,
        &format!(
            "kubepods-burstable-pod{}.slice/cri-containerd-{}.scope",
            uid(2).replace('-', "_"),
            "ab".repeat(32)
        ),
        &inside(&two),
    );
    let found = scan(&lab, &[wanted(&uid(1), &one), wanted(&uid(2), &two)]);
    let (first, second) = (found[&uid(1)].as_ref().unwrap(), found[&uid(2)].as_ref().unwrap());
    assert_eq!((first.id, second.id), (id(&one), id(&two)));
    assert_eq!(first.path, Path::new("/var/run/netns/one"));
    assert_eq!(second.container, Some("ab".repeat(32)));
}

#[test]
fn a_netns_without_a_name_is_found_by_its_process() {
    let lab = Lab::builder().without_ztunnel().start();
    let pod = lab.pod("one");
    let container = Container::of_pod(&lab, &uid(1), &inside(&pod));
    let wanted = wanted(&uid(1), &pod);
    let expected = id(&pod);
    // The process keeps the namespace, and the veth in it.
    assert!(Command::new("ip").args(["netns", "del", "one"]).status().unwrap().success());
    let found = scan(&lab, &[wanted]);
    let found = found[&uid(1)].as_ref().unwrap();
    assert_eq!(found.id, expected);
    assert_eq!(found.path, PathBuf::from(format!("/proc/{}/ns/net", container.process.id())));
}

#[test]
fn processes_of_the_pod_in_the_node_s_netns_or_in_one_of_their_own_are_not_the_pod() {
    let lab = Lab::builder().without_ztunnel().start();
    let pod = lab.pod("one");
    let _in_host = Container::of_pod(&lab, &uid(1), "");
    assert_eq!(scan(&lab, &[wanted(&uid(1), &pod)])[&uid(1)], Err(Unfound::NoProcess));
    let foreign = Container::of_pod(&lab, &uid(1), "unshare --net");
    let found = scan(&lab, &[wanted(&uid(1), &pod)]);
    let error = found[&uid(1)].as_ref().unwrap_err().to_string();
    assert!(error.contains(&format!("pid {} in ", foreign.process.id())), "{error}");
    let _own = Container::of_pod(&lab, &uid(1), &inside(&pod));
    assert_eq!(scan(&lab, &[wanted(&uid(1), &pod)])[&uid(1)].as_ref().unwrap().id, id(&pod));
}
