//! Where a ztunnel's listening sockets are kept.

/// How many listeners of one port a pod can have at a time. Two ztunnels overlap during a rollout; a
/// SOCKHASH entry vanishes with its socket, so each listener needs an entry of its own.
pub const SLOTS: u32 = 4;

/// Family of the key for the three dual-stack listeners (15001, 15006, 15008).
pub const DUAL_STACK: u16 = 0;

/// Key of the SOCKHASH `LISTENERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerKey {
    /// Cookie of the netns the socket lives in.
    pub netns: u64,
    /// Listening port, host order.
    pub port: u16,
    /// [`DUAL_STACK`]; `AF_INET` or `AF_INET6` for port 15053, where ztunnel opens one of each.
    pub family: u16,
    /// 0 to [`SLOTS`] - 1.
    pub slot: u32,
}

const _: () = assert!(size_of::<ListenerKey>() == 16);
