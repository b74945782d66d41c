//! Names of programs, maps and globals, at most 15 bytes each: the kernel cuts longer ones, and
//! `bpftool map dump name X` would not find them.

/// `cgroup/sock_create`: labels ztunnel's sockets.
pub const SOCK_CREATE: &str = "label_sockets";
/// `cgroup/bind4`: reserves ztunnel's ports, keeps the workload's own port bindable.
pub const BIND4: &str = "reserve_port4";
/// `cgroup/bind6`.
pub const BIND6: &str = "reserve_port6";
/// `cgroup/connect4`: refuses while there is no listener.
pub const CONNECT4: &str = "refuse_conn4";
/// `cgroup/connect6`.
pub const CONNECT6: &str = "refuse_conn6";
/// `cgroup/setsockopt`: our part of a connection's mark stays.
pub const SETSOCKOPT: &str = "keep_marks";
/// Tracepoint `sched_process_exit`: a ztunnel that ended is one no longer.
pub const PROCESS_EXIT: &str = "forget_ztunnel";
/// `sock_ops`: stores listeners, marks connections, follows host flows.
pub const SOCK_OPS: &str = "follow_sockets";
/// `sk_lookup`, one instance per pod netns: chooses the listening socket of a SYN.
pub const SK_LOOKUP: &str = "steer_syn";

/// Pod netns by cookie.
pub const PODS: &str = "PODS";
/// Addresses configured in a pod netns.
pub const OWN_ADDRESSES: &str = "OWN_ADDRESSES";
/// Addresses that CNI and the API server report for pods, to their netns cookie.
pub const POD_ADDRESSES: &str = "POD_ADDRESSES";
/// ztunnel's listening sockets.
pub const LISTENERS: &str = "LISTENERS";
/// Open connections from the host to pods.
pub const HOST_FLOWS: &str = "HOST_FLOWS";
/// Connections of workloads from addresses that are not known (yet).
pub const UNKNOWN_FLOWS: &str = "UNKNOWN_FLOWS";
/// Processes known as ztunnel: tgid to the cookie of the netns it was introduced in.
pub const ZTUNNELS: &str = "ZTUNNELS";
/// Which sockets are ztunnel's.
pub const SOCKET_LABELS: &str = "SOCKET_LABELS";
/// What happened, by netns cookie.
pub const COUNTERS: &str = "COUNTERS";

/// Every map that outlives its loader, in the order in which they are pinned.
pub const MAPS: [&str; 9] = [
    PODS,
    OWN_ADDRESSES,
    POD_ADDRESSES,
    LISTENERS,
    HOST_FLOWS,
    UNKNOWN_FLOWS,
    ZTUNNELS,
    SOCKET_LABELS,
    COUNTERS,
];

/// Read-only global of the node object: the host's netns cookie.
pub const HOST_NETNS: &str = "HOST_NETNS";
/// Map of each instance of the pod object: the cookie of the netns it is attached to.
pub const POD_NETNS: &str = "POD_NETNS";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_the_kernels_fifteen_bytes() {
        let programs =
            [SOCK_CREATE, BIND4, BIND6, CONNECT4, CONNECT6, SETSOCKOPT, PROCESS_EXIT, SOCK_OPS, SK_LOOKUP];
        for name in programs.into_iter().chain(MAPS) {
            assert!(name.len() <= 15, "{name}");
        }
    }
}
