//! Which socket takes a SYN: the decision of `sk_lookup`.

use culvert_abi::{
    Address, Counter, PodEntry,
    pod::{ACTIVE, BYPASS_INBOUND},
    ztunnel::{HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT},
};

/// Interface index of `lo`, the same in every netns (`LOOPBACK_IFINDEX`, include/net/flow.h).
pub const LOOPBACK_IFINDEX: u32 = 1;

/// A packet for which TCP or UDP looks for a socket. Ports in host order.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    /// Whether it is TCP.
    pub is_tcp: bool,
    /// Destination: an address of this netns, or one that its routing treats so.
    pub local: Address,
    /// Source.
    pub remote: Address,
    /// Destination port.
    pub local_port: u16,
    /// Source port.
    pub remote_port: u16,
    /// Interface it came in by.
    pub ingress_ifindex: u32,
}

/// What the decision asks of the maps, only as far as it needs it.
pub trait Lookups {
    /// The entry of this netns in `PODS`.
    fn pod(&self) -> Option<PodEntry>;
    /// Whether an interface of this netns has the address.
    fn owns(&self, address: &Address) -> bool;
    /// Whether a process of the host opened this connection.
    fn is_host_flow(&self, packet: &Packet) -> bool;
    /// Whether the workload opened this connection, from an address that was not known to be the pod's.
    fn is_unknown_flow(&self, packet: &Packet) -> bool;
}

/// What to do with the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The kernel's own lookup.
    Pass(Counter),
    /// To a listener of ztunnel on `port`; without one the connection is refused.
    Steer {
        /// Which of ztunnel's ports.
        port: u16,
        /// Counts when a listener took it.
        taken: Counter,
        /// Counts when there was none.
        refused: Counter,
    },
}

const OUTBOUND: Verdict = Verdict::Steer {
    port: OUTBOUND_PORT,
    taken: Counter::LookupCaptured,
    refused: Counter::LookupRefusedOutbound,
};

const fn inbound(taken: Counter) -> Verdict {
    Verdict::Steer { port: INBOUND_PORT, taken, refused: Counter::LookupRefusedInbound }
}

/// The first matching row decides.
///
/// The local table stands behind our rule for marked packets, so a connection of ztunnel to the
/// workload is routed by table 100 and its packets come in by `lo`; one from outside to the same
/// address never does. That is what tells rows "from ztunnel" and "inbound" apart.
#[inline(always)]
pub fn decide(packet: &Packet, lookups: &impl Lookups) -> Verdict {
    if !packet.is_tcp {
        return Verdict::Pass(Counter::LookupNotTcp);
    }
    if packet.local.is_loopback() {
        return Verdict::Pass(Counter::LookupLoopback);
    }
    let Some(pod) = lookups.pod() else {
        return Verdict::Pass(Counter::LookupInactive);
    };
    let is_active = pod.state == ACTIVE;
    if !lookups.owns(&packet.local) {
        // Captured, if the workload sent it; also when the pod has been withdrawn since: its way is marked,
        // and nobody else may have it. Otherwise it is AnyIP or an address that we have not been told of
        // yet: 15001 would lend a stranger the pod's identity, and ztunnel's connection to such an address
        // would come back to ztunnel.
        return if lookups.owns(&packet.remote) || lookups.is_unknown_flow(packet) {
            OUTBOUND
        } else if !is_active {
            Verdict::Pass(Counter::LookupInactive)
        } else if packet.ingress_ifindex == LOOPBACK_IFINDEX {
            Verdict::Pass(Counter::LookupFromZtunnel)
        } else {
            inbound(Counter::LookupUnknownAddress)
        };
    }
    if !is_active {
        return Verdict::Pass(Counter::LookupInactive);
    }
    if packet.local_port == OUTBOUND_PORT || packet.local_port == INBOUND_PORT {
        return inbound(Counter::LookupSelfCall);
    }
    if packet.ingress_ifindex == LOOPBACK_IFINDEX {
        return Verdict::Pass(Counter::LookupFromZtunnel);
    }
    if lookups.owns(&packet.remote) {
        return Verdict::Pass(Counter::LookupSelf);
    }
    if packet.local_port == HBONE_PORT {
        return Verdict::Pass(Counter::LookupHbone);
    }
    if lookups.is_host_flow(packet) {
        return Verdict::Pass(Counter::LookupHostFlow);
    }
    if pod.flags & BYPASS_INBOUND != 0 {
        return Verdict::Pass(Counter::LookupBypass);
    }
    inbound(Counter::LookupInbound)
}

#[cfg(test)]
#[path = "steer_tests.rs"]
mod tests;
