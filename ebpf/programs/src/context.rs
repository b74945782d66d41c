//! Reads addresses and ports out of the kernel's contexts, into one form and byte order.
//!
//! Every field is read with a volatile read *before* the family is looked at: LLVM otherwise merges
//! the two branches into one load at a computed offset, which the verifier rejects ("dereference of
//! modified ctx ptr").

use aya_ebpf::{
    bindings::{SO_MARK, SOL_SOCKET, bpf_sockopt},
    programs::{SkLookupContext, SockAddrContext, SockOpsContext, SockoptContext},
};
use culvert_abi::Address;

use crate::steer::Packet;

const AF_INET: u32 = 2;
/// `IPPROTO_TCP`.
pub const IPPROTO_TCP: u32 = 6;
/// `IPPROTO_MPTCP`.
pub const IPPROTO_MPTCP: u32 = 262;
const SOCK_STREAM: u32 = 1;

macro_rules! read {
    ($context:ident.$($field:tt)+) => {{
        // SAFETY: the context is valid while the program runs, the verifier checks the access.
        let field = unsafe { &raw const (*$context).$($field)+ };
        // SAFETY: as above.
        unsafe { field.read_volatile() }
    }};
}

pub(crate) use read;

macro_rules! read_words {
    ($context:ident.$field:ident) => {
        [
            $crate::context::read!($context.$field[0]),
            $crate::context::read!($context.$field[1]),
            $crate::context::read!($context.$field[2]),
            $crate::context::read!($context.$field[3]),
        ]
    };
}

pub(crate) use read_words;

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

/// The TCP state (`BPF_TCP_*`) of the socket of a `sock_ops` program.
#[inline(always)]
pub fn state(context: &SockOpsContext) -> u32 {
    let context = context.ops;
    read!(context.state)
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
    (pick(family, local4, local6), pick(family, remote4, remote6))
}

/// The address of a family.
#[inline(always)]
pub const fn pick(family: u32, v4_be: u32, v6_be: [u32; 4]) -> Address {
    if family == AF_INET { Address::from_v4_be(v4_be) } else { Address::from_v6_be(v6_be) }
}

/// The kernel hands a program no more of an option's value than this, bytes: one page, at the least.
const LONGEST_OPTION: i32 = 4096;

/// Whether a `setsockopt()` is one of SO_MARK.
#[inline(always)]
pub fn is_mark(context: &SockoptContext) -> bool {
    let context = context.sockopt;
    let (level, name) = (read!(context.level), read!(context.optname));
    level == SOL_SOCKET as i32 && name == SO_MARK as i32
}

/// Says that the program did not look at the value. If it is longer than what was shown, the call would
/// fail otherwise (EFAULT; `__cgroup_bpf_run_filter_setsockopt`, kernel/bpf/cgroup.c). A shorter one may have
/// been changed by somebody else's program.
#[inline(always)]
pub fn leave_option(context: &SockoptContext) {
    let context = context.sockopt;
    if read!(context.optlen) > LONGEST_OPTION {
        set_length(context, 0);
    }
}

/// The value of an option that is a `u32`, in the copy that the kernel will use.
pub struct OptionValue(*mut u32);

impl OptionValue {
    /// None if the caller gave less, which the kernel refuses.
    #[inline(always)]
    pub fn of(context: &SockoptContext) -> Option<Self> {
        let context = context.sockopt;
        let length = read!(context.optlen);
        let (value, end) =
            (read!(context.__bindgen_anon_2.optval), read!(context.__bindgen_anon_3.optval_end));
        let value = value.cast::<u32>();
        (length >= size_of::<u32>() as i32 && value.wrapping_add(1) <= end.cast()).then_some(Self(value))
    }

    /// What the caller gave.
    #[inline(always)]
    pub fn get(&self) -> u32 {
        // SAFETY: within the bounds that `of` has checked.
        unsafe { self.0.read() }
    }

    /// Makes the kernel take `set` for it.
    #[inline(always)]
    pub fn replace(&self, context: &SockoptContext, set: u32) {
        // SAFETY: as above.
        unsafe { self.0.write(set) };
        // Otherwise a long value would be read from the caller once more.
        set_length(context.sockopt, size_of::<u32>() as i32);
    }
}

#[inline(always)]
fn set_length(context: *mut bpf_sockopt, length: i32) {
    // SAFETY: the context is valid while the program runs.
    let field = unsafe { &raw mut (*context).optlen };
    // SAFETY: this field may be written.
    unsafe { field.write_volatile(length) };
}
