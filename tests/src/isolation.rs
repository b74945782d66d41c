//! Namespaces of the lab's own, so that nothing it does is seen outside or outlives it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicBool, Ordering},
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    unistd::Uid,
};

use crate::cgroup::OwnCgroup;

/// Names that carry the process's id after it are removed by later labs.
pub(crate) const PREFIX: &str = "culvert-lab-";
/// Where iproute2 keeps named namespaces.
pub(crate) const NETNS: &str = "/run/netns";
/// Where a bpffs belongs.
pub(crate) const BPFFS: &str = "/sys/fs/bpf";

/// What the process entered. Dropping leaves and removes what a mount namespace does not.
#[derive(Debug)]
pub(crate) struct Isolation {
    pub(crate) cgroup: OwnCgroup,
    /// A tmpfs of the lab's own.
    pub(crate) directory: PathBuf,
}

impl Isolation {
    /// Moves the calling thread, and all threads and processes it starts from here on, into new net
    /// and mount namespaces, and the process into a new cgroup.
    pub(crate) fn enter() -> Self {
        static ENTERED: AtomicBool = AtomicBool::new(false);
        assert!(Uid::effective().is_root(), "the lab needs root: start it through `cargo xtask`");
        assert!(
            !ENTERED.swap(true, Ordering::SeqCst),
            "one process has one lab: run each test in a process of its own (nextest does)"
        );
        let name = format!("{PREFIX}{}", process::id());
        let cgroup = OwnCgroup::enter(&name);
        remove_leftovers(&env::temp_dir(), |directory| drop(fs::remove_dir(directory)));
        let directory = env::temp_dir().join(name);
        for path in [&directory, Path::new(NETNS)] {
            fs::create_dir_all(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)
            .expect("unshare mount and net namespaces");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .expect("make mounts private");
        mount_new("tmpfs", &directory);
        mount_new("tmpfs", Path::new(NETNS));
        mount_new("bpf", Path::new(BPFFS));
        let node = Path::new(NETNS).join("node");
        fs::write(&node, "").expect("mount point for the node's netns");
        mount(Some("/proc/thread-self/ns/net"), &node, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .expect("bind the node's netns");
        Self { cgroup, directory }
    }
}

impl Drop for Isolation {
    fn drop(&mut self) {
        umount2(&self.directory, MntFlags::MNT_DETACH).ok();
        fs::remove_dir(&self.directory).ok();
    }
}

fn mount_new(kind: &str, target: &Path) {
    mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>)
        .unwrap_or_else(|error| panic!("mount {kind} on {}: {error}", target.display()));
}

/// Removes the directories that labs of processes which are no more have left in `parent`.
pub(crate) fn remove_leftovers(parent: &Path, remove: fn(&Path)) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(&entry.path());
        }
    }
}
