//! Where the runtime's paths are in the agent's view.

use std::path::{Component, Path, PathBuf};

/// Where the host's file systems are.
#[derive(Clone, Debug)]
pub struct HostPaths {
    /// The host's procfs.
    pub proc: PathBuf,
    /// What stands before a netns path of the runtime's, `/` if the agent sees the same tree.
    pub netns_prefix: PathBuf,
}

impl HostPaths {
    /// A netns path of the runtime's (`/var/run/netns/…`, `/proc/<pid>/ns/net`).
    pub fn of_netns(&self, path: &Path) -> PathBuf {
        let (base, path) = match path.strip_prefix("/proc") {
            Ok(below) => (&self.proc, below),
            Err(_outside) => (&self.netns_prefix, path),
        };
        // Never out of the prefix: the runtime has no reason to go up.
        let plain = path.components().filter(|part| matches!(part, Component::Normal(_)));
        base.join(plain.collect::<PathBuf>())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::on_the_host("/", "/proc", "/var/run/netns/cni-1", "/var/run/netns/cni-1")]
    #[case::in_a_container("/host", "/host/proc", "/run/netns/cni-1", "/host/run/netns/cni-1")]
    #[case::by_process("/host", "/host/proc", "/proc/42/ns/net", "/host/proc/42/ns/net")]
    #[case::upwards("/host", "/host/proc", "/run/../../etc/x", "/host/run/etc/x")]
    fn paths_are_seen_below_the_prefix(
        #[case] prefix: &str,
        #[case] proc: &str,
        #[case] path: &str,
        #[case] seen: &str,
    ) {
        let paths = HostPaths { proc: proc.into(), netns_prefix: prefix.into() };
        assert_eq!(paths.of_netns(Path::new(path)), Path::new(seen));
    }
}
