//! What happens when a socket of a pod's netns connects.

use culvert_abi::{
    Counter,
    pod::ACTIVE,
    ztunnel::{LOOP_MARK, with_mark},
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
    /// The packets of this connection must stay inside the netns: set the LOOP mark.
    pub keep_inside: bool,
    /// The counter of this path.
    pub counter: Counter,
}

/// A connection of the workload to the outside is delivered to 15001, inside; one to the pod itself
/// stays inside as well, so that an address that has just been taken away ends in a local RST; one of
/// ztunnel to the workload is source-preserving, its replies go to a foreign address and must loop.
#[inline(always)]
pub const fn on_connect(state: u32, owner: Owner, destination: Destination) -> OnConnect {
    let (keep_inside, counter) = match (state, owner, destination) {
        (ACTIVE, Owner::Workload, Destination::Remote) => (true, Counter::CapturedOutbound),
        (ACTIVE, Owner::Workload, Destination::Own) => (true, Counter::PassedOwnAddress),
        (ACTIVE, Owner::Workload, Destination::Loopback) => (false, Counter::PassedLoopback),
        (ACTIVE, Owner::Ztunnel, Destination::Own) => (true, Counter::ZtunnelToWorkload),
        (ACTIVE, Owner::Ztunnel, Destination::Remote | Destination::Loopback) => {
            (false, Counter::ZtunnelUpstream)
        }
        _ => (false, Counter::PassedInactive),
    };
    OnConnect { keep_inside, counter }
}

/// The mark of a socket whose packets stay inside, the bits of others kept.
#[inline(always)]
pub const fn loop_mark(mark: u32) -> u32 {
    with_mark(mark, LOOP_MARK)
}

/// Whether `connect()` must be refused while ztunnel does not listen on 15001. A looped IPv4 SYN that
/// nobody takes cannot be answered (the RST's source is not local), so the call itself has to fail.
#[inline(always)]
pub const fn needs_listener(state: u32, owner: Owner, destination: Destination) -> bool {
    matches!((state, owner, destination), (ACTIVE, Owner::Workload, Destination::Remote))
}

#[cfg(test)]
mod tests {
    use culvert_abi::pod::{DRAINING, INTRODUCTION, REGISTERED};
    use rstest::rstest;

    use super::*;
    use Destination::{Loopback, Own, Remote};
    use Owner::{Workload, Ztunnel};

    #[rstest]
    #[case(Workload, Remote, true, Counter::CapturedOutbound)]
    #[case(Workload, Own, true, Counter::PassedOwnAddress)]
    #[case(Workload, Loopback, false, Counter::PassedLoopback)]
    #[case(Ztunnel, Remote, false, Counter::ZtunnelUpstream)]
    #[case(Ztunnel, Own, true, Counter::ZtunnelToWorkload)]
    #[case(Ztunnel, Loopback, false, Counter::ZtunnelUpstream)]
    fn an_active_pod_decides_by_owner_and_destination(
        #[case] owner: Owner,
        #[case] destination: Destination,
        #[case] keep_inside: bool,
        #[case] counter: Counter,
    ) {
        assert_eq!(on_connect(ACTIVE, owner, destination), OnConnect { keep_inside, counter });
        let refusable = owner == Workload && destination == Remote;
        assert_eq!(needs_listener(ACTIVE, owner, destination), refusable);
    }

    #[test]
    fn no_other_state_marks_or_refuses() {
        for state in [0, REGISTERED, DRAINING, INTRODUCTION, 99] {
            for owner in [Workload, Ztunnel] {
                for destination in [Loopback, Own, Remote] {
                    assert!(!on_connect(state, owner, destination).keep_inside);
                    assert!(!needs_listener(state, owner, destination));
                }
            }
        }
    }

    #[test]
    fn a_mark_set_by_the_workload_does_not_survive() {
        for mark in [0x539, 0x40539, 0x111, 0] {
            assert_eq!(loop_mark(mark) & 0xfff, 0x111);
        }
    }
}
