//! What becomes of a mark that a workload sets on a connection or listener of its own.

use culvert_abi::{
    Counter,
    pod::{ACTIVE, DRAINING, REGISTERED},
    ztunnel::{ACCEPTED_MARK, LOOP_MARK, MARK_MASK, with_mark},
};

use crate::{outbound::Destination, socket::Owner};

/// How far a TCP socket is (`enum tcp_state`, include/net/tcp_states.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not connected: `connect()` and `listen()` will see to its mark.
    Idle,
    /// Listening.
    Listening,
    /// Connecting, connected or closing.
    Connected,
}

/// What to do with a `setsockopt(SO_MARK)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnSetMark {
    /// The mark to set in place of the one asked for.
    pub replace: Option<u32>,
    /// The counter of this path; a mark that is left alone is none of ours, and ztunnel sets many.
    pub counter: Option<Counter>,
}

/// A connection keeps our part of its mark, a listener stays without one (see
/// [`ClearMark`](crate::ports::OnListen::ClearMark)). `ours` is our part of the socket's mark now.
#[inline(always)]
pub const fn on_set_mark(state: u32, owner: Owner, phase: Phase, ours: u32, asked: u32) -> OnSetMark {
    let untouched = OnSetMark { replace: None, counter: None };
    match (state, owner, phase) {
        (REGISTERED | ACTIVE, Owner::Workload, Phase::Listening) if asked != 0 => {
            OnSetMark { replace: Some(0), counter: Some(Counter::MarkCleared) }
        }
        (REGISTERED | ACTIVE | DRAINING, Owner::Workload, Phase::Connected) => match ours {
            LOOP_MARK | ACCEPTED_MARK => {
                OnSetMark { replace: Some(with_mark(asked, ours)), counter: Some(Counter::MarkKept) }
            }
            _ => untouched,
        },
        _ => untouched,
    }
}

/// Our part of the mark of the connection that carries an MPTCP socket: the socket's own is what the workload
/// asked for, and is copied to the connection (`mptcp_setsockopt_sol_socket_int`, net/mptcp/sockopt.c).
#[inline(always)]
pub const fn of_mptcp(destination: Destination) -> u32 {
    match destination {
        Destination::Remote => LOOP_MARK,
        Destination::Own => ACCEPTED_MARK,
        Destination::Loopback => 0,
    }
}

/// What a mark must be changed to before the kernel routes a connection of the workload, if at all: with
/// one of ours it would be looped already, and be given its destination for a source.
#[inline(always)]
pub const fn without_our_routing(mark: u32) -> Option<u32> {
    match mark & MARK_MASK {
        LOOP_MARK | ACCEPTED_MARK => Some(with_mark(mark, 0)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use culvert_abi::pod::INTRODUCTION;

    use super::*;
    use Owner::{Workload, Ztunnel};

    #[test]
    fn a_connection_keeps_our_part_of_its_mark() {
        for state in [REGISTERED, ACTIVE, DRAINING] {
            for (ours, asked, set) in [
                (LOOP_MARK, 0, 0x111),
                (LOOP_MARK, 0x40539, 0x40111),
                (ACCEPTED_MARK, 0xffff_ffff, 0xffff_f112),
            ] {
                let kept = OnSetMark { replace: Some(set), counter: Some(Counter::MarkKept) };
                assert_eq!(on_set_mark(state, Workload, Phase::Connected, ours, asked), kept);
            }
        }
    }

    #[test]
    fn a_listener_stays_without_a_mark() {
        for state in [REGISTERED, ACTIVE] {
            let cleared = OnSetMark { replace: Some(0), counter: Some(Counter::MarkCleared) };
            assert_eq!(on_set_mark(state, Workload, Phase::Listening, 0, 7), cleared);
            let nothing = OnSetMark { replace: None, counter: None };
            assert_eq!(on_set_mark(state, Workload, Phase::Listening, 0, 0), nothing);
        }
    }

    #[test]
    fn all_other_marks_are_their_owners_business() {
        let nothing = OnSetMark { replace: None, counter: None };
        for state in [REGISTERED, ACTIVE, DRAINING] {
            for ours in [0, LOOP_MARK, ACCEPTED_MARK, 0x539] {
                assert_eq!(on_set_mark(state, Workload, Phase::Idle, ours, 7), nothing);
                for phase in [Phase::Idle, Phase::Listening, Phase::Connected] {
                    assert_eq!(on_set_mark(state, Ztunnel, phase, ours, 7), nothing);
                }
            }
            assert_eq!(on_set_mark(state, Workload, Phase::Connected, 0x539, 7), nothing);
        }
        assert_eq!(on_set_mark(DRAINING, Workload, Phase::Listening, 0, 7), nothing);
        for state in [0, INTRODUCTION, 99] {
            let unseen = OnSetMark { replace: None, counter: None };
            assert_eq!(on_set_mark(state, Workload, Phase::Connected, LOOP_MARK, 7), unseen);
            assert_eq!(on_set_mark(state, Workload, Phase::Listening, 0, 7), unseen);
        }
    }

    #[test]
    fn only_marks_that_route_are_taken_off_before_routing() {
        assert_eq!(without_our_routing(0x111), Some(0));
        assert_eq!(without_our_routing(0x70112), Some(0x70000));
        for mark in [0, 7, 0x539, 0x40539, 0x110] {
            assert_eq!(without_our_routing(mark), None);
        }
    }
}
