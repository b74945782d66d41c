//! Every path moves exactly its counters, each by one.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{io::ErrorKind, net::SocketAddr};

use culvert_dataplane::Options;
use culvert_tests::{Behaviour, Connection, Dial, Family, Host, Lab, Pod};

/// Runs `work` and compares what moved meanwhile in the pod.
#[track_caller]
fn assert_counts<T>(pod: &Pod, expected: &[&str], work: impl FnOnce() -> T) -> T {
    let before = pod.counters();
    let outcome = work();
    let counted = pod.counted_since(&before);
    let expected = expected.iter().map(|name| (*name, 1)).collect();
    assert_eq!(counted, expected);
    outcome
}

/// Connects and talks.
fn talk(dial: &Dial<'_>) -> Connection {
    let mut connection = dial.connect().unwrap_or_else(|error| panic!("{dial:?}: {error}"));
    assert_eq!(connection.say(b"hello"), b"hello", "{dial:?}");
    connection
}

/// Ends a conversation so that no packet of it comes later; that moves nothing more.
#[track_caller]
fn end(pod: &Pod, expected: &[&str], mut connection: Connection) {
    assert_counts(pod, expected, || {
        connection.finish().unwrap();
        assert_eq!(connection.receive_to_end().unwrap(), b"");
    });
}

/// A conversation that moves these counters, and none when it ends.
#[track_caller]
fn assert_conversation(pod: &Pod, dial: &Dial<'_>, expected: &[&str]) {
    let connection = assert_counts(pod, expected, || talk(dial));
    end(pod, &[], connection);
}

#[test]
fn each_way_out_moves_its_counters_by_one() {
    let lab = Lab::new();
    let (pod, remote) = (lab.pod("pod").captured(), lab.pod("remote"));
    let _remote = remote.serve("[::]:80");
    let _own = assert_counts(&pod, &["bind_shared", "listener_of_pod"], || pod.serve("[::]:80"));
    for family in Family::BOTH {
        assert_conversation(
            &pod,
            &pod.to(remote.at(family, 80)),
            &["captured_outbound", "lookup_captured", "accepted_outbound", "ztunnel_upstream"],
        );
        assert_conversation(
            &pod,
            &pod.to(remote.at(family, 80)).from(pod.address(family)),
            &[
                "bind_untouched",
                "captured_outbound",
                "lookup_captured",
                "accepted_outbound",
                "ztunnel_upstream",
            ],
        );
        let own_address = ["passed_own_addr", "lookup_self", "accepted_by_pod"];
        assert_conversation(&pod, &pod.to(pod.at(family, 80)), &own_address);
        assert_conversation(&pod, &pod.to(pod.at(family, 80)).on_device("eth0"), &own_address);
        let loopback = ["passed_loopback", "lookup_loopback", "accepted_by_pod"];
        assert_conversation(&pod, &pod.to((family.loopback(), 80)), &loopback);
    }
}

#[test]
fn each_way_in_moves_its_counters_by_one() {
    let lab = Lab::new();
    let (pod, remote) = (lab.pod("pod").captured(), lab.pod("remote"));
    let _echo = pod.serve("[::]:80");
    for family in Family::BOTH {
        assert_conversation(
            &pod,
            &remote.to(pod.at(family, 80)),
            &[
                "lookup_inbound",
                "accepted_inbound",
                "bind_by_ztunnel",
                "ztunnel_to_pod",
                "lookup_from_ztunnel",
                "accepted_by_pod",
            ],
        );
        let connection =
            assert_counts(&pod, &["host_flow_added", "lookup_host_flow", "accepted_by_pod"], || {
                talk(&lab.node().to(pod.at(family, 80)))
            });
        end(&pod, &["host_flow_closed"], connection);
        assert_closed(&pod, &remote, pod.at(family, 15006), &["lookup_self_call", "accepted_inbound"]);
        assert_closed(&pod, &remote, pod.at(family, 15001), &["lookup_self_call", "accepted_inbound"]);
        assert_closed(
            &pod,
            &pod,
            (family.loopback(), 15006).into(),
            &["passed_loopback", "lookup_loopback", "accepted_loopback"],
        );
        assert_counts(&pod, &["lookup_hbone", "accepted_hbone"], || {
            let mut tunnel = remote.connect(pod.at(family, 15008)).unwrap();
            tunnel.send(b"no tunnel\r\n\r\n").unwrap();
            tunnel.receive_to_end().unwrap();
        });
    }
}

/// A connection that ztunnel accepts and closes.
#[track_caller]
fn assert_closed(pod: &Pod, from: &Host, to: SocketAddr, expected: &[&str]) {
    assert_counts(pod, expected, || from.connect(to).unwrap().closed());
}

#[test]
fn each_way_through_a_tunnel_moves_its_counters_by_one() {
    // The first and second pod of a lab; ztunnel has to know before it starts.
    let tunnel = ["10.244.0.3", "fd00:244::3"].map(|address| address.parse().unwrap()).to_vec();
    let lab = Lab::builder().ztunnel(Behaviour { tunnel, ..Behaviour::default() }).start();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server").captured());
    let _echo = server.serve("[::]:80");
    for family in Family::BOTH {
        let before = client.counters();
        let inbound = [
            "lookup_hbone",
            "accepted_hbone",
            "bind_by_ztunnel",
            "ztunnel_to_pod",
            "lookup_from_ztunnel",
            "accepted_by_pod",
        ];
        let _connection = assert_counts(&server, &inbound, || talk(&client.to(server.at(family, 80))));
        let outbound = ["captured_outbound", "lookup_captured", "accepted_outbound", "ztunnel_upstream"];
        assert_eq!(client.counted_since(&before), outbound.map(|name| (name, 1)).into());
    }
}

#[test]
fn a_bypass_pod_moves_its_counters_by_one() {
    let lab = Lab::new();
    let pod = lab.pod("pod").captured_with(Options { bypass_inbound: true });
    let remote = lab.pod("remote");
    let _echo = pod.serve("[::]:80");
    for family in Family::BOTH {
        assert_conversation(&pod, &remote.to(pod.at(family, 80)), &["lookup_bypass", "accepted_by_pod"]);
    }
}

#[test]
fn each_refusal_moves_one_counter_by_one() {
    let lab = Lab::new();
    let (pod, remote) = (lab.pod("pod").captured(), lab.pod("remote"));
    let _echo = pod.serve("[::]:80");
    lab.ztunnel().kill();
    let refused = |from: &Host, to: SocketAddr| {
        assert_eq!(from.connect(to).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    };
    for family in Family::BOTH {
        assert_counts(&pod, &["refused_outbound"], || refused(&pod, remote.at(family, 80)));
        assert_counts(&pod, &["lookup_refused_in"], || refused(&remote, pod.at(family, 80)));
        assert_counts(&pod, &["lookup_refused_in"], || refused(&remote, pod.at(family, 15001)));
        assert_counts(&pod, &["lookup_hbone"], || refused(&remote, pod.at(family, 15008)));
    }
}

#[test]
fn each_bind_and_listen_moves_one_counter_by_one() {
    let lab = Lab::new();
    let pod = lab.pod("pod").captured();
    for family in Family::BOTH {
        assert_counts(&pod, &["bind_shared", "listener_of_pod"], || pod.serve((family.any(), 80)));
        assert_counts(&pod, &["bind_untouched", "listener_of_pod"], || pod.serve((family.any(), 0)));
        assert_counts(&pod, &["bind_shared", "listener_mark_clr"], || {
            pod.listen((family.any(), 81)).mark(7).serve()
        });
        for port in [15001, 15006, 15008, 15053] {
            assert_counts(&pod, &["bind_reserved"], || {
                let refused = pod.listen((family.any(), port)).try_serve().unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::AddrInUse);
            });
        }
    }
}

#[test]
fn a_pod_that_is_registered_only_passes_and_counts_it() {
    let lab = Lab::new();
    let (pod, remote) = (lab.pod("pod"), lab.pod("remote"));
    let echo = remote.serve("[::]:80");
    let before = pod.counters();
    pod.register(Options::default()).unwrap();
    pod.add_to_ztunnel().unwrap();
    let stored = pod.counted_since(&before);
    let five_and_two_of_udp = [("bind_by_ztunnel", 7), ("listener_stored", 5)];
    assert_eq!(stored, five_and_two_of_udp.into());
    for family in Family::BOTH {
        assert_counts(&pod, &["passed_inactive"], || {
            let connection = talk(&pod.to(remote.at(family, 80)));
            assert_eq!(echo.next_accepted().peer, connection.local_addr());
        });
    }
}

#[test]
fn a_datagram_for_nobody_in_particular_is_passed_and_counted() {
    let lab = Lab::new();
    let (pod, remote) = (lab.pod("pod").captured(), lab.pod("remote"));
    pod.serve_udp("[::]:5353");
    for family in Family::BOTH {
        assert_counts(&pod, &["lookup_not_tcp"], || {
            assert_eq!(remote.ask_udp(pod.at(family, 5353), b"who?").unwrap(), b"who?");
        });
    }
}
