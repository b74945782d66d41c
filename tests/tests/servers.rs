//! Servers and ztunnels that listen in ways of their own.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    path::Path,
    time::{Duration, Instant},
};

use culvert_tests::{Behaviour, Connection, Dial, Family, Host, Lab, Pod, Server, Wire};

/// The bound is 1 s; this leaves room for a loaded machine.
const SOON: Duration = Duration::from_secs(3);

/// A captured server and everybody who may call it.
struct Scene {
    lab: Lab,
    server: Pod,
    client: Pod,
    captured: Pod,
}

impl Scene {
    fn new() -> Self {
        let lab = Lab::new();
        let server = lab.pod("server").captured();
        let (client, captured) = (lab.pod("client"), lab.pod("captured").captured());
        Self { lab, server, client, captured }
    }

    /// A pod, a captured pod, a process of the node, and the server's own pod call it in this way; each
    /// call is answered, and seen with the caller's address.
    fn is_called(&self, to: SocketAddr, echo: &Server, way: impl for<'a> Fn(Dial<'a>) -> Dial<'a>) {
        for caller in [&*self.client, &self.captured, self.lab.node(), &self.server] {
            let dial = way(caller.to(to));
            let mut connection = dial.connect().unwrap_or_else(|error| panic!("{dial:?}: {error}"));
            assert_eq!(connection.say(b"hello"), b"hello", "{dial:?}");
            let accepted = echo.next_accepted();
            assert_eq!(accepted.peer.ip(), caller.address(Family::of(to.ip())), "{dial:?}");
            assert_eq!(accepted.local, to);
        }
    }

    fn is_called_by_each_family(&self, echo: &Server) {
        for family in Family::BOTH {
            self.is_called(self.server.at(family, echo.port()), echo, |dial| dial);
        }
    }
}

fn assert_refused_soon(from: &Host, to: SocketAddr) {
    let begin = Instant::now();
    assert_eq!(from.connect(to).unwrap_err().kind(), ErrorKind::ConnectionRefused, "{to}");
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}

/// Every TCP packet on a wire belongs to this connection, resets too.
fn assert_alone_on_wire(connection: &Connection, wire: Wire) {
    let ends = [connection.local_addr(), connection.peer_addr()];
    let others = wire.stop().only(|frame| {
        frame.flags.is_some() && !(ends.contains(&frame.source) && ends.contains(&frame.destination))
    });
    assert_eq!(&*others, []);
}

#[test]
fn a_go_server_with_an_mptcp_listener_is_called_by_everybody_with_and_without_mptcp() {
    if !Path::new("/proc/sys/net/mptcp").exists() {
        return;
    }
    let scene = Scene::new();
    let echo = scene.server.listen("[::]:80").mptcp().serve();
    for family in Family::BOTH {
        let to = scene.server.at(family, 80);
        scene.is_called(to, &echo, |dial| dial);
        scene.is_called(to, &echo, |dial| dial.mptcp());
        let loopback = scene.server.to((family.loopback(), 80)).mptcp();
        assert_eq!(loopback.connect().unwrap().say(b"self"), b"self");
        echo.next_accepted();
    }
}

#[test]
fn servers_that_share_a_port_by_reuse_port_only_are_called_by_everybody() {
    let scene = Scene::new();
    let shared = || scene.server.listen("[::]:80").reuse_address(false).reuse_port().serve();
    let only = shared();
    scene.is_called_by_each_family(&only);
    let second = shared();
    for _ in 0..64 {
        let to = scene.server.at(Family::V4, 80);
        assert_eq!(scene.client.connect(to).unwrap().say(b"hello"), b"hello");
    }
    assert!(!second.accepted().is_empty());
    assert!(only.accepted().len() > 8);
    assert_eq!(only.accepted().len() + second.accepted().len(), 8 + 64);
}

#[test]
fn an_ipv6_only_server_is_called_by_ipv6_and_ipv4_is_told_soon() {
    let scene = Scene::new();
    let echo = scene.server.listen("[::]:80").v6_only().serve();
    let (begin, wire) = (Instant::now(), scene.lab.wire());
    let mut connection = scene.client.connect((scene.server.v4(), 80)).unwrap();
    connection.closed();
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    assert_alone_on_wire(&connection, wire);
    assert_refused_soon(&scene.server, scene.server.at(Family::V4, 80));
    scene.is_called(scene.server.at(Family::V6, 80), &echo, |dial| dial);
}

#[test]
fn a_listener_with_a_mark_of_its_own_is_called_by_everybody() {
    let scene = Scene::new();
    for (port, mark) in [(80, 7), (81, 0x40000), (82, 0x539), (83, 0x111)] {
        let before = scene.server.counters();
        let echo = scene.server.listen(([0_u16; 8], port)).mark(mark).serve();
        assert_eq!(scene.server.counted_since(&before).get("listener_mark_clr"), Some(&1));
        scene.is_called_by_each_family(&echo);
    }
}

#[test]
fn what_a_client_sends_to_a_server_that_is_gone_is_reset_inside_the_pod() {
    let scene = Scene::new();
    // Open, so that its end is on no later capture.
    let mut open = Vec::new();
    for family in Family::BOTH {
        let listener = scene.server.run(|| TcpListener::bind((family.any(), 80))).unwrap();
        let mut connection = scene.client.connect(scene.server.at(family, 80)).unwrap();
        connection.send(b"hello").unwrap();
        let (mut accepted, _ztunnel) = listener.accept().unwrap();
        accepted.read_exact(&mut [0; 5]).unwrap();

        let (begin, wire) = (Instant::now(), scene.lab.wire());
        Connection::from(accepted).vanish();
        connection.send(b"is anybody there?").unwrap();
        connection.closed();
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        assert_alone_on_wire(&connection, wire);
        open.push(connection);
    }
}

#[test]
fn what_a_server_sends_to_an_outside_client_that_is_gone_ends_its_connection() {
    let scene = Scene::new();
    for family in Family::BOTH {
        let listener = scene.server.run(|| TcpListener::bind((family.any(), 80))).unwrap();
        let mut connection = scene.client.connect(scene.server.at(family, 80)).unwrap();
        connection.send(b"hello").unwrap();
        let (mut accepted, _ztunnel) = listener.accept().unwrap();
        accepted.read_exact(&mut [0; 5]).unwrap();
        connection.vanish();
        accepted.write_all(b"is anybody there?").unwrap();
        Connection::from(accepted).closed();
    }
}

#[test]
fn a_ztunnel_on_ipv4_only_serves_ipv4_and_ipv6_is_refused_soon() {
    let lab = Lab::builder().ztunnel(Behaviour { v4_only: true, ..Behaviour::default() }).start();
    let (captured, plain) = (lab.pod("captured").captured(), lab.pod("plain"));
    let (inside, outside) = (captured.serve("[::]:80"), plain.serve("[::]:80"));

    assert_eq!(captured.connect((plain.v4(), 80)).unwrap().say(b"out"), b"out");
    assert_eq!(captured.to((plain.v4(), 80)).v4_mapped().connect().unwrap().say(b"out"), b"out");
    assert_eq!(outside.next_accepted().peer.ip(), captured.v4());
    assert_eq!(outside.next_accepted().peer.ip(), captured.v4());
    assert_eq!(plain.connect((captured.v4(), 80)).unwrap().say(b"in"), b"in");
    assert_eq!(inside.next_accepted().peer.ip(), plain.v4());

    let (before, wire) = (captured.counters(), lab.wire());
    assert_refused_soon(&captured, plain.at(Family::V6, 80));
    let of_ipv6 = wire.stop().only(|frame| frame.family() == Family::V6 && frame.flags.is_some());
    assert_eq!(&*of_ipv6, []);
    let counted = captured.counted_since(&before);
    assert_eq!(counted.get("lookup_refused_out"), Some(&1), "{counted:?}");

    let before = captured.counters();
    assert_refused_soon(&plain, captured.at(Family::V6, 80));
    let counted = captured.counted_since(&before);
    assert_eq!(counted.get("lookup_refused_in"), Some(&1), "{counted:?}");

    assert_eq!(captured.connect((captured.v6(), 80)).unwrap().say(b"self"), b"self");
    assert_eq!(lab.node().connect((captured.v6(), 80)).unwrap().say(b"alive?"), b"alive?");
    let callers = [inside.next_accepted().peer.ip(), inside.next_accepted().peer.ip()];
    assert_eq!(callers, [captured.v6(), lab.node().v6()]);
    assert_eq!((inside.accepted().len(), outside.accepted().len()), (3, 2));
}
