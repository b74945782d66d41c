//! What happened to a pod's connections.
//!
//! `COUNTERS` is a per-CPU hash of [`Counters`] by netns cookie; key 0 counts what belongs to no pod.
//! Every path of a kernel program increments exactly one of them. Counters named `lookup_*` count
//! packets for which TCP looked for a listening socket (a SYN, but also its repetition or a late ACK);
//! all others count sockets or connections, once each.

macro_rules! counters {
    ($($(#[$doc:meta])+ $variant:ident $field:ident,)+) => {
        /// One counter, by its position in [`Counters`].
        #[repr(usize)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Counter {
            $($(#[$doc])+ $variant,)+
        }

        /// Value of `COUNTERS` on one CPU.
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])+ pub $field: u64,)+
        }

        impl Counter {
            /// Every counter in the order of the fields of [`Counters`].
            pub const ALL: [Self; size_of::<Counters>() / 8] = [$(Self::$variant,)+];

            /// The name of its field.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => stringify!($field),)+ }
            }
        }

        impl Counters {
            /// The value of one counter.
            pub const fn get(&self, counter: Counter) -> u64 {
                match counter { $(Counter::$variant => self.$field,)+ }
            }

            /// Adds the values that another CPU holds.
            pub const fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)+
            }
        }
    };
}

counters! {
    /// connect(): the workload's connection was marked to be delivered to 15001.
    CapturedOutbound captured_outbound,
    /// connect(): to a loopback address, left alone.
    PassedLoopback passed_loopback,
    /// connect(): to an address of the pod itself, kept on `lo`, not captured.
    PassedOwnAddress passed_own_addr,
    /// connect(): by ztunnel to the outside.
    ZtunnelUpstream ztunnel_upstream,
    /// connect(): by ztunnel to the workload.
    ZtunnelToWorkload ztunnel_to_pod,
    /// connect(): refused with ECONNREFUSED, no listener on 15001.
    RefusedOutbound refused_outbound,
    /// connect(): the pod is registered but not active yet, or is draining.
    PassedInactive passed_inactive,
    /// connect(): its pod was withdrawn before ztunnel took it; its next SYN passes.
    PassedLate passed_late,
    /// connect(): the mark could not be set; the connection is not captured.
    MarkFailed mark_failed,
    /// Established: ztunnel accepted a captured connection on 15001.
    AcceptedOutbound accepted_outbound,
    /// Established: ztunnel accepted a steered plaintext connection on 15006.
    AcceptedInbound accepted_inbound,
    /// Established: ztunnel accepted a tunnel on 15008.
    AcceptedHbone accepted_hbone,
    /// Established: ztunnel accepted a connection by a loopback address (DNS, or a self-call).
    AcceptedLoopback accepted_loopback,
    /// Established: ztunnel accepted a connection to an address the pod does not own, from outside.
    AcceptedUnknownAddress accepted_unknown,
    /// Established: the workload accepted a connection (from ztunnel, a probe, itself).
    AcceptedByWorkload accepted_by_pod,
    /// Lookup: steered to 15001.
    LookupCaptured lookup_captured,
    /// Lookup: steered to 15006.
    LookupInbound lookup_inbound,
    /// Lookup: to an address the pod does not own, from outside; steered to 15006.
    LookupUnknownAddress lookup_unknown_addr,
    /// Lookup: to port 15001 or 15006 itself, steered to 15006, where ztunnel refuses it.
    LookupSelfCall lookup_self_call,
    /// Lookup: passed, to a loopback address.
    LookupLoopback lookup_loopback,
    /// Lookup: passed, from ztunnel to the workload.
    LookupFromZtunnel lookup_from_ztunnel,
    /// Lookup: passed, from the pod to itself.
    LookupSelf lookup_self,
    /// Lookup: passed, HBONE port.
    LookupHbone lookup_hbone,
    /// Lookup: passed, opened by a process of the host.
    LookupHostFlow lookup_host_flow,
    /// Lookup: passed, the pod has bypass-inbound-capture.
    LookupBypass lookup_bypass,
    /// Lookup: passed, not TCP.
    LookupNotTcp lookup_not_tcp,
    /// Lookup: passed, the pod is not active.
    LookupInactive lookup_inactive,
    /// Lookup: dropped, no listener on 15001.
    LookupRefusedOutbound lookup_refused_out,
    /// Lookup: dropped, no listener on 15006.
    LookupRefusedInbound lookup_refused_in,
    /// listen(): a socket of ztunnel was stored.
    ListenerStored listener_stored,
    /// listen(): a socket of ztunnel found no free slot.
    ListenerNoSlot listener_no_slot,
    /// listen(): on a port of ztunnel by somebody else, not stored.
    ListenerForeign listener_foreign,
    /// listen(): the workload's own mark was cleared, accepted sockets must inherit ours.
    ListenerMarkCleared listener_mark_clr,
    /// listen(): of the workload, nothing to do.
    ListenerOfWorkload listener_of_pod,
    /// setsockopt(SO_MARK): of a connection that carries our mark, our part was kept.
    MarkKept mark_kept,
    /// setsockopt(SO_MARK): of a listener, ignored, accepted sockets must inherit ours.
    MarkCleared mark_cleared,
    /// bind(): of a port of ztunnel, refused with EADDRINUSE.
    BindReserved bind_reserved,
    /// bind(): SO_REUSEADDR was set so that ztunnel's sockets on that port are no obstacle.
    BindShared bind_shared,
    /// bind(): SO_REUSEADDR could not be set.
    BindShareFailed bind_share_failed,
    /// bind(): by ztunnel, left alone.
    BindByZtunnel bind_by_ztunnel,
    /// bind(): by the workload, nothing to do (no port asked for, or not TCP).
    BindUntouched bind_untouched,
    /// bind(): a ztunnel was introduced.
    ZtunnelIntroduced introduced,
    /// bind(): in an introduction, but the ztunnel could not be recorded.
    IntroductionFailed introduce_failed,
    /// exit(): a ztunnel ended.
    ZtunnelEnded ztunnel_ended,
    /// connect() of a host process to a pod: recorded.
    HostFlowAdded host_flow_added,
    /// connect() of a host process to a pod: `HOST_FLOWS` is full, it will be steered to ztunnel.
    HostFlowFull host_flow_full,
    /// connect() of a host process to a pod: a recorded connection ended.
    HostFlowClosed host_flow_closed,
}

const _: () = assert!(size_of::<Counters>() == 8 * 47);

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn a_counters_position_is_its_field() {
        for (position, counter) in Counter::ALL.into_iter().enumerate() {
            assert_eq!(counter as usize, position, "{}", counter.name());
            let mut values = [0_u64; Counter::ALL.len()];
            values[position] = 7;
            // SAFETY: `Counters` is as many u64 as the array, asserted above.
            let counters: Counters = unsafe { core::mem::transmute(values) };
            assert_eq!(counters.get(counter), 7, "{}", counter.name());
        }
    }
}
