//! Every map, shared by the programs of both objects and pinned by the loader.

use core::{ffi::c_void, hint::black_box, ptr::null};

use aya_ebpf::{
    bindings::{
        BPF_F_CLONE, BPF_F_NO_PREALLOC, BPF_NOEXIST, BPF_SK_LOOKUP_F_NO_REUSEPORT,
        bpf_map_type::{BPF_MAP_TYPE_SK_STORAGE, BPF_MAP_TYPE_SOCKHASH},
    },
    btf_maps::{Array, HashMap, LruHashMap, PerCpuHashMap},
    helpers::{bpf_map_lookup_elem, bpf_sk_assign, bpf_sk_release, bpf_sock_hash_update},
    macros::btf_map,
    programs::{SkLookupContext, SockOpsContext},
};
use culvert_abi::{Address, Counter, Counters, FlowKey, ListenerKey, OwnAddress, PodEntry};

const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// Pod netns by cookie.
#[btf_map]
pub static PODS: HashMap<u64, PodEntry, 4096, NO_PREALLOC> = HashMap::new();

/// Addresses that interfaces of a pod netns have; the value is not used.
#[btf_map]
pub static OWN_ADDRESSES: HashMap<OwnAddress, u32, 65536, NO_PREALLOC> = HashMap::new();

/// Addresses that CNI and the API server report for pods, to their netns cookie: finds the pod that a
/// process of the host connects to.
#[btf_map]
pub static POD_ADDRESSES: HashMap<Address, u64, 16384, NO_PREALLOC> = HashMap::new();

/// ztunnel's listening sockets. The kernel removes an entry when its socket closes.
#[btf_map]
pub static LISTENERS: Listeners = Listeners::new();

/// Connections from the host to pods, to the time of their connect (ns, monotonic). No LRU: a host
/// process that opens many must not evict a probe.
#[btf_map]
pub static HOST_FLOWS: HashMap<FlowKey, u64, 262_144, NO_PREALLOC> = HashMap::new();

/// Captured connections whose source is no address of the pod that we know of: one that it got a moment
/// ago, or `IP_FREEBIND`. Told from a stranger's by nothing else if they come in by another interface than
/// `lo` (SO_BINDTODEVICE). `host` is the source and `pod` the destination; the value is not used.
#[btf_map]
pub static UNKNOWN_FLOWS: LruHashMap<FlowKey, u32, 4096> = LruHashMap::new();

/// Processes known as ztunnel: tgid to the cookie of the netns in which it was introduced. An entry lives as
/// long as its process.
#[btf_map]
pub static ZTUNNELS: HashMap<u32, u64, 64> = HashMap::new();

/// `LABEL_ZTUNNEL` on each socket of ztunnel.
#[btf_map]
pub static SOCKET_LABELS: InheritedSkStorage<u32> = InheritedSkStorage::new();

/// Cookie of the netns that this instance of the pod object is attached to: the only map that is not
/// shared. Not a constant of the program, so that instances can be loaded before their pod exists.
#[btf_map]
pub static POD_NETNS: Array<u64, 1> = Array::new();

/// What happened, by netns cookie; 0 for what belongs to no pod.
#[btf_map]
pub static COUNTERS: PerCpuHashMap<u64, Counters, 4096, NO_PREALLOC> = PerCpuHashMap::new();

/// Increments one counter of a pod, or of what belongs to none (0). The loader makes the entry.
#[inline(always)]
pub fn count(netns: u64, counter: Counter) {
    if let Some(entry) = COUNTERS.get_ptr_mut(netns) {
        // SAFETY: `Counters` is an array of u64 with one for each `Counter`.
        increment(unsafe { entry.cast::<u64>().add(counter as usize) });
    }
}

/// Atomic because a softirq on this CPU may interrupt a program that runs in process context. The
/// target has no `AtomicU64::fetch_add`, the instruction set has it since Linux 3.18 (BPF_XADD).
#[cfg(target_arch = "bpf")]
#[inline(always)]
fn increment(value: *mut u64) {
    // SAFETY: `value` is an aligned element of a map value, valid while the program runs.
    unsafe { core::arch::asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) value, in(reg) 1_u64) };
}

#[cfg(not(target_arch = "bpf"))]
fn increment(_value: *mut u64) {}

/// The entry of a netns in `PODS`.
#[inline(always)]
pub fn pod(netns: u64) -> Option<PodEntry> {
    // SAFETY: copied at once; an entry is only ever replaced as a whole.
    unsafe { PODS.get(netns) }.copied()
}

/// The state of a netns; 0 if it is none of ours.
#[inline(always)]
pub fn pod_state(netns: u64) -> u32 {
    // SAFETY: as above.
    unsafe { PODS.get(netns) }.map_or(0, |pod| pod.state)
}

/// Whether an interface of the netns has the address.
#[inline(always)]
pub fn owns(netns: u64, address: &Address) -> bool {
    exists(OWN_ADDRESSES.get_ptr(OwnAddress { netns, address: *address }).is_some())
}

/// The answer of a lookup, out of LLVM's reach: it would join two of them into one "or" of their pointers, which
/// the verifier refuses ("bitwise operator |= on pointer prohibited").
#[inline(always)]
pub fn exists(found: bool) -> bool {
    black_box(found)
}

/// A SOCKHASH whose values user space reads as socket cookies, which `sock_diag` reports too. aya's
/// `SockHash` has 4-byte values, which cannot be read (`sock_hash_lookup_sys`: ENOSPC).
#[repr(C)]
pub struct Listeners {
    r#type: *const [i32; BPF_MAP_TYPE_SOCKHASH as usize],
    key: *const ListenerKey,
    value: *const u64,
    max_entries: *const [i32; 65536],
}

// SAFETY: the pointers describe types to the loader and are never followed.
unsafe impl Sync for Listeners {}

impl Listeners {
    const fn new() -> Self {
        Self { r#type: null(), key: null(), value: null(), max_entries: null() }
    }

    const fn as_ptr(&self) -> *mut c_void {
        core::ptr::from_ref(self).cast_mut().cast()
    }

    /// Stores the socket of a `sock_ops` program; false when the place is taken or there is no memory.
    #[inline(always)]
    pub fn store(&self, context: &SockOpsContext, key: &ListenerKey) -> bool {
        let key = core::ptr::from_ref(key).cast_mut().cast();
        // SAFETY: the verifier checks context, map and key.
        unsafe { bpf_sock_hash_update(context.ops, self.as_ptr(), key, u64::from(BPF_NOEXIST)) == 0 }
    }

    /// Whether a socket is stored there.
    #[inline(always)]
    pub fn has(&self, key: &ListenerKey) -> bool {
        let socket = self.acquire(key);
        if socket.is_null() {
            return false;
        }
        // SAFETY: the lookup took a reference on the socket; the verifier insists on its release.
        unsafe { bpf_sk_release(socket) };
        true
    }

    /// Selects the socket stored there for the packet of a `sk_lookup` program. False when there is
    /// none, or it cannot take a packet of that family. Exactly this
    /// socket, whoever else is in its SO_REUSEPORT group: a workload can get into it if the kernel gives
    /// it the port while no ztunnel listens (`listen()` without `bind()`).
    #[inline(always)]
    pub fn select(&self, context: &SkLookupContext, key: &ListenerKey) -> bool {
        let socket = self.acquire(key);
        if socket.is_null() {
            return false;
        }
        let flags = u64::from(BPF_SK_LOOKUP_F_NO_REUSEPORT);
        // SAFETY: the verifier checks the context; `socket` is not null.
        let selected = unsafe { bpf_sk_assign(context.lookup.cast(), socket, flags) } == 0;
        // SAFETY: as in `has`.
        unsafe { bpf_sk_release(socket) };
        selected
    }

    #[inline(always)]
    fn acquire(&self, key: &ListenerKey) -> *mut c_void {
        // SAFETY: map and key are of the types that belong together.
        unsafe { bpf_map_lookup_elem(self.as_ptr(), core::ptr::from_ref(key).cast()) }
    }
}

/// Socket storage that accepted sockets inherit from their listener. aya's `SkStorage` has no way to
/// ask for `BPF_F_CLONE`.
#[repr(C)]
pub struct InheritedSkStorage<T> {
    r#type: *const [i32; BPF_MAP_TYPE_SK_STORAGE as usize],
    key: *const i32,
    value: *const T,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; (BPF_F_NO_PREALLOC | BPF_F_CLONE) as usize],
}

// SAFETY: the pointers describe types to the loader and are never followed.
unsafe impl<T> Sync for InheritedSkStorage<T> {}

impl<T> InheritedSkStorage<T> {
    const fn new() -> Self {
        Self { r#type: null(), key: null(), value: null(), max_entries: null(), map_flags: null() }
    }

    /// What the socket storage helpers take.
    pub const fn as_ptr(&self) -> *mut c_void {
        core::ptr::from_ref(self).cast_mut().cast()
    }
}
