//! Connections that processes of the host open to pods.

use crate::Address;

/// How long an entry of `HOST_FLOWS` counts, nanoseconds: longer than a SYN is retried
/// (`tcp_syn_retries` 6: 127 s) and than a SYN cookie stays valid (two minutes).
pub const LIFETIME_NS: u64 = 180_000_000_000;

/// Key of `HOST_FLOWS`: a connection from a socket of the host's netns to an address of a pod. The
/// value is the time of the connect (u64, nanoseconds of `CLOCK_MONOTONIC`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowKey {
    /// Cookie of the pod's netns.
    pub netns: u64,
    /// The host's address.
    pub host: Address,
    /// The pod's address.
    pub pod: Address,
    /// The host's port, host order.
    pub host_port: u16,
    /// The pod's port, host order.
    pub pod_port: u16,
    /// Always 0.
    pub padding: u32,
}

const _: () = assert!(size_of::<FlowKey>() == 48);
