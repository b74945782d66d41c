//! What connects to a captured workload, and what becomes of it.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{
    cell::RefCell,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    thread,
    time::{Duration, Instant},
};

use culvert_dataplane::Options;
use culvert_tests::{Behaviour, Connection, Family, Host, Lab, Pod, Wire};

/// The bound is 1 s; this leaves room for a loaded machine.
const SOON: Duration = Duration::from_secs(3);

/// A captured server, and two clients that are not: a pod, and a host beyond the node.
struct Scene {
    lab: Lab,
    server: Pod,
    client: Pod,
    outside: Host,
    open: RefCell<Vec<Connection>>,
}

impl Scene {
    fn new() -> Self {
        Self::with(Behaviour::default(), Options::default())
    }

    fn with(behaviour: Behaviour, options: Options) -> Self {
        let lab = Lab::builder().ztunnel(behaviour).start();
        let server = lab.pod("server").captured_with(options);
        let (client, outside) = (lab.pod("client"), lab.outside("outside"));
        Self { lab, server, client, outside, open: RefCell::default() }
    }

    /// Every TCP packet on a wire belongs to this connection, resets too. It stays open, so that its end is
    /// on no later capture.
    fn is_alone_on_wire(&self, connection: Connection, wire: Wire) {
        let ends = [connection.local_addr(), connection.peer_addr()];
        let others = wire.stop().only(|frame| {
            frame.flags.is_some() && !(ends.contains(&frame.source) && ends.contains(&frame.destination))
        });
        assert_eq!(&*others, []);
        self.open.borrow_mut().push(connection);
    }

    fn clients(&self) -> [&Host; 2] {
        [&self.client, &self.outside]
    }

    /// ztunnel accepts exactly one connection and closes it: nobody is reached, nothing is on a wire but
    /// the connection itself.
    fn is_accepted_once_and_refused(&self, from: &Host, to: SocketAddr) {
        self.lab.ztunnel().forget();
        let (before, wire, begin) = (self.server.counters(), self.lab.wire(), Instant::now());
        let mut connection = from.connect(to).unwrap();
        connection.closed();
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        let client = connection.local_addr();
        self.is_alone_on_wire(connection, wire);
        let counted = self.server.counted_since(&before);
        let accepted = ["accepted_inbound", "accepted_loopback", "accepted_outbound", "accepted_hbone"];
        let accepted: u64 = accepted.iter().filter_map(|name| counted.get(name)).sum();
        assert_eq!(accepted, 1, "{to}: {counted:?}");
        for never in ["accepted_by_pod", "ztunnel_to_pod", "ztunnel_upstream"] {
            assert_eq!(counted.get(never), None, "{to}: {counted:?}");
        }
        if !self.lab.ztunnel().is_real() {
            let saw = self.lab.ztunnel().saw();
            let [accepted] = &saw.accepted()[..] else { panic!("{to}: {saw:?}") };
            assert_eq!((accepted.peer, accepted.destination), (client, to));
            assert_eq!(saw.refusal_of(accepted).as_deref(), Some("self call"));
        }
    }
}

#[test]
fn a_server_sees_the_clients_address_and_the_wire_one_connection() {
    let scene = Scene::new();
    let echo = scene.server.serve("[::]:80");
    for client in scene.clients() {
        for family in Family::BOTH {
            scene.lab.ztunnel().forget();
            let (to, wire) = (scene.server.at(family, 80), scene.lab.wire());
            let mut connection = client.connect(to).unwrap();
            assert_eq!(connection.say(b"hello"), b"hello");
            let accepted = echo.next_accepted();
            assert_eq!((accepted.peer.ip(), accepted.local), (client.address(family), to));
            let by_ztunnel = scene.lab.ztunnel().wait_for_accepted(15006, 1);
            assert_eq!((by_ztunnel[0].peer, by_ztunnel[0].destination), (connection.local_addr(), to));
            // The workload's connection is ztunnel's, not the client's.
            assert_ne!(accepted.peer, connection.local_addr());
            scene.is_alone_on_wire(connection, wire);
        }
    }
}

#[test]
fn a_server_on_the_pods_address_only_is_reached() {
    let scene = Scene::new();
    for family in Family::BOTH {
        let to = scene.server.at(family, 80);
        let echo = scene.server.serve(to);
        for client in scene.clients() {
            assert_eq!(client.connect(to).unwrap().say(b"hello"), b"hello");
            assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
        }
        assert_eq!(scene.lab.node().connect(to).unwrap().say(b"alive?"), b"alive?");
    }
}

#[test]
fn a_server_on_loopback_only_is_not_reached() {
    let scene = Scene::new();
    for family in Family::BOTH {
        let echo = scene.server.serve((family.loopback(), 80));
        let to = scene.server.at(family, 80);
        for client in scene.clients() {
            let wire = scene.lab.wire();
            // As with Istio's rules: accepted by ztunnel, then closed.
            let mut connection = client.connect(to).unwrap();
            connection.closed();
            scene.is_alone_on_wire(connection, wire);
        }
        // A probe is told by the kernel.
        assert_eq!(scene.lab.node().connect(to).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(echo.accepted(), []);
        assert_eq!(scene.server.connect((family.loopback(), 80)).unwrap().say(b"self"), b"self");
    }
}

#[test]
fn a_client_of_a_closed_port_is_told_soon_and_every_reset_is_its_own() {
    let scene = Scene::new();
    for client in scene.clients() {
        for family in Family::BOTH {
            let (begin, wire) = (Instant::now(), scene.lab.wire());
            let mut connection = client.connect(scene.server.at(family, 81)).unwrap();
            connection.closed();
            assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
            scene.is_alone_on_wire(connection, wire);
        }
    }
}

#[test]
fn port_15008_is_ztunnels_own_listener_for_everybody() {
    let scene = Scene::new();
    let bypass = Options { bypass_inbound: true };
    for options in [Options::default(), bypass] {
        let server = scene.lab.pod(if options == bypass { "bypass" } else { "plain" }).captured_with(options);
        for family in Family::BOTH {
            for client in [&*scene.client, &scene.outside, scene.lab.node(), &server] {
                scene.lab.ztunnel().forget();
                let (before, to) = (server.counters(), server.at(family, 15008));
                let mut connection = client.connect(to).unwrap();
                // No CONNECT, no TLS: ztunnel ends it, after an alert perhaps.
                connection.send(b"hello\r\n\r\n").unwrap();
                assert!(connection.receive_to_end().is_ok_and(|answer| answer != b"hello\r\n\r\n"));
                let counted = server.counted_since(&before);
                assert_eq!(counted.get("accepted_hbone"), Some(&1), "{}: {counted:?}", client.name());
                assert_eq!(counted.get("lookup_inbound"), None, "{}: {counted:?}", client.name());
                if !scene.lab.ztunnel().is_real() {
                    let accepted = scene.lab.ztunnel().saw().accepted();
                    assert_eq!(accepted.len(), 1, "{accepted:?}");
                    assert_eq!((accepted[0].listener, accepted[0].destination), (15008, to));
                    assert_eq!(accepted[0].peer, connection.local_addr());
                }
            }
        }
    }
}

/// ztunnel's two redirection ports, called directly by everybody.
fn calls_to_15001_and_15006_are_refused(options: Options) {
    let scene = Scene::with(Behaviour::default(), options);
    for family in Family::BOTH {
        for port in [15001, 15006] {
            let to = scene.server.at(family, port);
            for from in [&*scene.client, &scene.outside, scene.lab.node(), &scene.server] {
                scene.is_accepted_once_and_refused(from, to);
            }
            scene.is_accepted_once_and_refused(&scene.server, (family.loopback(), port).into());
        }
    }
    let other_loopback = Ipv4Addr::new(127, 0, 0, 9);
    for port in [15001, 15006] {
        scene.is_accepted_once_and_refused(&scene.server, (other_loopback, port).into());
    }
}

#[test]
fn a_direct_call_to_15001_or_15006_is_accepted_once_and_refused() {
    calls_to_15001_and_15006_are_refused(Options::default());
}

#[test]
fn a_direct_call_to_15001_or_15006_of_a_bypass_pod_is_accepted_once_and_refused() {
    calls_to_15001_and_15006_are_refused(Options { bypass_inbound: true });
}

#[test]
fn a_captured_clients_call_to_15001_or_15006_of_another_pod_is_refused_there() {
    let scene = Scene::new();
    let captured = scene.lab.pod("captured").captured();
    for family in Family::BOTH {
        for port in [15001, 15006] {
            let before = scene.server.counters();
            captured.connect(scene.server.at(family, port)).unwrap().closed();
            let counted = scene.server.counted_since(&before);
            assert_eq!(counted.get("accepted_inbound"), Some(&1), "{counted:?}");
            assert_eq!(counted.get("ztunnel_to_pod"), None, "{counted:?}");
        }
    }
}

#[test]
fn ten_mebibytes_come_back_whole_after_a_half_close() {
    let scene = Scene::new();
    let sent: Vec<u8> =
        (0..10_u32 << 20).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for family in Family::BOTH {
        let listener = scene.server.run(|| TcpListener::bind((family.any(), 80))).unwrap();
        let answerer = thread::spawn(move || {
            let (mut stream, _client) = listener.accept().unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            stream.write_all(&received).unwrap();
        });
        let mut connection = scene.client.connect(scene.server.at(family, 80)).unwrap();
        connection.send(&sent).unwrap();
        connection.finish().unwrap();
        assert!(connection.receive_to_end().unwrap() == sent, "what came back is not what was sent");
        answerer.join().unwrap();
    }
}

#[test]
fn a_bypass_pod_is_reached_directly() {
    let scene = Scene::with(Behaviour::default(), Options { bypass_inbound: true });
    let echo = scene.server.serve("[::]:80");
    for client in scene.clients() {
        for family in Family::BOTH {
            let before = scene.server.counters();
            let mut connection = client.connect(scene.server.at(family, 80)).unwrap();
            assert_eq!(connection.say(b"hello"), b"hello");
            assert_eq!(echo.next_accepted().peer, connection.local_addr());
            assert_eq!(scene.server.counted_since(&before).get("lookup_bypass"), Some(&1));
        }
    }
}

/// By way of its service's address and ztunnel.
fn a_pod_reaches_itself(has_tunnel: bool) {
    // The first pod of a lab; ztunnel has to know before it starts.
    let own: [IpAddr; 2] = ["10.244.0.2", "fd00:244::2"].map(|own| own.parse().unwrap());
    let vips: [IpAddr; 2] = ["10.96.0.10", "fd00:96::10"].map(|vip| vip.parse().unwrap());
    let services = vips.iter().zip(own).map(|(vip, own)| ((*vip, 80).into(), (own, 8080).into())).collect();
    let tunnel = if has_tunnel { own.to_vec() } else { Vec::new() };
    let scene = Scene::with(Behaviour { services, tunnel, ..Behaviour::default() }, Options::default());
    assert_eq!(own, Family::BOTH.map(|family| scene.server.address(family)));
    let echo = scene.server.serve("[::]:8080");
    for (vip, own) in vips.into_iter().zip(own) {
        let (before, wire) = (scene.server.counters(), scene.lab.wire());
        let mut connection = scene.server.connect((vip, 80)).unwrap();
        assert_eq!(connection.say(b"to myself"), b"to myself");
        let accepted = echo.next_accepted();
        assert_eq!((accepted.peer.ip(), accepted.local), (own, (own, 8080).into()));
        assert_eq!(&*wire.stop().only(|frame| frame.flags.is_some()), []);
        let counted = scene.server.counted_since(&before);
        assert_eq!(counted.get("captured_outbound"), Some(&1), "{counted:?}");
        assert_eq!(counted.contains_key("accepted_hbone"), has_tunnel, "{counted:?}");
    }
}

#[test]
fn a_pod_reaches_itself_by_the_address_of_its_service() {
    a_pod_reaches_itself(false);
}

#[test]
fn a_pod_reaches_itself_by_the_address_of_its_service_through_a_tunnel() {
    a_pod_reaches_itself(true);
}
