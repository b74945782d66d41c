//! What an accepted connection in a pod's netns was.

use culvert_abi::{Address, Counter, ztunnel::HBONE_PORT};

use crate::socket::Owner;

/// What to do when a connection has been accepted (`PASSIVE_ESTABLISHED_CB`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnAccept {
    /// ztunnel's end of a captured connection: a RST of a workload that is gone must come back to it.
    pub mark_accepted: bool,
    /// The counter of this path.
    pub counter: Counter,
}

/// Tells ztunnel's connections apart by the addresses: a captured one has a destination that is not
/// the pod's and a source that is.
#[inline(always)]
pub fn on_accept(
    owner: Owner,
    local: &Address,
    local_port: u16,
    remote: &Address,
    owns: impl Fn(&Address) -> bool,
) -> OnAccept {
    let plain = |counter| OnAccept { mark_accepted: false, counter };
    if matches!(owner, Owner::Workload) {
        plain(Counter::AcceptedByWorkload)
    } else if local.is_loopback() {
        plain(Counter::AcceptedLoopback)
    } else if owns(local) {
        plain(if local_port == HBONE_PORT { Counter::AcceptedHbone } else { Counter::AcceptedInbound })
    } else if owns(remote) {
        OnAccept { mark_accepted: true, counter: Counter::AcceptedOutbound }
    } else {
        plain(Counter::AcceptedUnknownAddress)
    }
}

#[cfg(test)]
mod tests {
    use core::net::IpAddr;

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(Owner::Workload, "10.0.0.5", 80, "10.0.0.9", Counter::AcceptedByWorkload)]
    #[case(Owner::Ztunnel, "127.0.0.1", 15053, "127.0.0.1", Counter::AcceptedLoopback)]
    #[case(Owner::Ztunnel, "10.0.0.5", 15008, "10.0.0.9", Counter::AcceptedHbone)]
    #[case(Owner::Ztunnel, "10.0.0.5", 80, "10.0.0.9", Counter::AcceptedInbound)]
    #[case(Owner::Ztunnel, "10.0.0.9", 15008, "10.0.0.5", Counter::AcceptedOutbound)]
    #[case(Owner::Ztunnel, "203.0.113.7", 80, "10.0.0.9", Counter::AcceptedUnknownAddress)]
    fn the_addresses_tell_what_was_accepted(
        #[case] owner: Owner,
        #[case] local: IpAddr,
        #[case] port: u16,
        #[case] remote: IpAddr,
        #[case] counter: Counter,
    ) {
        let own = Address::from(IpAddr::from([10, 0, 0, 5]));
        let mark_accepted = counter == Counter::AcceptedOutbound;
        let decided = on_accept(owner, &local.into(), port, &remote.into(), |address| *address == own);
        assert_eq!(decided, OnAccept { mark_accepted, counter });
    }
}
