//! Attached once per node, to the root of the cgroup2 hierarchy: follows what sockets do.
#![cfg_attr(target_arch = "bpf", no_std)]
#![cfg_attr(target_arch = "bpf", no_main)]

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG,
        BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB,
        BPF_SOCK_OPS_TCP_LISTEN_CB, BPF_TCP_CLOSE, BPF_TCP_SYN_SENT,
    },
    helpers::{bpf_get_current_pid_tgid, bpf_get_netns_cookie, bpf_ktime_get_ns, bpf_set_retval},
    macros::{cgroup_sock, cgroup_sock_addr, cgroup_sockopt, raw_tracepoint, sock_ops},
    programs::{RawTracePointContext, SockAddrContext, SockContext, SockOpsContext, SockoptContext},
};
use culvert_abi::{
    Address, Counter, FlowKey, ListenerKey,
    listener::{DUAL_STACK, SLOTS},
    pod::{ACTIVE, DRAINING, INTRODUCTION},
    ztunnel::{ACCEPTED_MARK, LOOP_MARK, MARK_MASK, OUTBOUND_PORT, with_mark},
};
use culvert_ebpf::{
    context::{self, Named, OptionValue},
    inbound::on_accept,
    maps::{HOST_FLOWS, LISTENERS, POD_ADDRESSES, UNKNOWN_FLOWS, ZTUNNELS, count, owns, pod_state},
    marks::{of_mptcp, on_set_mark, without_our_routing},
    outbound::{Destination, is_inbound_leg, needs_listener, on_connect},
    ports::{OnBind, OnListen, on_bind, on_listen},
    socket::{Owner, Socket, current_is_ztunnel, current_tgid, set_mark, share_port},
};

const ALLOW: i32 = 1;
const REFUSE: i32 = 0;
const EADDRINUSE: i32 = 98;
const ECONNREFUSED: i32 = 111;

/// Cookie of the host's netns; the loader writes it.
#[unsafe(no_mangle)]
static HOST_NETNS: u64 = 0;

#[inline(always)]
fn host_netns() -> u64 {
    // SAFETY: a valid static; volatile because the loader changes it behind the compiler's back.
    unsafe { (&raw const HOST_NETNS).read_volatile() }
}

#[inline(always)]
fn netns_cookie(ctx: *mut c_void) -> u64 {
    // SAFETY: the verifier checks that the context is one this helper takes.
    unsafe { bpf_get_netns_cookie(ctx) }
}

/// `cgroup/sock_create`: runs for each new inet socket. Labels those of a known ztunnel; every later
/// hook reads the label. Open on failure: an unlabelled ztunnel cannot bind its ports, so enrollment
/// fails, and never the pod's capture.
#[cgroup_sock(sock_create)]
fn label_sockets(ctx: SockContext) -> i32 {
    if current_is_ztunnel() {
        Socket::created(&ctx).label_ztunnel();
    }
    ALLOW
}

/// Tracepoint `sched_process_exit`: a ztunnel that ended is known no longer. Its id is given to nobody else as
/// long as its first thread is, so no successor is ever taken for it.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
fn forget_ztunnel(_: RawTracePointContext) {
    let ids = bpf_get_current_pid_tgid();
    let (process, thread) = ((ids >> 32) as u32, ids as u32);
    if thread == process && ZTUNNELS.remove(process).is_ok() {
        count(0, Counter::ZtunnelEnded);
    }
}

/// `cgroup/bind4`: reserves ztunnel's ports and keeps the workload's own port bindable.
#[cgroup_sock_addr(bind4)]
fn reserve_port4(ctx: SockAddrContext) -> i32 {
    let named = context::named4(&ctx);
    bind(&ctx, named)
}

/// `cgroup/bind6`.
#[cgroup_sock_addr(bind6)]
fn reserve_port6(ctx: SockAddrContext) -> i32 {
    let named = context::named6(&ctx);
    bind(&ctx, named)
}

#[inline(always)]
fn bind(ctx: &SockAddrContext, named: Named) -> i32 {
    let netns = netns_cookie(ctx.as_ptr());
    let state = pod_state(netns);
    if state == 0 {
        return ALLOW;
    }
    let socket = Socket::addressed(ctx);
    match on_bind(state, socket.owner(), named.is_tcp, named.port) {
        OnBind::NotOurs => {}
        OnBind::Leave(counter) => count(netns, counter),
        OnBind::Share => {
            let shared = share_port(ctx);
            count(netns, if shared { Counter::BindShared } else { Counter::BindShareFailed });
        }
        OnBind::Introduce => {
            let known = ZTUNNELS.insert(current_tgid(), netns, 0).is_ok() && socket.label_ztunnel();
            count(0, if known { Counter::ZtunnelIntroduced } else { Counter::IntroductionFailed });
        }
        OnBind::Refuse => {
            count(netns, Counter::BindReserved);
            return refuse(EADDRINUSE);
        }
    }
    ALLOW
}

/// `cgroup/connect4`: the only place where a connect() of IPv4 can be refused at once. Passing counts
/// nothing here: `TCP_CONNECT_CB` follows.
#[cgroup_sock_addr(connect4)]
fn refuse_conn4(ctx: SockAddrContext) -> i32 {
    let named = context::named4(&ctx);
    connect(&ctx, named)
}

/// `cgroup/connect6`.
#[cgroup_sock_addr(connect6)]
fn refuse_conn6(ctx: SockAddrContext) -> i32 {
    let named = context::named6(&ctx);
    connect(&ctx, named)
}

#[inline(always)]
fn connect(ctx: &SockAddrContext, named: Named) -> i32 {
    if !named.is_tcp {
        return ALLOW;
    }
    let netns = netns_cookie(ctx.as_ptr());
    let state = pod_state(netns);
    if state == 0 {
        return ALLOW;
    }
    let socket = Socket::addressed(ctx);
    let owner = socket.owner();
    // In every state: a socket that was captured keeps its mark when it disconnects (AF_UNSPEC).
    if let (Owner::Workload, Some(mark)) = (owner, without_our_routing(socket.mark())) {
        // If that fails the connection stays inside all the same.
        set_mark(ctx, mark);
    }
    if state != ACTIVE {
        return ALLOW;
    }
    let destination = destination(netns, &named.address);
    if needs_listener(state, owner, destination) && !is_listening(netns, OUTBOUND_PORT) {
        count(netns, Counter::RefusedOutbound);
        return refuse(ECONNREFUSED);
    }
    if is_inbound_leg(owner, destination, socket.has_source()) {
        set_mark(ctx, with_mark(socket.mark(), LOOP_MARK));
    }
    ALLOW
}

/// `cgroup/setsockopt`: a mark of the workload's (CAP_NET_RAW) must not take the place of ours. Runs for every
/// `setsockopt()` of the node.
#[cgroup_sockopt(setsockopt)]
fn keep_marks(ctx: SockoptContext) -> i32 {
    if context::is_mark(&ctx) {
        set_by_workload(&ctx);
    } else {
        context::leave_option(&ctx);
    }
    ALLOW
}

#[inline(always)]
fn set_by_workload(ctx: &SockoptContext) {
    let netns = netns_cookie(ctx.as_ptr());
    let state = pod_state(netns);
    let Some(value) = OptionValue::of(ctx).filter(|_| state != 0) else {
        return context::leave_option(ctx);
    };
    let socket = Socket::optioned(ctx);
    let ours = if socket.is_mptcp() {
        of_mptcp(destination(netns, &socket.remote()))
    } else {
        socket.mark() & MARK_MASK
    };
    let decision = on_set_mark(state, socket.owner(), socket.phase(), ours, value.get());
    match decision.replace {
        Some(mark) => value.replace(ctx, mark),
        None => context::leave_option(ctx),
    }
    if let Some(counter) = decision.counter {
        count(netns, counter);
    }
}

/// `sock_ops`: runs at points of a TCP socket's life, synchronously in the system call or in softirq.
#[sock_ops]
fn follow_sockets(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_TCP_LISTEN_CB => listening(&ctx),
        BPF_SOCK_OPS_TCP_CONNECT_CB => connecting(&ctx),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => accepted(&ctx),
        BPF_SOCK_OPS_STATE_CB => closed(&ctx),
        BPF_SOCK_OPS_RTO_CB => retransmitting(&ctx),
        _ => {}
    }
    1
}

/// Inside `listen()`: a socket that listens already never comes here again, so this is the only moment
/// at which a listener of ztunnel can be stored.
#[inline(always)]
fn listening(ctx: &SockOpsContext) {
    let netns = netns_cookie(ctx.as_ptr());
    let state = pod_state(netns);
    if state == 0 {
        return;
    }
    let Some(socket) = Socket::followed(ctx) else { return };
    let port = ctx.local_port() as u16;
    match on_listen(state, socket.owner(), context::family(ctx), port, socket.mark()) {
        OnListen::NotOurs => {}
        OnListen::Store { family } => {
            share_port(ctx);
            let stored = store_listener(ctx, netns, port, family);
            count(netns, if stored { Counter::ListenerStored } else { Counter::ListenerNoSlot });
        }
        OnListen::Foreign => count(netns, Counter::ListenerForeign),
        OnListen::ClearMark => {
            set_mark(ctx, 0);
            count(netns, Counter::ListenerMarkCleared);
        }
        OnListen::Leave => count(netns, Counter::ListenerOfWorkload),
    }
}

#[inline(always)]
fn store_listener(ctx: &SockOpsContext, netns: u64, port: u16, family: u16) -> bool {
    for slot in 0..SLOTS {
        if LISTENERS.store(ctx, &ListenerKey { netns, port, family, slot }) {
            return true;
        }
    }
    false
}

/// Before the SYN is built; source address and port are known. A changed mark makes the kernel route
/// the connection anew (`tcp_connect` calls `rebuild_header` right after this hook).
#[inline(always)]
fn connecting(ctx: &SockOpsContext) {
    let netns = netns_cookie(ctx.as_ptr());
    let ends = context::ends(ctx);
    if netns == host_netns() {
        // SAFETY: one aligned u64, copied at once.
        if let Some(pod) = unsafe { POD_ADDRESSES.get(ends.remote) }.copied() {
            record_host_flow(ctx, pod, &ends);
        }
        return;
    }
    let state = pod_state(netns);
    if state == 0 || state == INTRODUCTION {
        return;
    }
    let Some(socket) = Socket::followed(ctx) else { return };
    let decision = on_connect(state, socket.owner(), socket.mark(), destination(netns, &ends.remote));
    if matches!(decision.counter, Counter::CapturedOutbound) && !owns(netns, &ends.local) {
        // If that fails it is taken for a stranger's, unless it comes in by `lo`: then it is refused.
        UNKNOWN_FLOWS.insert(flow_key(netns, &ends), 1, 0).unwrap_or_default();
    }
    let marked = decision.mark.is_none_or(|ours| set_mark(ctx, with_mark(socket.mark(), ours)));
    if marked && matches!(decision.counter, Counter::CapturedOutbound) {
        // If that fails, a SYN that ztunnel leaves behind is repeated in vain.
        ctx.set_cb_flags((ctx.cb_flags() | BPF_SOCK_OPS_RTO_CB_FLAG) as i32).unwrap_or_default();
    }
    count(netns, if marked { decision.counter } else { Counter::MarkFailed });
}

/// Before something is sent again because nobody has answered. A captured SYN that nobody has taken when its
/// pod is withdrawn would find nobody any more: from now on it goes where those of new connections go.
#[inline(always)]
fn retransmitting(ctx: &SockOpsContext) {
    let Some(socket) = Socket::followed(ctx) else { return };
    let netns = netns_cookie(ctx.as_ptr());
    if pod_state(netns) == DRAINING
        && context::state(ctx) == BPF_TCP_SYN_SENT
        && let Some(mark) = without_our_routing(socket.mark())
        && set_mark(ctx, mark)
    {
        count(netns, Counter::PassedLate);
    }
}

/// In softirq, when the handshake of an accepted connection is complete.
#[inline(always)]
fn accepted(ctx: &SockOpsContext) {
    let netns = netns_cookie(ctx.as_ptr());
    if !matches!(pod_state(netns), ACTIVE | DRAINING) {
        return;
    }
    let Some(socket) = Socket::followed(ctx) else { return };
    let ends = context::ends(ctx);
    let owns = |address: &Address| owns(netns, address);
    let decision = on_accept(socket.owner(), &ends.local, ends.local_port, &ends.remote, owns);
    if decision.mark_accepted {
        set_mark(ctx, with_mark(socket.mark(), ACCEPTED_MARK));
    }
    count(netns, decision.counter);
}

#[inline(always)]
fn record_host_flow(ctx: &SockOpsContext, netns: u64, ends: &context::Ends) {
    // SAFETY: no arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    // Without the callback the entry would stay: not recorded then.
    let followed = ctx.set_cb_flags((ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG) as i32).is_ok();
    let recorded = followed && HOST_FLOWS.insert(flow_key(netns, ends), now, 0).is_ok();
    count(netns, if recorded { Counter::HostFlowAdded } else { Counter::HostFlowFull });
}

/// Only sockets of the host that connected to a pod ask for this callback. Not at ESTABLISHED: with
/// SYN cookies the last ACK of the handshake looks for a listener again.
#[inline(always)]
fn closed(ctx: &SockOpsContext) {
    if ctx.arg(1) != BPF_TCP_CLOSE || netns_cookie(ctx.as_ptr()) != host_netns() {
        return;
    }
    let ends = context::ends(ctx);
    // SAFETY: one aligned u64, copied at once.
    if let Some(pod) = unsafe { POD_ADDRESSES.get(ends.remote) }.copied()
        && HOST_FLOWS.remove(flow_key(pod, &ends)).is_ok()
    {
        count(pod, Counter::HostFlowClosed);
    }
}

#[inline(always)]
const fn flow_key(netns: u64, ends: &context::Ends) -> FlowKey {
    FlowKey {
        netns,
        host: ends.local,
        pod: ends.remote,
        host_port: ends.local_port,
        pod_port: ends.remote_port,
        padding: 0,
    }
}

#[inline(always)]
fn destination(netns: u64, address: &Address) -> Destination {
    if address.is_loopback() {
        Destination::Loopback
    } else if owns(netns, address) {
        Destination::Own
    } else {
        Destination::Remote
    }
}

#[inline(always)]
fn is_listening(netns: u64, port: u16) -> bool {
    for slot in 0..SLOTS {
        if LISTENERS.has(&ListenerKey { netns, port, family: DUAL_STACK, slot }) {
            return true;
        }
    }
    false
}

#[inline(always)]
fn refuse(errno: i32) -> i32 {
    // SAFETY: a plain number. In sock_addr programs since Linux 5.18 (b44123b4a3dc).
    unsafe { bpf_set_retval(-errno) };
    REFUSE
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}
