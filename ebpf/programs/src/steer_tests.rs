use core::net::IpAddr;
use std::vec::Vec;

use culvert_abi::pod::{DRAINING, REGISTERED};
use rstest::rstest;

use super::*;

const ETH0: u32 = 2;
const LO: u32 = LOOPBACK_IFINDEX;

struct World {
    pod: Option<PodEntry>,
    own: Vec<Address>,
    host_flow: bool,
    unknown_flow: bool,
}

impl Lookups for World {
    fn pod(&self) -> Option<PodEntry> {
        self.pod
    }
    fn owns(&self, address: &Address) -> bool {
        self.own.contains(address)
    }
    fn is_host_flow(&self, _packet: &Packet) -> bool {
        self.host_flow
    }
    fn is_unknown_flow(&self, _packet: &Packet) -> bool {
        self.unknown_flow
    }
}

fn address(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

fn world(state: u32, flags: u32, host_flow: bool) -> World {
    let own = ["10.0.0.5", "fd00::5", "127.0.0.1", "::1", "fe80::5"].map(address);
    let pod = PodEntry { state, flags, ..PodEntry::default() };
    World { pod: Some(pod), own: own.into(), host_flow, unknown_flow: false }
}

fn packet(local: &str, local_port: u16, remote: &str, ingress_ifindex: u32) -> Packet {
    Packet {
        is_tcp: true,
        local: address(local),
        remote: address(remote),
        local_port,
        remote_port: 40000,
        ingress_ifindex,
    }
}

const fn pass(counter: Counter) -> Verdict {
    Verdict::Pass(counter)
}

#[rstest]
#[case::outbound_v4("10.0.0.9", 80, "10.0.0.5", LO, OUTBOUND)]
#[case::outbound_v6("fd00::9", 80, "fd00::5", LO, OUTBOUND)]
#[case::outbound_bound_to_eth0("10.0.0.9", 80, "10.0.0.5", ETH0, OUTBOUND)]
#[case::outbound_to_ztunnels_ports_elsewhere("10.0.0.9", 15001, "10.0.0.5", LO, OUTBOUND)]
#[case::outbound_hbone_by_hand("10.0.0.9", 15008, "10.0.0.5", LO, OUTBOUND)]
#[case::any_ip("192.0.2.1", 80, "10.0.0.9", ETH0, inbound(Counter::LookupUnknownAddress))]
#[case::any_ip_from_ztunnel("192.0.2.1", 80, "10.0.0.9", LO, pass(Counter::LookupFromZtunnel))]
#[case::any_ip_on_15001("192.0.2.1", 15001, "10.0.0.9", ETH0, inbound(Counter::LookupUnknownAddress))]
#[case::inbound_v4("10.0.0.5", 80, "10.0.0.9", ETH0, inbound(Counter::LookupInbound))]
#[case::inbound_v6("fd00::5", 80, "fd00::9", ETH0, inbound(Counter::LookupInbound))]
#[case::hbone("10.0.0.5", 15008, "10.0.0.9", ETH0, pass(Counter::LookupHbone))]
#[case::self_call_out("10.0.0.5", 15001, "10.0.0.9", ETH0, inbound(Counter::LookupSelfCall))]
#[case::self_call_in("fd00::5", 15006, "fd00::9", ETH0, inbound(Counter::LookupSelfCall))]
#[case::self_call_by_the_pod("10.0.0.5", 15001, "10.0.0.5", LO, inbound(Counter::LookupSelfCall))]
#[case::from_ztunnel("10.0.0.5", 80, "10.0.0.9", LO, pass(Counter::LookupFromZtunnel))]
#[case::from_ztunnel_to_hbone("10.0.0.5", 15008, "10.0.0.9", LO, pass(Counter::LookupFromZtunnel))]
#[case::to_itself("10.0.0.5", 80, "10.0.0.5", ETH0, pass(Counter::LookupSelf))]
#[case::loopback("127.0.0.1", 80, "127.0.0.1", LO, pass(Counter::LookupLoopback))]
#[case::loopback_9("127.0.0.9", 15001, "127.0.0.1", LO, pass(Counter::LookupLoopback))]
#[case::loopback_v6("::1", 80, "::1", LO, pass(Counter::LookupLoopback))]
fn an_active_pod_decides_by_address_port_and_interface(
    #[case] local: &str,
    #[case] port: u16,
    #[case] remote: &str,
    #[case] ingress: u32,
    #[case] verdict: Verdict,
) {
    assert_eq!(decide(&packet(local, port, remote, ingress), &world(ACTIVE, 0, false)), verdict);
}

#[test]
fn a_probe_passes_unless_it_calls_ztunnel_itself() {
    let world = world(ACTIVE, 0, true);
    assert_eq!(decide(&packet("10.0.0.5", 80, "10.0.0.1", ETH0), &world), pass(Counter::LookupHostFlow));
    for port in [15001, 15006] {
        let verdict = decide(&packet("10.0.0.5", port, "10.0.0.1", ETH0), &world);
        assert_eq!(verdict, inbound(Counter::LookupSelfCall));
    }
}

#[test]
fn bypass_opens_inbound_and_nothing_else() {
    let world = world(ACTIVE, BYPASS_INBOUND, false);
    assert_eq!(decide(&packet("10.0.0.5", 80, "10.0.0.9", ETH0), &world), pass(Counter::LookupBypass));
    assert_eq!(decide(&packet("10.0.0.9", 80, "10.0.0.5", LO), &world), OUTBOUND);
    let self_call = decide(&packet("10.0.0.5", 15001, "10.0.0.9", ETH0), &world);
    assert_eq!(self_call, inbound(Counter::LookupSelfCall));
}

#[test]
fn every_combination_is_decided_and_none_lends_the_pods_identity_to_a_stranger() {
    let locals = ["10.0.0.5", "fd00::5", "fe80::5", "10.0.0.9", "192.0.2.1", "fd00::9", "127.0.0.1", "::1"];
    let remotes = ["10.0.0.5", "fd00::5", "10.0.0.9", "fd00::9", "10.0.0.1"];
    for (local, remote) in locals.iter().flat_map(|local| remotes.iter().map(move |remote| (local, remote))) {
        for port in [1, 80, 15000, 15001, 15006, 15008, 15053, 65535] {
            for (ingress, flags, host_flow) in [
                (LO, 0, false),
                (ETH0, 0, false),
                (ETH0, 0, true),
                (ETH0, BYPASS_INBOUND, false),
                (9, 1, true),
            ] {
                let world = world(ACTIVE, flags, host_flow);
                let packet = packet(local, port, remote, ingress);
                let from_outside = ingress != LO && !world.owns(&packet.remote);
                let verdict = decide(&packet, &world);
                if from_outside {
                    assert_ne!(verdict, OUTBOUND, "{packet:?}");
                }
                let from_ztunnel = ingress == LO && !world.owns(&packet.remote);
                if !world.owns(&packet.local) && !packet.local.is_loopback() && !from_ztunnel {
                    assert!(matches!(verdict, Verdict::Steer { .. }), "{packet:?}");
                }
                if world.owns(&packet.local) {
                    assert_ne!(verdict, OUTBOUND, "{packet:?}");
                }
            }
        }
    }
}

#[test]
fn a_workload_with_an_unknown_source_is_captured_whatever_the_interface() {
    let world = World { unknown_flow: true, ..world(ACTIVE, 0, false) };
    for ingress in [LO, ETH0] {
        assert_eq!(decide(&packet("10.0.0.9", 80, "192.0.2.1", ingress), &world), OUTBOUND);
        assert_eq!(decide(&packet("fd00::9", 15001, "fd00::99", ingress), &world), OUTBOUND);
    }
    assert_eq!(decide(&packet("10.0.0.5", 80, "192.0.2.1", ETH0), &world), inbound(Counter::LookupInbound));
}

#[test]
fn what_comes_from_outside_passes_a_pod_that_is_not_active() {
    for (local, port, ingress) in
        [("10.0.0.5", 80, ETH0), ("10.0.0.5", 15006, ETH0), ("192.0.2.1", 80, ETH0), ("10.0.0.5", 80, LO)]
    {
        let packet = packet(local, port, "10.0.0.9", ingress);
        for state in [REGISTERED, DRAINING] {
            assert_eq!(decide(&packet, &world(state, 0, false)), pass(Counter::LookupInactive));
        }
        let absent = World { pod: None, ..world(ACTIVE, 0, false) };
        assert_eq!(decide(&packet, &absent), pass(Counter::LookupInactive));
    }
}

#[test]
fn a_captured_syn_is_ztunnels_also_when_its_pod_has_been_withdrawn() {
    for state in [REGISTERED, ACTIVE, DRAINING] {
        for ingress in [LO, ETH0] {
            let world = world(state, BYPASS_INBOUND, true);
            assert_eq!(decide(&packet("10.0.0.9", 80, "10.0.0.5", ingress), &world), OUTBOUND);
            assert_eq!(decide(&packet("fd00::9", 15006, "fd00::5", ingress), &world), OUTBOUND);
        }
    }
}

#[test]
fn udp_is_not_touched() {
    let packet = Packet { is_tcp: false, ..packet("10.0.0.9", 53, "10.0.0.5", LO) };
    assert_eq!(decide(&packet, &world(ACTIVE, 0, false)), pass(Counter::LookupNotTcp));
}
