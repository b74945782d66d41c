//! Pods that lack an address others have, and addresses that come and go.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::net::{IpAddr, SocketAddr};

use culvert_abi::{
    Address, OwnAddress,
    names::{OWN_ADDRESSES, POD_ADDRESSES},
};
use culvert_dataplane::{Netns, Options};
use culvert_tests::{Family, Lab, Pod, eventually};

const SECOND: [&str; 2] = ["10.244.77.7", "fd00:244::77:7"];

/// The second address as `ip addr add` takes it.
fn with_prefix(address: IpAddr) -> String {
    match address {
        IpAddr::V4(v4) => format!("{v4}/16"),
        IpAddr::V6(v6) => format!("{v6}/64 nodad"),
    }
}

fn second(family: Family) -> IpAddr {
    let address = match family {
        Family::V4 => SECOND[0],
        Family::V6 => SECOND[1],
    };
    address.parse().unwrap()
}

fn add(pod: &Pod, address: IpAddr) {
    pod.ip(&format!("addr add {} dev eth0", with_prefix(address)));
}

fn remove(pod: &Pod, address: IpAddr) {
    let prefix = with_prefix(address);
    pod.ip(&format!("addr del {} dev eth0", prefix.trim_end_matches(" nodad")));
}

/// Waits until the dataplane knows that the pod owns the address, or no more.
fn wait_until_owned(lab: &Lab, pod: &Pod, address: IpAddr, owned: bool) {
    let key = OwnAddress { netns: pod.cookie(), address: address.into() };
    let map = lab.map(OWN_ADDRESSES);
    eventually(&format!("{address} of {} to be known: {owned}", pod.name()), || {
        (map.get::<_, u32>(&key).is_some() == owned).then_some(())
    });
}

/// Nobody is to send to the owner of before.
fn forget_neighbours(lab: &Lab, pods: &[&Pod]) {
    lab.node().ip("neigh flush dev br0");
    for pod in pods {
        pod.ip("neigh flush dev eth0");
    }
}

/// A connection that ztunnel takes on `listener`: the client's words come back.
fn expect_captured(lab: &Lab, from: &Pod, to: SocketAddr, listener: u16) {
    lab.ztunnel().forget();
    let mut connection = from.connect(to).unwrap_or_else(|error| panic!("{} to {to}: {error}", from.name()));
    assert_eq!(connection.say(b"hello"), b"hello");
    let accepted = lab.ztunnel().wait_for_accepted(listener, 1);
    assert_eq!((accepted[0].peer, accepted[0].destination), (connection.local_addr(), to));
}

#[test]
fn a_pod_without_ipv6_is_captured_in_both_directions_by_ipv4() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod").without_ipv6(), lab.pod("other"));
    let before = pod.footprint();
    let pod = pod.captured();
    let (_echo, server) = (other.serve("[::]:80"), pod.serve("0.0.0.0:80"));
    let wire = lab.wire();
    expect_captured(&lab, &pod, other.at(Family::V4, 80), 15001);
    expect_captured(&lab, &other, pod.at(Family::V4, 80), 15006);
    assert_eq!(server.next_accepted().peer.ip(), other.v4());
    assert!(pod.connect(other.at(Family::V6, 80)).is_err(), "there is no IPv6");
    let frames = wire.stop();
    assert!(frames.syns_to(other.at(Family::V6, 80)).is_empty(), "{frames:?}");
    let counters = pod.counters();
    assert_eq!(
        (counters.captured_outbound, counters.accepted_outbound, counters.accepted_inbound),
        (1, 1, 1)
    );
    drop(server);
    eventually("the end of what was captured", || {
        (pod.release().unwrap() == culvert_dataplane::Restored::Complete).then_some(())
    });
    before.expect_same(&pod.footprint());
}

/// The real ztunnel skips [::1]:15053 only where `conf/lo/disable_ipv6` is 1, and refuses the pod where
/// the address alone is missing (seen with 62d82653): that pod is refused as a whole.
#[test]
fn a_pod_without_the_loopback_address_of_ipv6_is_captured_in_both_directions_or_refused_by_ztunnel() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod").without_v6_loopback(), lab.pod("other"));
    if lab.ztunnel().is_real() {
        let before = pod.footprint();
        let refused = pod.capture(Options::default()).unwrap_err().to_string();
        assert!(refused.contains("[::1]:15053"), "{refused}");
        assert_eq!(pod.release().unwrap(), culvert_dataplane::Restored::Complete);
        return before.expect_same(&pod.footprint());
    }
    let pod = pod.captured();
    let (_echo, server) = (other.serve("[::]:80"), pod.serve("[::]:80"));
    for family in Family::BOTH {
        expect_captured(&lab, &pod, other.at(family, 80), 15001);
        expect_captured(&lab, &other, pod.at(family, 80), 15006);
        assert_eq!(server.next_accepted().peer.ip(), other.address(family));
    }
}

#[test]
fn an_address_added_after_attach_is_captured_inbound() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod").captured(), lab.pod("other"));
    let server = pod.serve("[::]:80");
    for family in Family::BOTH {
        let address = second(family);
        add(&pod, address);
        wait_until_owned(&lab, &pod, address, true);
        expect_captured(&lab, &other, (address, 80).into(), 15006);
        let accepted = server.next_accepted();
        assert_eq!((accepted.peer.ip(), accepted.local.ip()), (other.address(family), address));
    }
    assert_eq!(pod.counters().accepted_inbound, 2);
}

#[test]
fn a_pod_reaches_an_address_added_after_attach_without_ztunnel_or_wire() {
    let lab = Lab::new();
    let pod = lab.pod("pod").captured();
    let server = pod.serve("[::]:80");
    let wire = lab.wire();
    for family in Family::BOTH {
        let address = second(family);
        add(&pod, address);
        wait_until_owned(&lab, &pod, address, true);
        assert_eq!(pod.connect((address, 80)).unwrap().say(b"myself"), b"myself");
        assert_eq!(server.next_accepted().local.ip(), address);
    }
    let frames = wire.stop();
    assert!(Family::BOTH.iter().all(|family| frames.syns_to((second(*family), 80)).is_empty()), "{frames:?}");
    assert!(!frames.contains_payload(b"myself"));
    assert_eq!((pod.counters().passed_own_addr, pod.counters().captured_outbound), (2, 0));
    assert_eq!(lab.ztunnel().saw().accepted(), []);
}

#[test]
fn a_removed_address_is_remote_and_captured_outbound() {
    let lab = Lab::new();
    let pod = lab.pod("pod").captured();
    let _server = pod.serve("[::]:80");
    for family in Family::BOTH {
        let address = second(family);
        add(&pod, address);
        wait_until_owned(&lab, &pod, address, true);
        assert_eq!(pod.connect((address, 80)).unwrap().say(b"mine"), b"mine");
        remove(&pod, address);
        wait_until_owned(&lab, &pod, address, false);
        // ztunnel accepts whatever its destination may be.
        let captured = pod.connect((address, 80)).unwrap();
        assert_eq!(captured.peer_addr(), (address, 80).into());
    }
    assert_eq!((pod.counters().passed_own_addr, pod.counters().captured_outbound), (2, 2));
    assert_eq!(pod.counters().accepted_outbound, 2);
}

#[test]
fn an_address_that_moved_to_another_pod_is_captured_at_both_ends() {
    let lab = Lab::new();
    let (old, new, other) = (lab.pod("old").captured(), lab.pod("new").captured(), lab.pod("other"));
    let (_old_server, server) = (old.serve("[::]:80"), new.serve("[::]:80"));
    for family in Family::BOTH {
        let address = second(family);
        add(&old, address);
        wait_until_owned(&lab, &old, address, true);
        expect_captured(&lab, &other, (address, 80).into(), 15006);
        remove(&old, address);
        add(&new, address);
        wait_until_owned(&lab, &old, address, false);
        wait_until_owned(&lab, &new, address, true);
        forget_neighbours(&lab, &[&old, &new, &other]);

        // Its former owner is a stranger now: out by 15001, in by 15006.
        expect_captured(&lab, &old, (address, 80).into(), 15001);
        assert_eq!(server.next_accepted().local.ip(), address);
        let accepted = lab.ztunnel().wait_for_accepted(15006, 1);
        assert_eq!((&*accepted[0].pod, accepted[0].destination.ip()), (new_uid(&lab, &new), address));
        expect_captured(&lab, &other, (address, 80).into(), 15006);
        assert_eq!(server.next_accepted().peer.ip(), other.address(family));
    }
}

/// The pod as ztunnel names it.
fn new_uid<'a>(lab: &Lab, pod: &'a Pod) -> &'a str {
    if lab.ztunnel().is_real() { "pod-3" } else { pod.name() }
}

/// CNI gives an address to a new sandbox before the old one is deleted.
#[test]
fn an_address_that_two_pods_report_belongs_to_the_newer_one_as_long_as_it_is_there() {
    let lab = Lab::builder().without_ztunnel().start();
    let (old, new, other) = (Netns::create().unwrap(), Netns::create().unwrap(), Netns::create().unwrap());
    for shared in [IpAddr::from([10, 9, 9, 9]), "fd00:9::9".parse().unwrap()] {
        let owner = || lab.map(POD_ADDRESSES).get::<_, u64>(&Address::from(shared));
        let register = |netns| lab.dataplane().register(netns, &[shared], Options::default()).unwrap();
        for netns in [&other, &old, &new] {
            register(netns);
            assert_eq!(owner(), Some(netns.cookie()));
        }
        // As an agent does that starts, in whatever order.
        for netns in [&old, &new, &other] {
            register(netns);
            assert_eq!(owner(), Some(new.cookie()));
            lab.dataplane().activate(netns).unwrap();
        }
        lab.restart_dataplane();
        for netns in [&old, &new] {
            lab.dataplane().resume(netns, &[shared]).unwrap();
            assert_eq!(owner(), Some(new.cookie()));
        }
        // Whatever way it goes, the older one has it again; what nobody reports any more is nobody's.
        lab.dataplane().withdraw(&new).unwrap();
        assert_eq!(owner(), Some(old.cookie()));
        lab.dataplane().resume(&other, &[shared]).unwrap();
        register(&new);
        lab.dataplane().forget(old.cookie()).unwrap();
        assert!([Some(new.cookie()), Some(other.cookie())].contains(&owner()), "{:?}", owner());
        lab.dataplane().register(&new, &[], Options::default()).unwrap();
        assert_eq!(owner(), Some(other.cookie()));
        lab.dataplane().forget(other.cookie()).unwrap();
        assert_eq!(owner(), None);
        lab.dataplane().forget(new.cookie()).unwrap();
    }
}

#[test]
fn addresses_that_changed_while_no_agent_ran_are_in_step_once_the_pod_is_resumed() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod").captured(), lab.pod("other"));
    let _server = pod.serve("[::]:80");
    let (gone, come) = (second(Family::V4), second(Family::V6));
    add(&pod, gone);
    wait_until_owned(&lab, &pod, gone, true);
    lab.restart_dataplane();
    // Nobody watches until the pod is resumed.
    remove(&pod, gone);
    add(&pod, come);
    lab.dataplane().resume(pod.netns(), &[pod.v4().into(), pod.v6().into()]).unwrap();
    wait_until_owned(&lab, &pod, gone, false);
    wait_until_owned(&lab, &pod, come, true);
    pod.connect((gone, 80)).expect("an address of nobody is remote: ztunnel takes the connection");
    expect_captured(&lab, &other, (come, 80).into(), 15006);
    assert_eq!(pod.connect((come, 80)).unwrap().say(b"myself"), b"myself");
}
