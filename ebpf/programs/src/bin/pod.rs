//! Attached to one pod's netns: chooses the listening socket of each SYN.
//!
//! One instance per pod. The kernel does not check that a selected socket lives in the packet's netns
//! and a wrong one is a silent black hole, so the netns is the instance's own, never derived from
//! packet addresses.
#![cfg_attr(target_arch = "bpf", no_std)]
#![cfg_attr(target_arch = "bpf", no_main)]

use aya_ebpf::{
    bindings::sk_action::{SK_DROP, SK_PASS},
    helpers::bpf_ktime_get_ns,
    macros::sk_lookup,
    programs::SkLookupContext,
};
use culvert_abi::{
    Address, FlowKey, ListenerKey, PodEntry,
    flow::LIFETIME_NS,
    listener::{DUAL_STACK, SLOTS},
};
use culvert_ebpf::{
    context,
    maps::{self, HOST_FLOWS, LISTENERS, POD_NETNS, UNKNOWN_FLOWS, count},
    steer::{Lookups, Packet, Verdict, decide},
};

struct Maps {
    netns: u64,
}

impl Maps {
    #[inline(always)]
    const fn flow(&self, packet: &Packet) -> FlowKey {
        FlowKey {
            netns: self.netns,
            host: packet.remote,
            pod: packet.local,
            host_port: packet.remote_port,
            pod_port: packet.local_port,
            padding: 0,
        }
    }
}

impl Lookups for Maps {
    #[inline(always)]
    fn pod(&self) -> Option<PodEntry> {
        maps::pod(self.netns)
    }

    #[inline(always)]
    fn owns(&self, address: &Address) -> bool {
        maps::owns(self.netns, address)
    }

    #[inline(always)]
    fn is_host_flow(&self, packet: &Packet) -> bool {
        // SAFETY: one aligned u64, copied at once.
        let since = unsafe { HOST_FLOWS.get(self.flow(packet)) }.copied();
        // SAFETY: no arguments.
        since.is_some_and(|since| unsafe { bpf_ktime_get_ns() }.wrapping_sub(since) < LIFETIME_NS)
    }
    #[inline(always)]
    fn is_unknown_flow(&self, packet: &Packet) -> bool {
        UNKNOWN_FLOWS.get_ptr(self.flow(packet)).is_some()
    }
}

/// `sk_lookup` (Linux 5.9): runs when TCP or UDP finds no connected socket for a packet. SK_PASS
/// without a selected socket leaves the kernel's own lookup, SK_DROP makes TCP answer with RST.
/// Closed on failure: what should be steered and cannot be is dropped.
#[sk_lookup]
fn steer_syn(ctx: SkLookupContext) -> u32 {
    let Some(netns) = POD_NETNS.get(0).copied() else { return SK_DROP };
    let packet = context::packet(&ctx);
    match decide(&packet, &Maps { netns }) {
        Verdict::Pass(counter) => {
            count(netns, counter);
            SK_PASS
        }
        Verdict::Steer { port, taken, refused } => {
            let selected = select(&ctx, netns, port);
            count(netns, if selected { taken } else { refused });
            if selected { SK_PASS } else { SK_DROP }
        }
    }
}

/// Tries each slot: a listener that cannot take this family (ztunnel with IPv6 disabled listens on
/// 0.0.0.0) is as good as none.
#[inline(always)]
fn select(ctx: &SkLookupContext, netns: u64, port: u16) -> bool {
    for slot in 0..SLOTS {
        if LISTENERS.select(ctx, &ListenerKey { netns, port, family: DUAL_STACK, slot }) {
            return true;
        }
    }
    false
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}
