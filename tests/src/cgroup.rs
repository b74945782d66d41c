//! A cgroup of the lab's own, so that programs attached to it see only the lab's processes.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::journal::DEADLINE;

/// A child of the cgroup2 root, with this process in it.
#[derive(Debug)]
pub(crate) struct OwnCgroup {
    path: PathBuf,
    /// Where the process was.
    before: PathBuf,
}

impl OwnCgroup {
    /// Makes it and moves all threads of the process into it.
    pub(crate) fn enter(name: &str) -> Self {
        let root = culvert_dataplane::probe::find_cgroup2().expect("a cgroup2 hierarchy must be mounted");
        for hierarchy in hierarchies() {
            crate::isolation::remove_leftovers(&hierarchy, remove_tree);
        }
        let path = root.join(name);
        fs::create_dir(&path).unwrap_or_else(|error| panic!("cgroup {}: {error}", path.display()));
        let before = root.join(current().trim_start_matches('/'));
        join(&path).unwrap_or_else(|error| panic!("enter cgroup {}: {error}", path.display()));
        Self { path, before }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        // What fails here is left to the next lab.
        join(&self.before).ok();
        let deadline = Instant::now() + DEADLINE;
        // Killed children leave it a moment after they were waited for.
        while fs::remove_dir(&self.path).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn join(cgroup: &Path) -> io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), "0")
}

/// The cgroup2 path of this process, as /proc/self/cgroup has it.
fn current() -> String {
    let cgroups = fs::read_to_string("/proc/self/cgroup").expect("/proc/self/cgroup");
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    path.unwrap_or_else(|| panic!("no cgroup2 line in /proc/self/cgroup: {cgroups}")).to_owned()
}

/// Removes a cgroup below the root of each hierarchy, version 1's too, with what a runtime has made in it. Waits
/// for processes that were killed, but not for those that are in the cgroup itself.
pub(crate) fn remove_from_all_hierarchies(name: &str) {
    let deadline = Instant::now() + DEADLINE;
    for hierarchy in hierarchies() {
        let cgroup = hierarchy.join(name.trim_start_matches('/'));
        remove_tree(&cgroup);
        while !children(&cgroup).is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
            remove_tree(&cgroup);
        }
    }
}

fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let of_cgroups = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (path, kind) = (words.next()?, words.next()?);
        kind.starts_with("cgroup").then(|| path.into())
    });
    of_cgroups.collect()
}

/// A cgroup's files go with it; only directories have to be removed.
fn remove_tree(cgroup: &Path) {
    for child in children(cgroup) {
        remove_tree(&child);
    }
    // What still holds a process stays.
    fs::remove_dir(cgroup).ok();
}

fn children(cgroup: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}
