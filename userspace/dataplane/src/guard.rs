//! What keeps a marked IPv4 packet inside when routing does not.
//!
//! For a socket bound to an interface, IPv4 does without a route: any failed lookup, the `unreachable` of
//! our guard rule included, means "the destination is on that link" (`ip_route_output_key_hash_rcu`,
//! net/ipv4/route.c: "Apparently, routing tables are wrong"). Such a route disappears with `ip link set …
//! down`, is not there yet on an interface that has just appeared, or is flushed by somebody. So the
//! netns has an XFRM policy that blocks what carries one of our marks (EPERM). It is asked whenever a
//! socket is given a route, never for a packet, and never for routes by `lo` (`DST_NOXFRM`, which IPv4 sets
//! for loopback): legitimate connections do not meet it.
//!
//! IPv6 needs no such policy, a failed lookup fails there, and could have none: its routes by `lo` are not
//! exempt (`fib6_info_dst_flags`, net/ipv6/route.c, knows DST_NOPOLICY only), and a policy sees the interface
//! a socket is bound to, never that of the route (`__xfrm6_selector_match`, net/xfrm/xfrm_policy.c). Nor is there
//! another place that knows a route before its first packet: no hook of a socket can look one up
//! (`bpf_fib_lookup` is for packets), none is called when a rule is deleted, and binding the socket to `lo` would
//! keep ztunnel's answers from it, which come by the interface that owns the address. So whoever deletes both
//! rules of a mark (CAP_NET_ADMIN) lets IPv6 out until [`crate::watch`] has put them back.

use std::io;

use culvert_abi::ztunnel::{ACCEPTED_MARK, LOOP_MARK, MARK_MASK};
use netlink_packet_core::NLM_F_CREATE;
use netlink_packet_xfrm::{
    Mark, Selector, UserPolicyId, UserPolicyInfo, XfrmAttrs, XfrmMessage,
    constants::{XFRM_POLICY_BLOCK, XFRM_POLICY_OUT},
    policy::{DelGetMessage, ModifyMessage},
};
use netlink_sys::protocols::NETLINK_XFRM;

use crate::netlink::Netlink;

const MARKS: [u32; 2] = [LOOP_MARK, ACCEPTED_MARK];

/// Puts the policies into the calling thread's netns; those that are there stay.
pub(crate) fn ensure() -> io::Result<()> {
    let policies = MARKS.map(|mark| {
        let user_policy_info = UserPolicyInfo {
            selector: everything(),
            direction: XFRM_POLICY_OUT,
            action: XFRM_POLICY_BLOCK,
            ..UserPolicyInfo::default()
        };
        let message = ModifyMessage { user_policy_info, nlas: vec![attribute(mark)] };
        (XfrmMessage::AddPolicy(message), NLM_F_CREATE)
    });
    send(policies.into(), libc::EEXIST)
}

/// Takes them out again.
pub(crate) fn remove() -> io::Result<()> {
    let policies = MARKS.map(|mark| {
        let user_policy_id =
            UserPolicyId { selector: everything(), direction: XFRM_POLICY_OUT, ..UserPolicyId::default() };
        let message = DelGetMessage { user_policy_id, nlas: vec![attribute(mark)] };
        (XfrmMessage::DeletePolicy(message), 0)
    });
    send(policies.into(), libc::ENOENT)
}

fn send(requests: Vec<(XfrmMessage, u16)>, nothing_to_do: i32) -> io::Result<()> {
    for answer in Netlink::open(NETLINK_XFRM)?.batch(requests)? {
        match answer {
            Err(error) if error.raw_os_error() == Some(nothing_to_do) => {}
            answer => answer?,
        }
    }
    Ok(())
}

fn everything() -> Selector {
    Selector { family: libc::AF_INET as u16, ..Selector::default() }
}

fn attribute(mark: u32) -> XfrmAttrs {
    XfrmAttrs::Mark(Mark { value: mark, mask: MARK_MASK })
}
