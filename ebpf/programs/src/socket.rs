//! Whose socket it is.

use core::ptr::null_mut;

use aya_ebpf::{
    EbpfContext,
    bindings::{
        BPF_SK_STORAGE_GET_F_CREATE, BPF_TCP_CLOSE, BPF_TCP_LISTEN, SO_MARK, SO_REUSEADDR, SOL_SOCKET,
        bpf_sock,
    },
    helpers::{bpf_get_current_pid_tgid, bpf_setsockopt, bpf_sk_storage_get},
    programs::{SockAddrContext, SockContext, SockOpsContext, SockoptContext},
};
use culvert_abi::{Address, ztunnel::LABEL_ZTUNNEL};

use crate::{
    context::{IPPROTO_MPTCP, IPPROTO_TCP, pick, read, read_words},
    maps::{SOCKET_LABELS, ZTUNNELS, exists},
    marks::Phase,
};

const TCP_CLOSE: u32 = BPF_TCP_CLOSE;
const TCP_LISTEN: u32 = BPF_TCP_LISTEN;

/// Who created a socket. Marks do not tell: a workload with CAP_NET_RAW can set ztunnel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A process known as ztunnel, or the socket was accepted by one of its listeners.
    Ztunnel,
    /// Anybody else.
    Workload,
}

/// A socket of a hook's context (`struct bpf_sock`).
#[derive(Clone, Copy)]
pub struct Socket(*mut bpf_sock);

impl Socket {
    /// The one that is created (`cgroup/sock_create`).
    #[inline(always)]
    pub const fn created(context: &SockContext) -> Self {
        Self(context.sock)
    }

    /// The one that binds or connects.
    #[inline(always)]
    pub const fn addressed(context: &SockAddrContext) -> Self {
        // SAFETY: the context is valid while the program runs.
        let context = unsafe { &*context.sock_addr };
        // SAFETY: the kernel always sets the socket of this context.
        Self(unsafe { context.__bindgen_anon_1.sk })
    }

    /// The one that a `sock_ops` program was called for; none while it is only a request.
    #[inline(always)]
    pub fn followed(context: &SockOpsContext) -> Option<Self> {
        // SAFETY: the context is valid while the program runs.
        let context = unsafe { &*context.ops };
        // SAFETY: the field holds the socket, or null.
        let sk = unsafe { context.__bindgen_anon_2.sk };
        (!sk.is_null()).then_some(Self(sk))
    }

    /// The one whose option is set.
    #[inline(always)]
    pub const fn optioned(context: &SockoptContext) -> Self {
        // SAFETY: the context is valid while the program runs.
        let context = unsafe { &*context.sockopt };
        // SAFETY: the kernel always sets the socket of this context.
        Self(unsafe { context.__bindgen_anon_1.sk })
    }

    /// Whose it is. The label is the hooks' only way to tell ztunnel, whatever task is current.
    #[inline(always)]
    pub fn owner(self) -> Owner {
        // SAFETY: the verifier checks map and socket.
        let label = unsafe { bpf_sk_storage_get(SOCKET_LABELS.as_ptr(), self.0.cast(), null_mut(), 0) };
        if exists(!label.is_null()) { Owner::Ztunnel } else { Owner::Workload }
    }

    /// Labels it as ztunnel's. Sockets it accepts inherit the label (BPF_F_CLONE). False when there is
    /// no memory for the label.
    #[inline(always)]
    pub fn label_ztunnel(self) -> bool {
        let mut label = LABEL_ZTUNNEL;
        let value = (&raw mut label).cast();
        let create = u64::from(BPF_SK_STORAGE_GET_F_CREATE);
        // SAFETY: as above; `value` outlives the call.
        !unsafe { bpf_sk_storage_get(SOCKET_LABELS.as_ptr(), self.0.cast(), value, create) }.is_null()
    }

    /// Whether it is bound to an address.
    #[inline(always)]
    pub fn has_source(self) -> bool {
        // SAFETY: as above.
        let v4 = unsafe { (*self.0).src_ip4 };
        let word = |index: usize| {
            // SAFETY: as above; a volatile read because the verifier takes single words only.
            let field = unsafe { &raw const (*self.0).src_ip6[index] };
            // SAFETY: as above.
            unsafe { field.read_volatile() }
        };
        v4 | word(0) | word(1) | word(2) | word(3) != 0
    }

    /// Whether it is an MPTCP socket, which has no packets of its own.
    #[inline(always)]
    pub fn is_mptcp(self) -> bool {
        let socket = self.0;
        read!(socket.protocol) == IPPROTO_MPTCP
    }

    /// How far it is. A socket that is not TCP's is idle for ever.
    #[inline(always)]
    pub fn phase(self) -> Phase {
        let socket = self.0;
        let (protocol, state) = (read!(socket.protocol), read!(socket.state));
        match state {
            _ if protocol != IPPROTO_TCP && protocol != IPPROTO_MPTCP => Phase::Idle,
            TCP_CLOSE => Phase::Idle,
            TCP_LISTEN => Phase::Listening,
            _ => Phase::Connected,
        }
    }

    /// Its peer's address.
    #[inline(always)]
    pub fn remote(self) -> Address {
        let socket = self.0;
        pick(read!(socket.family), read!(socket.dst_ip4), read_words!(socket.dst_ip6))
    }

    /// Its SO_MARK.
    #[inline(always)]
    pub const fn mark(self) -> u32 {
        // SAFETY: not null, and the verifier checks the access.
        unsafe { (*self.0).mark }
    }
}

/// Process id (tgid) of the current task, in the initial pid namespace.
#[inline(always)]
pub fn current_tgid() -> u32 {
    (bpf_get_current_pid_tgid() >> 32) as u32
}

/// Whether the current task belongs to a known ztunnel.
#[inline(always)]
pub fn current_is_ztunnel() -> bool {
    ZTUNNELS.get_ptr(current_tgid()).is_some()
}

/// Sets SO_MARK of the socket of a `sock_ops` or `sock_addr` program.
#[inline(always)]
pub fn set_mark(context: &impl EbpfContext, mark: u32) -> bool {
    set_option(context, SO_MARK, mark)
}

/// Sets SO_REUSEADDR of the socket of a `sock_ops` or `sock_addr` program. In `bpf_setsockopt` since
/// Linux 6.1 (29003875bd5b).
#[inline(always)]
pub fn share_port(context: &impl EbpfContext) -> bool {
    set_option(context, SO_REUSEADDR, 1)
}

#[inline(always)]
fn set_option(context: &impl EbpfContext, option: u32, value: u32) -> bool {
    let mut value = value;
    let pointer = (&raw mut value).cast();
    // SAFETY: the verifier checks context and buffer; `value` outlives the call.
    unsafe { bpf_setsockopt(context.as_ptr(), SOL_SOCKET as i32, option as i32, pointer, 4) == 0 }
}
