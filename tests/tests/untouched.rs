//! UDP and ICMP of a captured pod: as if Culvert were not there (DNS will be another matter).

use std::net::IpAddr;

use culvert_tests::{Family, Frames, Host, Lab};

/// IP protocol numbers (IANA).
const ICMP: u8 = 1;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

const QUESTION: &[u8] = b"datagram of a captured pod";

/// Who sent what to whom, in the order in which it passed `host`'s `eth0`.
fn passed(frames: &Frames, host: &Host, protocol: u8) -> Vec<(bool, IpAddr, IpAddr, Vec<u8>)> {
    let of_host = |address: IpAddr| [host.v4().into(), host.v6().into()].contains(&address);
    let frames = frames.on(host.name()).only(|frame| {
        frame.protocol == protocol && (of_host(frame.source.ip()) || of_host(frame.destination.ip()))
    });
    let seen = frames
        .iter()
        .map(|frame| (frame.outgoing, frame.source.ip(), frame.destination.ip(), frame.payload.clone()));
    seen.collect()
}

/// A question of `client` to `server` and the answer: seen at both ends as sent, nothing else.
fn expect_exchange(frames: &Frames, client: &Host, server: &Host, family: Family) {
    let (from, to) = (client.address(family), server.address(family));
    let fits = |family: Family| move |seen: &(bool, IpAddr, IpAddr, Vec<u8>)| Family::of(seen.1) == family;
    for (host, asking) in [(client, true), (server, false)] {
        let seen: Vec<_> = passed(frames, host, UDP).into_iter().filter(fits(family)).collect();
        let question = (asking, from, to, QUESTION.to_vec());
        let answer = (!asking, to, from, QUESTION.to_vec());
        assert_eq!(seen, [question, answer], "at {}", host.name());
    }
}

#[test]
fn udp_from_a_captured_pod_leaves_as_it_was_sent() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server"));
    let askers = server.serve_udp("[::]:5353");
    let wire = lab.wire();
    for family in Family::BOTH {
        assert_eq!(client.ask_udp(server.at(family, 5353), QUESTION).unwrap(), QUESTION);
        askers.wait_for("the question", |asker| asker.ip() == client.address(family));
    }
    let frames = wire.stop();
    for family in Family::BOTH {
        expect_exchange(&frames, &client, &server, family);
    }
    assert_eq!(lab.ztunnel().saw().accepted(), []);
}

#[test]
fn udp_to_a_captured_pod_arrives_as_it_was_sent() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client"), lab.pod("server").captured());
    // Port numbers of ztunnel mean nothing to UDP, 15053 aside.
    let askers = server.serve_udp("[::]:5353");
    let wire = lab.wire();
    for family in Family::BOTH {
        assert_eq!(client.ask_udp(server.at(family, 5353), QUESTION).unwrap(), QUESTION);
        askers.wait_for("the question", |asker| asker.ip() == client.address(family));
    }
    let frames = wire.stop();
    for family in Family::BOTH {
        expect_exchange(&frames, &client, &server, family);
    }
    assert_eq!(server.counters().lookup_not_tcp, 2, "one lookup for each datagram, and it passed");
    assert_eq!(lab.ztunnel().saw().accepted(), []);
}

#[test]
fn udp_between_captured_pods_needs_no_ztunnel() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server").captured());
    let askers = server.serve_udp("[::]:443");
    lab.ztunnel().kill();
    let wire = lab.wire();
    for family in Family::BOTH {
        assert_eq!(client.ask_udp(server.at(family, 443), QUESTION).unwrap(), QUESTION);
        askers.wait_for("the question", |asker| asker.ip() == client.address(family));
    }
    let frames = wire.stop();
    for family in Family::BOTH {
        expect_exchange(&frames, &client, &server, family);
    }
}

#[test]
fn a_connected_udp_socket_is_not_refused_while_ztunnel_is_absent() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server"));
    let _askers = server.serve_udp("[::]:443");
    lab.ztunnel().kill();
    for family in Family::BOTH {
        let socket = client.run(|| std::net::UdpSocket::bind((family.any(), 0))).unwrap();
        socket.set_read_timeout(Some(culvert_tests::DEADLINE)).unwrap();
        socket.connect(server.at(family, 443)).unwrap();
        socket.send(QUESTION).unwrap();
        let mut answer = [0; 64];
        let length = socket.recv(&mut answer).unwrap();
        assert_eq!(&answer[..length], QUESTION);
    }
    assert_eq!(client.counters().refused_outbound, 0);
}

#[test]
fn icmp_of_a_captured_pod_is_untouched_in_both_directions() {
    let lab = Lab::new();
    let (captured, other) = (lab.pod("captured").captured(), lab.pod("other"));
    for family in Family::BOTH {
        let (protocol, request, reply) = match family {
            Family::V4 => (ICMP, 8, 0),
            Family::V6 => (ICMPV6, 128, 129),
        };
        for (from, to) in [(&captured, &other), (&other, &captured)] {
            let wire = lab.wire();
            from.ping(to.address(family)).unwrap();
            let frames = wire.stop();
            for (host, asking) in [(from, true), (to, false)] {
                // Without neighbour discovery, which is ICMP too.
                let seen: Vec<_> = passed(&frames, host, protocol)
                    .into_iter()
                    .filter(|seen| [request, reply].contains(&seen.3[0]))
                    .map(|seen| (seen.0, seen.1, seen.2, seen.3[0], seen.3.ends_with(b"abcd")))
                    .collect();
                let (from, to) = (from.address(family), to.address(family));
                let expected = [(asking, from, to, request, true), (!asking, to, from, reply, true)];
                assert_eq!(seen, expected, "at {}", host.name());
            }
        }
    }
}
