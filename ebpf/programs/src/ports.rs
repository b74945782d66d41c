//! Who may bind and listen on which port of a pod's netns.

use culvert_abi::{
    Counter,
    listener::DUAL_STACK,
    pod::{ACTIVE, INTRODUCTION, REGISTERED},
    ztunnel::{DNS_PORT, is_reserved},
};

use crate::socket::Owner;

/// What to do with a `bind()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBind {
    /// A netns or state in which we have no say.
    NotOurs,
    /// Nothing to do.
    Leave(Counter),
    /// EADDRINUSE.
    Refuse,
    /// Set SO_REUSEADDR. ztunnel's accepted sockets sit on the workload's port numbers, with
    /// SO_REUSEADDR from their listener; with it on this side too they are no obstacle (istio#52260).
    /// A genuine conflict with a socket in LISTEN still fails.
    Share,
    /// The caller is a ztunnel: remember its process.
    Introduce,
}

/// ztunnel's ports are reserved from registration on: a workload that listened there would get a
/// share of everybody's traffic (`bpf_sk_assign` balances over a SO_REUSEPORT group; istio#49078).
#[inline(always)]
pub const fn on_bind(state: u32, owner: Owner, is_tcp: bool, port: u16) -> OnBind {
    match (state, owner) {
        (INTRODUCTION, _) => {
            if is_reserved(port) {
                OnBind::Introduce
            } else {
                OnBind::NotOurs
            }
        }
        (REGISTERED | ACTIVE, Owner::Ztunnel) => OnBind::Leave(Counter::BindByZtunnel),
        (REGISTERED | ACTIVE, Owner::Workload) => {
            if is_reserved(port) {
                OnBind::Refuse
            } else if is_tcp && port != 0 {
                OnBind::Share
            } else {
                OnBind::Leave(Counter::BindUntouched)
            }
        }
        _ => OnBind::NotOurs,
    }
}

/// What to do with a `listen()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnListen {
    /// A netns or state in which we have no say.
    NotOurs,
    /// Put it into `LISTENERS` with this family, and set SO_REUSEADDR: accepted sockets inherit it.
    Store {
        /// Family of the key.
        family: u16,
    },
    /// On a port of ztunnel, by somebody else.
    Foreign,
    /// Clear the mark: the kernel gives an accepted socket the mark of its SYN, which must be LOOP,
    /// only if the listener has none (`inet_request_mark`, include/net/inet_sock.h).
    ClearMark,
    /// Nothing to do.
    Leave,
}

/// Only ztunnel's sockets are ever stored, whatever mark a socket carries.
#[inline(always)]
pub const fn on_listen(state: u32, owner: Owner, family: u16, port: u16, mark: u32) -> OnListen {
    match (state, owner) {
        // In an introduction too: a ztunnel is known as long as it listens there.
        (REGISTERED | ACTIVE | INTRODUCTION, Owner::Ztunnel) if is_reserved(port) => {
            OnListen::Store { family: if port == DNS_PORT { family } else { DUAL_STACK } }
        }
        (REGISTERED | ACTIVE, Owner::Ztunnel) => OnListen::Leave,
        (REGISTERED | ACTIVE, Owner::Workload) => {
            if is_reserved(port) {
                OnListen::Foreign
            } else if mark != 0 {
                OnListen::ClearMark
            } else {
                OnListen::Leave
            }
        }
        _ => OnListen::NotOurs,
    }
}

#[cfg(test)]
mod tests {
    use culvert_abi::pod::DRAINING;

    use super::*;

    const RESERVED: [u16; 4] = [15001, 15006, 15008, 15053];

    #[test]
    fn a_workload_never_gets_ztunnels_ports() {
        for state in [REGISTERED, ACTIVE] {
            for port in RESERVED {
                for is_tcp in [true, false] {
                    assert_eq!(on_bind(state, Owner::Workload, is_tcp, port), OnBind::Refuse);
                }
                for mark in [0, 0x539, 0x111] {
                    assert_eq!(on_listen(state, Owner::Workload, 10, port, mark), OnListen::Foreign);
                }
            }
        }
    }

    #[test]
    fn a_workload_shares_every_other_tcp_port_it_names() {
        for port in [1, 80, 15000, 15002, 65535] {
            assert_eq!(on_bind(ACTIVE, Owner::Workload, true, port), OnBind::Share);
            assert_eq!(on_bind(ACTIVE, Owner::Workload, false, port), OnBind::Leave(Counter::BindUntouched));
        }
        assert_eq!(on_bind(ACTIVE, Owner::Workload, true, 0), OnBind::Leave(Counter::BindUntouched));
    }

    #[test]
    fn ztunnel_binds_and_listens_freely() {
        for port in RESERVED {
            assert_eq!(on_bind(ACTIVE, Owner::Ztunnel, true, port), OnBind::Leave(Counter::BindByZtunnel));
            let family = if port == 15053 { 10 } else { DUAL_STACK };
            assert_eq!(on_listen(REGISTERED, Owner::Ztunnel, 10, port, 0x539), OnListen::Store { family });
        }
        assert_eq!(on_listen(ACTIVE, Owner::Ztunnel, 2, 15080, 0x539), OnListen::Leave);
    }

    #[test]
    fn a_mark_on_the_workloads_listener_is_cleared() {
        assert_eq!(on_listen(ACTIVE, Owner::Workload, 2, 80, 7), OnListen::ClearMark);
        assert_eq!(on_listen(ACTIVE, Owner::Workload, 2, 80, 0), OnListen::Leave);
    }

    #[test]
    fn whoever_binds_in_an_introduction_is_introduced() {
        for owner in [Owner::Workload, Owner::Ztunnel] {
            for port in RESERVED {
                assert_eq!(on_bind(INTRODUCTION, owner, false, port), OnBind::Introduce);
            }
            assert_eq!(on_bind(INTRODUCTION, owner, true, 80), OnBind::NotOurs);
        }
        let stored = OnListen::Store { family: DUAL_STACK };
        assert_eq!(on_listen(INTRODUCTION, Owner::Ztunnel, 10, 15001, 0x539), stored);
        assert_eq!(on_listen(INTRODUCTION, Owner::Workload, 10, 15001, 0x539), OnListen::NotOurs);
    }

    #[test]
    fn other_states_are_not_ours() {
        for state in [0, DRAINING, 99] {
            for owner in [Owner::Workload, Owner::Ztunnel] {
                assert_eq!(on_bind(state, owner, true, 15001), OnBind::NotOurs);
                assert_eq!(on_listen(state, owner, 10, 15001, 0), OnListen::NotOurs);
            }
        }
    }
}
