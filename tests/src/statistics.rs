//! The kernel's own counters of a netns.

use std::fs;

use crate::host::Host;

impl Host {
    /// A counter of the kernel's TCP (`TcpExt` of /proc/net/netstat), for example `"SyncookiesRecv"`.
    pub fn tcp_statistic(&self, name: &str) -> u64 {
        let text = self.run(|| fs::read_to_string("/proc/thread-self/net/netstat")).expect("netstat");
        // A line of names, a line of values.
        let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
        let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        let mut pairs = names.split(' ').zip(values.split(' '));
        let value = pairs.find(|(key, _)| *key == name).and_then(|(_, value)| value.parse().ok());
        value.unwrap_or_else(|| panic!("no statistic {name} in {names}"))
    }

    /// How many connections the netns tracks; `None` in a kernel without connection tracking.
    pub fn tracked_connections(&self) -> Option<u64> {
        let path = "/proc/sys/net/netfilter/nf_conntrack_count";
        self.run(|| fs::read_to_string(path)).ok().and_then(|count| count.trim().parse().ok())
    }
}
