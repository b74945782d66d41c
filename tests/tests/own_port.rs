//! The workload's own port numbers, on which ztunnel's accepted sockets sit as well: without NAT they
//! keep the original destination's port (istio#52260, istio#38982).

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::io::ErrorKind;

use culvert_abi::{FlowKey, names};
use culvert_tests::{Connection, Family, Host, Lab, Listen, Pod, Server, TcpState};
use socket2::{Domain, Socket, Type};

/// Ways of a server to listen: how it is written, and on which address.
const WAYS: usize = 16;

/// A server on `port`, restarted in its `way`; which it is, and whom it serves.
fn listen(pod: &Pod, way: usize, port: u16) -> (Listen<'_>, &'static [Family]) {
    let (v4, v6) = (pod.at(Family::V4, port), pod.at(Family::V6, port));
    let any4 = (Family::V4.any(), port).into();
    let any6 = (Family::V6.any(), port).into();
    let (on, families): (_, &[Family]) = match way % 4 {
        0 => (any6, &Family::BOTH),
        1 => (any4, &[Family::V4]),
        2 => (v4, &[Family::V4]),
        _ => (v6, &[Family::V6]),
    };
    let listen = pod.listen(on);
    let listen = match way / 4 {
        0 => listen.reuse_address(true),
        1 => listen.reuse_address(false),
        2 => listen.reuse_address(false).reuse_port(),
        // Go since 1.24.
        _ => listen.reuse_address(true).mptcp(),
    };
    (listen, families)
}

/// The port of a way.
fn port(way: usize) -> u16 {
    8000 + way as u16
}

/// Listens in each way, and proves that the server is reached.
fn restart_in_every_way(pod: &Pod, client: &Host, state: TcpState) {
    for way in 0..WAYS {
        let (port, sockets) = (port(way), pod.tcp_sockets());
        let occupied = sockets.iter().filter(|socket| socket.local.port() == port);
        assert!(occupied.clone().any(|socket| socket.state == state), "nothing to overcome: {sockets:#?}");
        let (listen, families) = listen(pod, way, port);
        let server = listen.try_serve().unwrap_or_else(|error| panic!("{error}: {listen:?}, {sockets:#?}"));
        for family in families {
            let mut connection = client.connect(pod.at(*family, port)).unwrap();
            assert_eq!(connection.say(b"again"), b"again");
            assert_eq!(server.next_accepted().peer.ip(), client.address(*family));
        }
    }
}

/// Whether each way's port has a socket of ztunnel in this state, for both families.
fn wait_for_each_port(pod: &Pod, state: TcpState, own: bool) {
    let what = format!("{state:?} on every port");
    pod.wait_for_tcp_sockets(&what, |sockets| {
        (0..WAYS).all(|way| {
            Family::BOTH.iter().all(|family| {
                sockets.iter().any(|socket| {
                    socket.state == state
                        && socket.local.port() == port(way)
                        && Family::of(socket.local.ip()) == *family
                        && (socket.local.ip() == pod.address(*family)) == own
                })
            })
        })
    });
}

/// A server for each way, and connections of both families to each of them.
fn occupy(client: &Host, server: &Pod) -> Vec<(Server, Vec<Connection>)> {
    let occupied = (0..WAYS).map(|way| {
        let echo = server.serve((Family::V6.any(), port(way)));
        let connections = Family::BOTH.map(|family| {
            let mut connection = client.connect(server.at(family, port(way))).unwrap();
            assert_eq!(connection.say(b"first"), b"first");
            connection
        });
        (echo, connections.into())
    });
    occupied.collect()
}

#[test]
fn a_server_restarts_while_captured_connections_to_it_are_open() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client"), lab.pod("server").captured());
    let mut open = occupy(&client, &server);
    for (echo, _) in &mut open {
        echo.stop();
    }
    wait_for_each_port(&server, TcpState::Established, true);
    restart_in_every_way(&server, &client, TcpState::Established);
    for (_, connections) in &mut open {
        for connection in connections {
            assert_eq!(connection.say(b"still there"), b"still there");
        }
    }
}

#[test]
fn a_server_restarts_while_captured_connections_to_it_are_in_time_wait() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client"), lab.pod("server").captured());
    for (echo, connections) in occupy(&client, &server) {
        // The server ends first, so ztunnel ends the client's connection.
        drop(echo);
        for mut connection in connections {
            connection.closed();
        }
    }
    wait_for_each_port(&server, TcpState::TimeWait, true);
    restart_in_every_way(&server, &client, TcpState::TimeWait);
}

#[test]
fn a_server_starts_while_captured_connections_to_its_port_number_elsewhere_are_open() {
    let lab = Lab::new();
    let (pod, elsewhere) = (lab.pod("pod").captured(), lab.pod("elsewhere"));
    let mut open = occupy(&pod, &elsewhere);
    wait_for_each_port(&pod, TcpState::Established, false);
    restart_in_every_way(&pod, &lab.outside("client"), TcpState::Established);
    for (_, connections) in &mut open {
        for connection in connections {
            assert_eq!(connection.say(b"still there"), b"still there");
        }
    }
}

#[test]
fn a_server_starts_while_captured_connections_to_its_port_number_elsewhere_are_in_time_wait() {
    let lab = Lab::new();
    let (pod, elsewhere) = (lab.pod("pod").captured(), lab.pod("elsewhere"));
    for (echo, connections) in occupy(&pod, &elsewhere) {
        drop(echo);
        for mut connection in connections {
            connection.closed();
        }
    }
    wait_for_each_port(&pod, TcpState::TimeWait, false);
    restart_in_every_way(&pod, &lab.outside("client"), TcpState::TimeWait);
}

#[test]
fn two_listeners_on_one_port_are_still_a_conflict() {
    let lab = Lab::new();
    let (client, pod) = (lab.pod("client"), lab.pod("pod").captured());
    let mut port = 8000;
    for family in Family::BOTH {
        let (any, own) = (family.any(), pod.address(family));
        for (first, second) in [(any, any), (any, own), (own, any), (own, own)] {
            for reuse in [[false, false], [false, true], [true, false], [true, true]] {
                port += 1;
                let server = pod.listen((first, port)).reuse_address(reuse[0]).serve();
                let conflict = pod.listen((second, port)).reuse_address(reuse[1]).try_serve();
                let error = conflict.expect_err("a conflict");
                assert_eq!(error.kind(), ErrorKind::AddrInUse, "{first} {second} {port} {reuse:?}");
                let mut connection = client.connect((own, port)).unwrap();
                assert_eq!(connection.say(b"mine"), b"mine");
                server.next_accepted();
            }
        }
    }
}

/// Without us the second bind() would fail; this is the price of the cure.
#[test]
fn two_sockets_may_be_bound_to_one_port_but_only_one_may_listen() {
    let lab = Lab::new();
    let pod = lab.pod("pod").captured();
    let sockets = pod.run(|| {
        [1, 2].map(|_| {
            let socket = Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
            socket.bind(&std::net::SocketAddr::from((Family::V6.any(), 8000)).into()).unwrap();
            socket
        })
    });
    sockets[0].listen(1).unwrap();
    assert_eq!(sockets[1].listen(1).unwrap_err().kind(), ErrorKind::AddrInUse);
    let counters = pod.counters();
    assert_eq!((counters.bind_shared, counters.listener_of_pod), (2, 1), "{counters:?}");
}

#[test]
fn one_client_port_reaches_two_ports_of_one_pod() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let (first, second) = (server.serve("[::]:80"), server.serve("[::]:81"));
    for (client, port) in [(lab.pod("client"), 40_001), (lab.pod("captured").captured(), 40_003)] {
        for family in Family::BOTH {
            let dial = |to| client.to(server.at(family, to)).from_port(client.address(family), port);
            let (mut one, mut two) = (dial(80).connect().unwrap(), dial(81).connect().unwrap());
            for _ in 0..2 {
                assert_eq!(one.say(b"eighty"), b"eighty");
                assert_eq!(two.say(b"eighty-one"), b"eighty-one");
            }
            for (echo, connection) in [(&first, &one), (&second, &two)] {
                assert_eq!(connection.local_addr().port(), port);
                assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
            }
        }
    }
}

#[test]
fn one_port_of_a_host_process_reaches_two_ports_of_one_pod() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let (_first, _second) = (server.serve("[::]:80"), server.serve("[::]:81"));
    for family in Family::BOTH {
        let from = lab.node().address(family);
        let dial = |to| lab.node().to(server.at(family, to)).from_port(from, 40_001).connect().unwrap();
        let (mut one, mut two) = (dial(80), dial(81));
        assert_eq!(one.say(b"eighty"), b"eighty");
        one.reset();
        // The entry of one is not the other's.
        assert_eq!(two.say(b"eighty-one"), b"eighty-one");
        assert_eq!(host_flows(&lab), 1);
        two.reset();
        assert_eq!(host_flows(&lab), 0);
    }
    assert_eq!(server.counters().lookup_inbound, 0);
}

/// How many connections of host processes are recorded.
fn host_flows(lab: &Lab) -> usize {
    lab.map(names::HOST_FLOWS).keys::<FlowKey>().len()
}
