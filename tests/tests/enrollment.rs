//! Pods that cannot be captured: the reason is named, and nothing is captured.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use culvert_dataplane::{Error, Options, Restored};
use culvert_tests::{Behaviour, CaptureError, Family, Lab, Pod};

/// The pod's traffic is as if nobody had tried.
fn assert_not_captured(lab: &Lab, pod: &Pod, peer: &Pod) {
    let far = peer.serve("[::]:9000");
    let near = pod.serve("[::]:9000");
    let wire = lab.wire();
    for family in Family::BOTH {
        let mut connection = pod.connect(peer.at(family, 9000)).unwrap();
        assert_eq!(connection.say(b"in clear"), b"in clear");
        assert_eq!(far.next_accepted().peer, connection.local_addr());
        let mut connection = peer.connect(pod.at(family, 9000)).unwrap();
        assert_eq!(connection.say(b"in clear"), b"in clear");
        assert_eq!(near.next_accepted().peer, connection.local_addr());
    }
    assert!(wire.stop().contains_payload(b"in clear"));
}

#[test]
fn a_ztunnel_that_is_not_transparent_fails_the_enrollment_with_that_reason() {
    let lab = Lab::builder().ztunnel(Behaviour { no_transparent: true, ..Behaviour::default() }).start();
    let (pod, peer) = (lab.pod("pod"), lab.pod("peer"));
    let error = pod.capture(Options::default()).unwrap_err();
    assert!(
        matches!(error, CaptureError::Dataplane(Error::NotTransparent { cookie, .. }) if cookie == pod.cookie()),
        "{error}"
    );
    assert_not_captured(&lab, &pod, &peer);
    assert_eq!(pod.counters().captured_outbound, 0);
    assert_eq!(pod.release().unwrap(), Restored::Complete);
    assert_not_captured(&lab, &pod, &peer);
}

#[test]
fn a_listener_that_was_there_first_fails_the_enrollment_with_its_port() {
    let lab = Lab::new();
    let (pod, peer) = (lab.pod("pod"), lab.pod("peer"));
    let loopback = [Family::V4.loopback(), Family::V6.loopback()];
    for on in [15001, 15006, 15008, 15053] {
        for ip in [Family::V6.any(), Family::V4.any(), loopback[0], loopback[1]] {
            for shared in [true, false] {
                // One that shares joins ztunnel's group and would get a share of everybody's traffic, one
                // that does not makes ztunnel's bind() fail.
                let foreign = pod.listen((ip, on)).reuse_address(false);
                let mut foreign = if shared { foreign.reuse_port() } else { foreign }.serve();
                let error = pod.capture(Options::default()).unwrap_err();
                let CaptureError::Dataplane(Error::ForeignListener { address, port, .. }) = error else {
                    panic!("{on} {ip} {shared}: {error}");
                };
                assert_eq!((address, port), (ip, on));
                foreign.stop();
                assert_eq!(pod.release().unwrap(), Restored::Complete);
            }
        }
    }
    assert_not_captured(&lab, &pod, &peer);
    // Once it is gone nothing is in the way.
    let pod = pod.captured();
    let far = peer.serve("[::]:80");
    assert_eq!(pod.connect(peer.at(Family::V4, 80)).unwrap().say(b"hello"), b"hello");
    far.next_accepted();
    assert_eq!(pod.counters().accepted_outbound, 1);
}

#[test]
fn a_ztunnel_that_nacks_fails_the_enrollment_with_its_words() {
    let refusal = ("pod".to_owned(), "no room".to_owned());
    let lab = Lab::builder().ztunnel(Behaviour { nack: vec![refusal], ..Behaviour::default() }).start();
    if lab.ztunnel().is_real() {
        // It refuses what it cannot bind; see above.
        return;
    }
    let (pod, peer) = (lab.pod("pod"), lab.pod("peer"));
    let error = pod.capture(Options::default()).unwrap_err();
    assert!(matches!(error, CaptureError::Ztunnel(_)), "{error}");
    assert!(error.to_string().contains("no room"), "{error}");
    assert_not_captured(&lab, &pod, &peer);
    assert_eq!(pod.counters().captured_outbound, 0);
    assert_eq!(pod.release().unwrap(), Restored::Complete);
    assert_not_captured(&lab, &pod, &peer);
    // Another pod is not concerned.
    let other = lab.pod("other").captured();
    let far = peer.serve("[::]:80");
    assert_eq!(other.connect(peer.at(Family::V4, 80)).unwrap().say(b"hello"), b"hello");
    far.next_accepted();
    assert_eq!(other.counters().accepted_outbound, 1);
}
