//! Policy routing inside a pod's netns.
//!
//! ```text
//! 90   iif lo fwmark 0x111/0xfff lookup 100      packets that must stay inside
//! 91   iif lo fwmark 0x111/0xfff unreachable     table 100 lost its routes: EHOSTUNREACH, nothing leaves
//! 100  lookup local                              moved here from preference 0
//! 101  iif lo fwmark 0x112/0xfff lookup 100      answers to a workload that is gone; a pod to itself
//! 102  iif lo fwmark 0x112/0xfff unreachable     as 91
//! table 100: local default dev lo, and for each interface a worse one (SO_BINDTODEVICE)
//! ```
//!
//! Where routing is not enough (IPv4, a socket bound to an interface) see [`crate::guard`].
//!
//! `iif lo` is what the netns itself sent; a mark that came in from outside changes nothing.

use std::{io, net::IpAddr};

use culvert_abi::ztunnel::{ACCEPTED_MARK, LOOP_MARK, MARK_MASK};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage as Message,
    address::{AddressAttribute, AddressMessage},
    link::{LinkAttribute, LinkFlags, LinkMessage},
    route::{RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType},
    rule::{RuleAction, RuleAttribute, RuleMessage},
};
use netlink_sys::protocols::NETLINK_ROUTE;

use crate::netlink::Netlink;

const TABLE_LOOP: u8 = 100;
const TABLE_LOCAL: u8 = 255;
const PREFERENCE_LOOP: u32 = 90;
const PREFERENCE_GUARD: u32 = 91;
const PREFERENCE_LOCAL: u32 = 100;
const PREFERENCE_ACCEPTED: u32 = 101;
const PREFERENCE_ACCEPTED_GUARD: u32 = 102;
const LOOPBACK_IFINDEX: u32 = 1;
const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];

/// What the netns looks like: the part that routing and own addresses follow.
pub(crate) struct Interfaces {
    /// Indexes, `lo` included.
    pub(crate) indexes: Vec<u32>,
    /// Every address of every interface.
    pub(crate) addresses: Vec<IpAddr>,
    /// Packet sizes of `lo`.
    pub(crate) loopback: PacketSizes,
}

/// How large a packet on `lo` may be, bytes; 0 where the kernel has no such limit (IPv4: Linux 6.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PacketSizes {
    pub(crate) gso: u32,
    pub(crate) gro: u32,
    pub(crate) gso_ipv4: u32,
    pub(crate) gro_ipv4: u32,
}

/// The largest that Linux accepts (`GSO_MAX_SIZE`, include/linux/netdevice.h). One stream through
/// ztunnel: 1.25 times the throughput of 64 KiB.
const BIG_TCP: u32 = 524_280;

impl PacketSizes {
    /// Each size that the kernel has, at its largest.
    pub(crate) const fn enlarged(self) -> Self {
        const fn enlarge(size: u32) -> u32 {
            if size == 0 { 0 } else { BIG_TCP }
        }
        Self {
            gso: enlarge(self.gso),
            gro: enlarge(self.gro),
            gso_ipv4: enlarge(self.gso_ipv4),
            gro_ipv4: enlarge(self.gro_ipv4),
        }
    }
}

/// Brings up `lo` of the calling thread's netns.
pub(crate) fn raise_loopback() -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = LOOPBACK_IFINDEX;
    link.header.flags = LinkFlags::Up;
    link.header.change_mask = LinkFlags::Up;
    let answers = Netlink::open(NETLINK_ROUTE)?.batch(vec![(Message::SetLink(link), 0)])?;
    answers.into_iter().collect()
}

/// Reads interfaces and addresses.
pub(crate) fn interfaces(netlink: &mut Netlink) -> io::Result<Interfaces> {
    let (mut indexes, mut loopback) = (Vec::new(), PacketSizes::default());
    for message in netlink.dump(Message::GetLink(LinkMessage::default()))? {
        let Message::NewLink(link) = message else { continue };
        indexes.push(link.header.index);
        if link.header.index == LOOPBACK_IFINDEX {
            for attribute in link.attributes {
                match attribute {
                    LinkAttribute::GsoMaxSize(size) => loopback.gso = size,
                    LinkAttribute::GroMaxSize(size) => loopback.gro = size,
                    LinkAttribute::GsoIpv4MaxSize(size) => loopback.gso_ipv4 = size,
                    LinkAttribute::GroIpv4MaxSize(size) => loopback.gro_ipv4 = size,
                    _ => {}
                }
            }
        }
    }
    let mut addresses = Vec::new();
    for message in netlink.dump(Message::GetAddress(AddressMessage::default()))? {
        let Message::NewAddress(address) = message else {
            continue;
        };
        // On a point-to-point interface ADDRESS is the peer's and LOCAL is ours.
        let local = address.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(local) => Some(*local),
            _ => None,
        });
        let only = address.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        });
        addresses.extend(local.or(only));
    }
    Ok(Interfaces { indexes, addresses, loopback })
}

/// Puts in the routes that are missing. Repeating it changes nothing.
///
/// Routes of an interface that cannot have one now (down, or IPv6 is off) are left out: the guards
/// answer for them, and the event that ends that state brings us here again.
pub(crate) fn ensure_routes(netlink: &mut Netlink, interfaces: &[u32]) -> io::Result<()> {
    let routes = FAMILIES
        .iter()
        .flat_map(|family| interfaces.iter().map(|index| Message::NewRoute(loop_route(*family, *index))));
    for answer in netlink.batch(routes.map(|route| (route, NLM_F_CREATE | NLM_F_EXCL)).collect())? {
        match answer {
            Err(error) if is_unready_interface(&error) => {}
            answer => tolerate(answer, &[libc::EEXIST])?,
        }
    }
    Ok(())
}

/// Puts in the rules that are missing. At no moment is there no local table.
pub(crate) fn ensure_rules(netlink: &mut Netlink) -> io::Result<()> {
    let rules = FAMILIES.into_iter().flat_map(our_rules).map(Message::NewRule);
    for answer in netlink.batch(rules.map(|rule| (rule, NLM_F_CREATE | NLM_F_EXCL)).collect())? {
        tolerate(answer, &[libc::EEXIST])?;
    }
    let moved = FAMILIES.map(|family| (Message::DelRule(local_rule(family, 0)), 0));
    remove(netlink, moved.into())
}

/// Takes everything out again and puts the local table back in its place first.
pub(crate) fn restore(netlink: &mut Netlink, interfaces: &[u32]) -> io::Result<()> {
    let back =
        FAMILIES.map(|family| (Message::NewRule(kernels_local_rule(family)), NLM_F_CREATE | NLM_F_EXCL));
    for answer in netlink.batch(back.into())? {
        tolerate(answer, &[libc::EEXIST])?;
    }
    let mut requests = Vec::new();
    for family in FAMILIES {
        for rule in our_rules(family) {
            requests.push((Message::DelRule(rule), 0));
        }
        for index in interfaces {
            requests.push((Message::DelRoute(loop_route(family, *index)), 0));
        }
    }
    remove(netlink, requests)
}

/// Sets the packet sizes of `lo`; a size of 0 is left as it is.
pub(crate) fn set_packet_sizes(netlink: &mut Netlink, sizes: PacketSizes) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = LOOPBACK_IFINDEX;
    link.attributes = [
        LinkAttribute::GsoMaxSize(sizes.gso),
        LinkAttribute::GroMaxSize(sizes.gro),
        LinkAttribute::GsoIpv4MaxSize(sizes.gso_ipv4),
        LinkAttribute::GroIpv4MaxSize(sizes.gro_ipv4),
    ]
    .into_iter()
    .zip([sizes.gso, sizes.gro, sizes.gso_ipv4, sizes.gro_ipv4])
    .filter(|(_, size)| *size != 0)
    .map(|(attribute, _)| attribute)
    .collect();
    if link.attributes.is_empty() {
        return Ok(());
    }
    netlink.batch(vec![(Message::SetLink(link), 0)])?.into_iter().collect()
}

fn remove(netlink: &mut Netlink, requests: Vec<(Message, u16)>) -> io::Result<()> {
    for answer in netlink.batch(requests)? {
        tolerate(answer, &[libc::ENOENT, libc::ESRCH, libc::ENODEV])?;
    }
    Ok(())
}

/// Answers that mean "nothing to do"; a kernel without IPv6 has neither rules nor routes of it.
fn tolerate(answer: io::Result<()>, codes: &[i32]) -> io::Result<()> {
    match answer {
        Err(error) if error.raw_os_error().is_some_and(|code| codes.contains(&code)) => Ok(()),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP)) => Ok(()),
        other => other,
    }
}

/// Down, gone, or without IPv6 (`disable_ipv6`: EACCES; MTU below 1280: EINVAL or ENODEV).
fn is_unready_interface(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENETDOWN | libc::ENODEV | libc::EACCES | libc::EINVAL | libc::ENETUNREACH)
    )
}

fn our_rules(family: AddressFamily) -> [RuleMessage; 5] {
    let marked = |preference, mark, action, table| {
        let mut rule = rule(family, preference, action, table);
        rule.attributes.push(RuleAttribute::Iifname("lo".into()));
        rule.attributes.push(RuleAttribute::FwMark(mark));
        rule.attributes.push(RuleAttribute::FwMask(MARK_MASK));
        rule
    };
    [
        marked(PREFERENCE_GUARD, LOOP_MARK, RuleAction::Unreachable, 0),
        marked(PREFERENCE_ACCEPTED_GUARD, ACCEPTED_MARK, RuleAction::Unreachable, 0),
        local_rule(family, PREFERENCE_LOCAL),
        marked(PREFERENCE_LOOP, LOOP_MARK, RuleAction::ToTable, TABLE_LOOP),
        marked(PREFERENCE_ACCEPTED, ACCEPTED_MARK, RuleAction::ToTable, TABLE_LOOP),
    ]
}

fn local_rule(family: AddressFamily, preference: u32) -> RuleMessage {
    rule(family, preference, RuleAction::ToTable, TABLE_LOCAL)
}

/// As the kernel makes it. A rule that differs in its protocol only would be a second one beside it.
fn kernels_local_rule(family: AddressFamily) -> RuleMessage {
    let mut rule = local_rule(family, 0);
    rule.attributes.push(RuleAttribute::Protocol(RouteProtocol::Kernel));
    rule
}

fn rule(family: AddressFamily, preference: u32, action: RuleAction, table: u8) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = family;
    rule.header.action = action;
    rule.header.table = table;
    rule.attributes.push(RuleAttribute::Priority(preference));
    rule
}

/// One metric per interface: the kernel tells routes of one table apart by it, not by the interface.
fn loop_route(family: AddressFamily, index: u32) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = family;
    route.header.table = TABLE_LOOP;
    route.header.protocol = RouteProtocol::Static;
    route.header.kind = RouteType::Local;
    route.header.scope = RouteScope::Host;
    route.attributes.push(RouteAttribute::Oif(index));
    let base = if family == AddressFamily::Inet6 { 2048 } else { 10 };
    let metric = match (family, index) {
        (AddressFamily::Inet6, LOOPBACK_IFINDEX) => 1024,
        (_, LOOPBACK_IFINDEX) => 1,
        (_, index) => base + index,
    };
    route.attributes.push(RouteAttribute::Priority(metric));
    route
}
