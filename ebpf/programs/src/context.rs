//! Reads addresses and ports out of the kernel's contexts, into one form and byte order.
//!
//! Every field is read with a volatile read *before* the family is looked at: LLVM otherwise merges
//! the two branches into one load at a computed offset, which the verifier rejects ("dereference of
//! modified ctx ptr").

use aya_ebpf::programs::{SkLookupContext, SockAddrContext, SockOpsContext};
use culvert_abi::Address;

use crate::steer::Packet;

const AF_INET: u32 = 2;
const IPPROTO_TCP: u32 = 6;
const IPPROTO_MPTCP: u32 = 262;
const SOCK_STREAM: u32 = 1;

macro_rules! read {
    ($context:ident.$($field:tt)+) => {{
        // SAFETY: the context is valid while the program runs, the verifier checks the access.
        let field = unsafe { &raw const (*$context).$($field)+ };
        // SAFETY: as above.
        unsafe { field.read_volatile() }
    }};
}

macro_rules! read_words {
    ($context:ident.$field:ident) => {
        [
            read!($context.$field[0]),
            read!($context.$field[1]),
            read!($context.$field[2]),
            read!($context.$field[3]),
        ]
    };
}

/// The packet of a `sk_lookup` program.
#[inline(always)]
pub fn packet(context: &SkLookupContext) -> Packet {
    let context = context.lookup;
    let family = read!(context.family);
    let protocol = read!(context.protocol);
    let (local4, remote4) = (read!(context.local_ip4), read!(context.remote_ip4));
    let (local6, remote6) = (read_words!(context.local_ip6), read_words!(context.remote_ip6));
    // Host order, unlike the remote port (include/uapi/linux/bpf.h).
    let local_port = read!(context.local_port) as u16;
    let remote_port = u16::from_be(read!(context.remote_port));
    let ingress_ifindex = read!(context.ingress_ifindex);
    let (local, remote) = pair(family, local4, remote4, local6, remote6);
    Packet { is_tcp: protocol == IPPROTO_TCP, local, remote, local_port, remote_port, ingress_ifindex }
}

/// The ends of a socket in a `sock_ops` program. Ports in host order.
#[derive(Clone, Copy)]
pub struct Ends {
    /// The socket's own address.
    pub local: Address,
    /// Its peer's.
    pub remote: Address,
    /// The socket's own port.
    pub local_port: u16,
    /// Its peer's.
    pub remote_port: u16,
}

/// Reads both ends. A v4-mapped connection of an AF_INET6 socket gives the same result whichever
/// family the kernel reports for it.
#[inline(always)]
pub fn ends(context: &SockOpsContext) -> Ends {
    let context = context.ops;
    let family = read!(context.family);
    let (local4, remote4) = (read!(context.local_ip4), read!(context.remote_ip4));
    let (local6, remote6) = (read_words!(context.local_ip6), read_words!(context.remote_ip6));
    let local_port = read!(context.local_port) as u16;
    // The port in network order, in the upper half of a big-endian word.
    let remote_port = u32::from_be(read!(context.remote_port)) as u16;
    let (local, remote) = pair(family, local4, remote4, local6, remote6);
    Ends { local, remote, local_port, remote_port }
}

/// The address family of the socket of a `sock_ops` program.
#[inline(always)]
pub fn family(context: &SockOpsContext) -> u16 {
    let context = context.ops;
    read!(context.family) as u16
}

/// What a `bind()` or `connect()` named. Port in host order.
#[derive(Clone, Copy)]
pub struct Named {
    /// The address, or an unspecified one.
    pub address: Address,
    /// The port, or 0.
    pub port: u16,
    /// A TCP socket, MPTCP included.
    pub is_tcp: bool,
}

/// Reads the arguments of `bind4`, `connect4`.
#[inline(always)]
pub fn named4(context: &SockAddrContext) -> Named {
    let raw = context.sock_addr;
    named(context, Address::from_v4_be(read!(raw.user_ip4)))
}

/// Reads the arguments of `bind6`, `connect6`.
#[inline(always)]
pub fn named6(context: &SockAddrContext) -> Named {
    let raw = context.sock_addr;
    named(context, Address::from_v6_be(read_words!(raw.user_ip6)))
}

#[inline(always)]
fn named(context: &SockAddrContext, address: Address) -> Named {
    let context = context.sock_addr;
    let port = u16::from_be(read!(context.user_port) as u16);
    let (kind, protocol) = (read!(context.type_), read!(context.protocol));
    let is_tcp = kind == SOCK_STREAM && (protocol == IPPROTO_TCP || protocol == IPPROTO_MPTCP);
    Named { address, port, is_tcp }
}

#[inline(always)]
const fn pair(
    family: u32,
    local4: u32,
    remote4: u32,
    local6: [u32; 4],
    remote6: [u32; 4],
) -> (Address, Address) {
    if family == AF_INET {
        (Address::from_v4_be(local4), Address::from_v4_be(remote4))
    } else {
        (Address::from_v6_be(local6), Address::from_v6_be(remote6))
    }
}
