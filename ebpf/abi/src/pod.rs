//! What `PODS` says of a pod's netns, and what each hook does with it.
//!
//! | state | LISTEN of ztunnel | bind of ztunnel's ports | connect, SYN, accept |
//! |---|---|---|---|
//! | (absent) | nothing | allowed | nothing: the netns is none of ours |
//! | [`REGISTERED`] | stored | refused to the workload | pass |
//! | [`ACTIVE`] | stored | refused to the workload | decide |
//! | [`DRAINING`] | nothing | allowed | pass; routing stays for the connections that still need it, and `sk_lookup` for a captured SYN under way |
//! | [`INTRODUCTION`] | stored: proof of life | whoever binds them is a ztunnel | nothing |

/// Written before ztunnel is told of the pod: its listeners must be stored as they open, because a
/// listener that exists already is never seen again.
pub const REGISTERED: u32 = 1;
/// Captured: every hook decides.
pub const ACTIVE: u32 = 2;
/// Withdrawn, but connections that were captured are still open.
pub const DRAINING: u32 = 3;
/// A netns of the agent's own in which a ztunnel shows itself by binding its ports.
pub const INTRODUCTION: u32 = 4;

/// The pod's inbound connections reach it directly (`ambient.istio.io/bypass-inbound-capture`).
pub const BYPASS_INBOUND: u32 = 1;

/// Value of `PODS`, key: the netns cookie (u64).
///
/// The saved settings are what the netns had before us. They live here because the map outlives the
/// process that wrote it, as the pins do.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodEntry {
    /// [`REGISTERED`], [`ACTIVE`], [`DRAINING`] or [`INTRODUCTION`].
    pub state: u32,
    /// [`BYPASS_INBOUND`] or 0.
    pub flags: u32,
    /// Bit i is the former value of the i-th sysctl that enrollment sets to 1; then one bit for each of
    /// ztunnel's ports that the kernel did not give away before either.
    pub saved_sysctls: u32,
    /// Former `IFLA_GSO_MAX_SIZE` of `lo`, bytes; 0: not changed.
    pub saved_gso_max_size: u32,
    /// Former `IFLA_GRO_MAX_SIZE` of `lo`, bytes; 0: not changed.
    pub saved_gro_max_size: u32,
    /// Former `IFLA_GSO_IPV4_MAX_SIZE` of `lo`, bytes; 0: not changed.
    pub saved_gso_ipv4_max_size: u32,
    /// Former `IFLA_GRO_IPV4_MAX_SIZE` of `lo`, bytes; 0: not changed.
    pub saved_gro_ipv4_max_size: u32,
}

const _: () = assert!(size_of::<PodEntry>() == 28);
