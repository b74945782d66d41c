//! What happens when a socket of a pod's netns connects.

use culvert_abi::{
    Counter,
    pod::ACTIVE,
    ztunnel::{ACCEPTED_MARK, LOOP_MARK, MARK_MASK},
};

use crate::socket::Owner;

/// Where the connection goes, seen from the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// 127.0.0.0/8, ::1, or unspecified.
    Loopback,
    /// An address of the pod itself.
    Own,
    /// Anything else.
    Remote,
}

/// What to do at `TCP_CONNECT_CB`, before the SYN is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnConnect {
    /// The packets of this connection must stay inside the netns: our part of the mark to set.
    pub mark: Option<u32>,
    /// The counter of this path.
    pub counter: Counter,
}

/// A connection of the workload to the outside is delivered to 15001, inside; one of ztunnel to the
/// workload is source-preserving, its replies go to a foreign address and must loop. One of the pod to
/// itself stays inside as well, also when the address has just been taken away; as long as it is there the
/// local table decides, because a socket bound to a device takes answers only by the interface that owns
/// the address.
#[inline(always)]
pub const fn on_connect(state: u32, owner: Owner, mark: u32, destination: Destination) -> OnConnect {
    let (mark, counter) = match (state, owner, destination) {
        (ACTIVE, Owner::Workload, Destination::Remote) => (Some(LOOP_MARK), Counter::CapturedOutbound),
        (ACTIVE, Owner::Workload, Destination::Own) => (Some(ACCEPTED_MARK), Counter::PassedOwnAddress),
        (ACTIVE, Owner::Workload, Destination::Loopback) => (None, Counter::PassedLoopback),
        (ACTIVE, Owner::Ztunnel, Destination::Own) => (Some(LOOP_MARK), Counter::ZtunnelToWorkload),
        // See `is_inbound_leg`.
        (ACTIVE, Owner::Ztunnel, Destination::Remote) if mark & MARK_MASK == LOOP_MARK => {
            (None, Counter::ZtunnelToWorkload)
        }
        (ACTIVE, Owner::Ztunnel, Destination::Remote | Destination::Loopback) => {
            (None, Counter::ZtunnelUpstream)
        }
        _ => (None, Counter::PassedInactive),
    };
    OnConnect { mark, counter }
}

/// Whether `connect()` must be refused while ztunnel does not listen on 15001. A looped IPv4 SYN that
/// nobody takes cannot be answered (the RST's source is not local), so the call itself has to fail.
#[inline(always)]
pub const fn needs_listener(state: u32, owner: Owner, destination: Destination) -> bool {
    matches!((state, owner, destination), (ACTIVE, Owner::Workload, Destination::Remote))
}

/// Whether a connection of ztunnel must stay inside although its destination is not known to be the pod's:
/// AnyIP, or an address that is a moment old. Only inbound does ztunnel bind the source, the client's
/// (`freebind_connect`, src/proxy.rs).
#[inline(always)]
pub const fn is_inbound_leg(owner: Owner, destination: Destination, has_source: bool) -> bool {
    has_source && matches!((owner, destination), (Owner::Ztunnel, Destination::Remote))
}

#[cfg(test)]
mod tests {
    use culvert_abi::pod::{DRAINING, INTRODUCTION, REGISTERED};
    use rstest::rstest;

    use super::*;
    use Destination::{Loopback, Own, Remote};
    use Owner::{Workload, Ztunnel};

    #[rstest]
    #[case(Workload, Remote, Some(LOOP_MARK), Counter::CapturedOutbound)]
    #[case(Workload, Own, Some(ACCEPTED_MARK), Counter::PassedOwnAddress)]
    #[case(Workload, Loopback, None, Counter::PassedLoopback)]
    #[case(Ztunnel, Remote, None, Counter::ZtunnelUpstream)]
    #[case(Ztunnel, Own, Some(LOOP_MARK), Counter::ZtunnelToWorkload)]
    #[case(Ztunnel, Loopback, None, Counter::ZtunnelUpstream)]
    fn an_active_pod_decides_by_owner_and_destination(
        #[case] owner: Owner,
        #[case] destination: Destination,
        #[case] mark: Option<u32>,
        #[case] counter: Counter,
    ) {
        assert_eq!(on_connect(ACTIVE, owner, 0, destination), OnConnect { mark, counter });
        let refusable = owner == Workload && destination == Remote;
        assert_eq!(needs_listener(ACTIVE, owner, destination), refusable);
    }

    #[test]
    fn an_inbound_leg_to_an_address_that_is_not_known_stays_inside() {
        assert!(is_inbound_leg(Ztunnel, Remote, true));
        let decided = on_connect(ACTIVE, Ztunnel, 0x40111, Remote);
        assert_eq!(decided, OnConnect { mark: None, counter: Counter::ZtunnelToWorkload });
        for (owner, destination, has_source) in [
            (Ztunnel, Remote, false),
            (Ztunnel, Own, true),
            (Ztunnel, Loopback, true),
            (Workload, Remote, true),
        ] {
            assert!(!is_inbound_leg(owner, destination, has_source));
        }
    }

    #[test]
    fn no_other_state_marks_or_refuses() {
        for state in [0, REGISTERED, DRAINING, INTRODUCTION, 99] {
            for owner in [Workload, Ztunnel] {
                for destination in [Loopback, Own, Remote] {
                    assert_eq!(on_connect(state, owner, LOOP_MARK, destination).mark, None);
                    assert!(!needs_listener(state, owner, destination));
                }
            }
        }
    }
}
