//! Where the host's parts are.

use std::path::PathBuf;

/// Paths of the host as this process sees them, and choices.
#[derive(Clone, Debug)]
pub struct Config {
    /// Mount point of the host's bpffs. Pins go to `culvert/v1` below it.
    pub bpffs: PathBuf,
    /// The cgroup2 directory whose processes are followed: the root of the host's hierarchy.
    pub cgroup: PathBuf,
    /// The host's netns.
    pub host_netns: PathBuf,
    /// The host's procfs; sysctls of a pod are written through it.
    pub proc: PathBuf,
    /// Large packets on the pod's own `lo` (BIG TCP): fewer of them for ztunnel and the workload.
    pub big_tcp: bool,
}

impl Default for Config {
    fn default() -> Self {
        let cgroup = crate::probe::find_cgroup2().unwrap_or_else(|| PathBuf::from("/sys/fs/cgroup"));
        Self {
            bpffs: "/sys/fs/bpf".into(),
            cgroup,
            host_netns: "/proc/1/ns/net".into(),
            proc: "/proc".into(),
            big_tcp: true,
        }
    }
}
