//! Connections of the host's own processes: kubelet's probes, hostNetwork pods.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use culvert_abi::{FlowKey, names};
use culvert_tests::{Family, Host, Lab, Pod, eventually};
use socket2::SockRef;

/// An address of each family in the node's networks that nobody has yet.
const FREE: [(Family, &str); 2] = [(Family::V4, "10.244.200.1"), (Family::V6, "fd00:244::c8:1")];

#[test]
fn a_probe_sees_the_pod_and_the_pod_sees_the_nodes_real_address() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let echo = server.serve("[::]:80");
    let mut probes = 0;
    for family in Family::BOTH {
        let (node, to) = (lab.node(), server.at(family, 80));
        let mut dials = vec![node.to(to), node.to(to).non_blocking(), node.to(to).from(node.address(family))];
        dials.push(node.to(to).fast_open(b"alive?"));
        if family == Family::V4 {
            dials.push(node.to(to).v4_mapped());
        }
        for dial in dials {
            let mut probe = dial.connect().unwrap_or_else(|error| panic!("{dial:?}: {error}"));
            probe.send(b"alive?").unwrap();
            assert_eq!(probe.receive(6).unwrap(), b"alive?", "{dial:?}");
            assert_eq!(echo.next_accepted().peer, probe.local_addr(), "{dial:?}");
            assert_eq!(probe.local_addr().ip(), node.address(family), "{dial:?}");
            probe.reset();
            probes += 1;
        }
    }
    let counters = server.counters();
    assert_eq!((counters.host_flow_added, counters.host_flow_closed), (probes, probes), "{counters:?}");
    assert_eq!((counters.lookup_host_flow, counters.accepted_by_pod), (probes, probes), "{counters:?}");
    assert_eq!((counters.lookup_inbound, counters.accepted_inbound), (0, 0), "{counters:?}");
    assert_eq!(lab.ztunnel().saw().accepted(), []);
    assert_eq!(host_flows(&lab), 0);
}

#[test]
fn a_probe_works_while_ztunnel_is_down_and_nobody_else_gets_in() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let outside = lab.outside("outside");
    let echo = server.serve("[::]:80");
    lab.ztunnel().kill();
    for family in Family::BOTH {
        let mut probe = lab.node().connect(server.at(family, 80)).unwrap();
        assert_eq!(probe.say(b"alive?"), b"alive?");
        assert_eq!(echo.next_accepted().peer, probe.local_addr());
        assert_refused(outside.connect(server.at(family, 80)));
    }
    assert_eq!(echo.accepted().len(), 2);
    assert_eq!(server.counters().lookup_refused_in, 2);
}

#[test]
fn a_probe_of_a_closed_port_is_refused_at_once_and_forgotten() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    for family in Family::BOTH {
        let begin = Instant::now();
        assert_refused(lab.node().connect(server.at(family, 81)));
        // The bound is 1 s; three times that for a loaded machine.
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    }
    let counters = server.counters();
    assert_eq!((counters.host_flow_added, counters.host_flow_closed), (2, 2), "{counters:?}");
    assert_eq!(host_flows(&lab), 0);
}

#[test]
fn a_connection_routed_through_the_node_is_not_taken_for_a_probe() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let outside = lab.outside("outside");
    let echo = server.serve("[::]:80");
    for family in Family::BOTH {
        // The same port is in use by a probe at that moment.
        let probe = lab.node().connect(server.at(family, 80)).unwrap();
        assert_eq!(echo.next_accepted().peer, probe.local_addr());
        let from = (outside.address(family), probe.local_addr().port());
        let mut connection = outside.to(server.at(family, 80)).from_port(from.0, from.1).connect().unwrap();
        assert_eq!(connection.say(b"hello"), b"hello");
        assert_eq!(echo.next_accepted().peer.ip(), outside.address(family));
        let accepted = lab.ztunnel().wait_for_accepted(15006, 1);
        assert_eq!(accepted[0].peer, from.into());
        lab.ztunnel().forget();
    }
    let counters = server.counters();
    assert_eq!((counters.lookup_host_flow, counters.lookup_inbound), (2, 2), "{counters:?}");
    assert_eq!(counters.accepted_inbound, 2, "{counters:?}");
}

#[test]
fn a_connection_masqueraded_by_the_node_is_not_taken_for_a_probe() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let outside = lab.outside("outside");
    let echo = server.serve("[::]:80");
    // As kube-proxy does for a NodePort: the pod sees the node's address, but no socket of the node.
    let rules = "add table inet nodeport; \
                 add chain inet nodeport postrouting { type nat hook postrouting priority 100; }; \
                 add rule inet nodeport postrouting oifname br0 masquerade";
    let nft = lab.node().command("nft").arg(rules).status().unwrap();
    assert!(nft.success(), "nft: {nft}");
    for family in Family::BOTH {
        let mut connection = outside.connect(server.at(family, 80)).unwrap();
        assert_eq!(connection.say(b"hello"), b"hello");
        assert_eq!(echo.next_accepted().peer.ip(), lab.node().address(family));
        let accepted = lab.ztunnel().wait_for_accepted(15006, 1);
        assert_eq!(accepted[0].peer.ip(), lab.node().address(family));
        lab.ztunnel().forget();
    }
    assert_eq!(server.counters().lookup_host_flow, 0);
}

#[test]
fn the_4_tuple_of_a_finished_probe_in_other_hands_is_not_taken_for_a_probe() {
    let lab = Lab::new();
    let (server, stranger) = (lab.pod("server").captured(), lab.pod("stranger"));
    let echo = server.serve("[::]:80");
    for (family, address) in FREE {
        let free: IpAddr = address.parse().unwrap();
        for ends_with_reset in [true, false] {
            move_address(address, lab.node(), "br0", &server);
            let mut probe = lab.node().to(server.at(family, 80)).from(free).connect().unwrap();
            assert_eq!(probe.say(b"alive?"), b"alive?");
            let tuple = probe.local_addr();
            assert_eq!(echo.next_accepted().peer, tuple);
            if ends_with_reset {
                probe.reset();
            } else {
                probe.finish().unwrap();
                probe.closed();
            }
            lab.node().ip(&format!("addr del {} dev br0", prefix(address)));

            move_address(address, &stranger, "eth0", &server);
            let dial = || stranger.to(server.at(family, 80)).from_port(free, tuple.port()).connect();
            let mut connection = dial().unwrap();
            assert_eq!(connection.say(b"mine now"), b"mine now");
            let accepted = lab.ztunnel().wait_for_accepted(15006, 1);
            assert_eq!(accepted[0].peer, tuple);
            echo.next_accepted();
            connection.reset();
            // Whoever is not a probe is refused then.
            lab.ztunnel().kill();
            assert_refused(dial());
            lab.ztunnel().restart();
            lab.ztunnel().forget();
            stranger.ip(&format!("addr del {} dev eth0", prefix(address)));
        }
    }
    let counters = server.counters();
    assert_eq!((counters.lookup_host_flow, counters.accepted_inbound), (4, 4), "{counters:?}");
    assert_eq!(counters.lookup_refused_in, 4, "{counters:?}");
}

#[test]
fn every_probe_passes_while_host_processes_open_100_000_connections() {
    const CONNECTIONS: usize = 100_000;
    const CLIENTS: usize = 4;
    const PAUSE: Duration = Duration::from_millis(1);
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let echo = server.serve("[::]:80");
    let sink = server.run(|| TcpListener::bind("[::]:81")).unwrap();
    let (over, probes) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| while sink.accept().is_ok() && !over.load(Ordering::Relaxed) {});
        }
        scope.spawn(|| {
            lab.node().run(|| {
                while !over.load(Ordering::Relaxed) {
                    for family in Family::BOTH {
                        let mut probe = lab.node().to(server.at(family, 80)).connect_here().unwrap();
                        assert_eq!(probe.say(b"alive?"), b"alive?");
                        assert_eq!(probe.local_addr().ip(), lab.node().address(family));
                        probes.fetch_add(1, Ordering::Relaxed);
                    }
                    // Not to synchronise, only to leave the machine to the others.
                    thread::sleep(PAUSE);
                }
            });
        });
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let to = server.at(Family::BOTH[client % 2], 81);
                scope.spawn(move || open_and_reset(to, CONNECTIONS / CLIENTS))
            })
            .collect();
        let done: Vec<io::Result<()>> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        over.store(true, Ordering::Relaxed);
        for _ in 0..2 {
            TcpStream::connect(server.at(Family::V4, 81)).unwrap();
        }
        for result in done {
            result.unwrap();
        }
    });
    let probes = probes.into_inner();
    assert!(probes > 100, "only {probes} probes in all that time");
    let node = [Family::V4, Family::V6].map(|family| lab.node().address(family));
    assert!(echo.accepted().iter().all(|accepted| node.contains(&accepted.peer.ip())));
    let opened = (CONNECTIONS + 2 + probes) as u64;
    // The last ones end when the other side has ended too.
    let counters = eventually("the end of every connection", || {
        Some(server.counters()).filter(|counters| counters.host_flow_closed == opened)
    });
    assert_eq!((counters.host_flow_added, host_flows(&lab)), (opened, 0), "{counters:?}");
    // Lookups for 15006 there are: late packets of connections that both sides have forgotten.
    assert_eq!((counters.host_flow_full, counters.accepted_inbound), (0, 0), "{counters:?}");
}

/// Open on failure would let a stranger in, so a probe that cannot be recorded is none.
#[test]
fn a_connection_of_the_host_that_finds_no_room_is_counted_and_goes_through_ztunnel() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let echo = server.serve("[::]:80");
    let flows = lab.map(names::HOST_FLOWS);
    let (host, pod) = (lab.node().v4().into(), server.v4().into());
    let mut room = 0_u32;
    let full = loop {
        // Of a pod that does not exist.
        let netns = u64::MAX - u64::from(room);
        let flow = FlowKey { netns, host, pod, host_port: 1, pod_port: 1, padding: 0 };
        match flows.insert(&flow, &0_u64) {
            Ok(()) => room += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full.raw_os_error(), Some(libc::E2BIG), "after {room}");
    for family in Family::BOTH {
        let mut connection = lab.node().connect(server.at(family, 80)).unwrap();
        assert_eq!(connection.say(b"hello"), b"hello");
        assert_eq!(echo.next_accepted().peer.ip(), lab.node().address(family));
    }
    let counters = server.counters();
    assert_eq!((counters.host_flow_full, counters.host_flow_added), (2, 0), "{counters:?}");
    assert_eq!((counters.lookup_host_flow, counters.accepted_inbound), (0, 2), "{counters:?}");
}

#[test]
fn a_probe_works_with_syn_cookies() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    with_syn_cookies(&server);
    let echo = server.serve("[::]:80");
    for family in Family::BOTH {
        let mut probe = lab.node().connect(server.at(family, 80)).unwrap();
        assert_eq!(probe.say(b"alive?"), b"alive?");
        assert_eq!(echo.next_accepted().peer, probe.local_addr());
    }
    assert_eq!(server.tcp_statistic("SyncookiesRecv"), 2);
    // SYN and last ACK look for a listener.
    let counters = server.counters();
    assert_eq!((counters.lookup_host_flow, counters.accepted_by_pod), (4, 2), "{counters:?}");
    assert_eq!(lab.ztunnel().saw().accepted(), []);
}

#[test]
fn an_inbound_connection_works_with_syn_cookies() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client"), lab.pod("server").captured());
    with_syn_cookies(&server);
    let echo = server.serve("[::]:80");
    for family in Family::BOTH {
        let mut connection = client.connect(server.at(family, 80)).unwrap();
        assert_eq!(connection.say(b"hello"), b"hello");
        assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
    }
    // From the client to ztunnel, and from ztunnel to the workload.
    assert_eq!(server.tcp_statistic("SyncookiesRecv"), 4);
    let counters = server.counters();
    assert_eq!((counters.lookup_inbound, counters.accepted_inbound), (4, 2), "{counters:?}");
    assert_eq!((counters.lookup_from_ztunnel, counters.accepted_by_pod), (4, 2), "{counters:?}");
}

#[test]
fn an_outbound_connection_works_with_syn_cookies() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server"));
    with_syn_cookies(&client);
    let echo = server.serve("[::]:80");
    let wire = lab.wire();
    for family in Family::BOTH {
        let mut connection = client.connect(server.at(family, 80)).unwrap();
        assert_eq!(connection.say(b"hello"), b"hello");
        assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
        let accepted = lab.ztunnel().wait_for_accepted(15001, 1);
        assert_eq!(
            (accepted[0].peer, accepted[0].destination),
            (connection.local_addr(), server.at(family, 80))
        );
        lab.ztunnel().forget();
    }
    assert_eq!(client.tcp_statistic("SyncookiesRecv"), 2);
    let counters = client.counters();
    assert_eq!((counters.lookup_captured, counters.accepted_outbound), (4, 2), "{counters:?}");
    // ztunnel's own connection and no other.
    let syns = wire.stop().on("client").syns_to(server.at(Family::V4, 80));
    assert_eq!(syns.len(), 1, "{syns:?}");
}

/// Every SYN is answered with a cookie; only the ACK makes a socket.
fn with_syn_cookies(pod: &Pod) {
    pod.set_sysctl("net/ipv4/tcp_syncookies", "2");
}

fn assert_refused<T: std::fmt::Debug>(connected: io::Result<T>) {
    assert_eq!(connected.unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

fn prefix(address: &str) -> String {
    format!("{address}/{}", if address.contains(':') { 128 } else { 32 })
}

/// Gives `host` the address, and makes `neighbour` ask anew where it is.
fn move_address(address: &str, host: &Host, interface: &str, neighbour: &Pod) {
    let nodad = if address.contains(':') { "nodad" } else { "" };
    host.ip(&format!("addr add {} dev {interface} {nodad}", prefix(address)));
    neighbour.ip("neigh flush dev eth0");
}

/// From the netns of the calling thread, which is the node's in threads that the test starts.
fn open_and_reset(to: SocketAddr, count: usize) -> io::Result<()> {
    for _ in 0..count {
        let connection = TcpStream::connect(to)?;
        SockRef::from(&connection).set_linger(Some(Duration::ZERO))?;
    }
    Ok(())
}

/// How many connections of host processes are recorded.
fn host_flows(lab: &Lab) -> usize {
    lab.map(names::HOST_FLOWS).keys::<FlowKey>().len()
}
