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
        crate::isolation::remove_leftovers(&root);
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
