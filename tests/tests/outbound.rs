//! What a captured workload connects to, and in which ways.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use culvert_tests::{Connection, Dial, Family, Frames, IntoAddress, Lab, Pod, Server};

/// The bound is 1 s; this leaves room for a loaded machine.
const SOON: Duration = Duration::from_secs(3);

/// Second addresses of the client, on its `lo`.
const OTHER_ADDRESSES: [(Family, &str); 2] = [(Family::V4, "10.244.99.9"), (Family::V6, "fd00:99::9")];

/// A captured client, and a server that is not.
struct Scene {
    lab: Lab,
    client: Pod,
    server: Pod,
    echo: Server,
}

impl Scene {
    fn new() -> Self {
        let lab = Lab::new();
        let (client, server) = (lab.pod("client"), lab.pod("server"));
        for (family, other) in OTHER_ADDRESSES {
            let length = if family == Family::V4 { 32 } else { 128 };
            client.ip(&format!("addr add {other}/{length} dev lo"));
        }
        let client = client.captured();
        let echo = server.serve("[::]:80");
        Self { lab, client, server, echo }
    }

    /// The client connects to the server in this way.
    fn captures_each_family(&self, way: impl for<'a> Fn(Dial<'a>) -> Dial<'a>) {
        for family in Family::BOTH {
            self.captures(self.server.at(family, 80), &self.echo, &way);
        }
    }

    /// Connects and talks to a server: ztunnel takes the connection, its own reaches the server with the
    /// pod's address, and not a packet of the client's is on a wire.
    fn captures(&self, to: impl IntoAddress, echo: &Server, way: impl for<'a> Fn(Dial<'a>) -> Dial<'a>) {
        let to = to.into_address();
        self.lab.ztunnel().forget();
        let (before, wire) = (self.client.counters(), self.lab.wire());
        let dial = way(self.client.to(to));
        let mut connection = dial.connect().unwrap_or_else(|error| panic!("{dial:?}: {error}"));
        assert_eq!(connection.say(b"hello"), b"hello", "{dial:?}");
        assert_eq!(connection.peer_addr(), to);
        self.was_captured(to, echo, &connection, &wire.stop());
        assert_eq!(self.client.counted_since(&before).get("captured_outbound"), Some(&1));
    }

    fn was_captured(&self, to: SocketAddr, echo: &Server, connection: &Connection, frames: &Frames) {
        let source = match to.ip() {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => self.client.link_local("eth0").into(),
            ip => self.client.address(Family::of(ip)),
        };
        assert_eq!(echo.next_accepted().peer.ip(), source);
        let accepted = self.lab.ztunnel().wait_for_accepted(15001, 1);
        assert_eq!((accepted[0].peer, accepted[0].destination), (connection.local_addr(), to));
        assert!(!frames.only(|frame| frame.is_syn() && is(frame.destination, to)).is_empty(), "{frames:?}");
        assert_eq!(&*of_socket(frames, connection.local_addr()), []);
    }
}

/// Without flow label and scope.
fn is(one: SocketAddr, other: SocketAddr) -> bool {
    (one.ip(), one.port()) == (other.ip(), other.port())
}

/// The frames from and to a socket.
fn of_socket(frames: &Frames, socket: SocketAddr) -> Frames {
    frames.only(|frame| is(frame.source, socket) || is(frame.destination, socket))
}

fn as_is(dial: Dial<'_>) -> Dial<'_> {
    dial
}

#[test]
fn a_remote_pod_is_reached_through_ztunnel() {
    Scene::new().captures_each_family(as_is);
}

#[test]
fn a_service_address_behind_the_default_route_is_reached_through_ztunnel() {
    let scene = Scene::new();
    for vip in ["10.96.0.10", "fd00:96::10"] {
        let vip = scene.lab.vip(vip, &scene.server);
        scene.captures((vip, 80), &scene.echo, as_is);
    }
}

#[test]
fn the_node_is_reached_through_ztunnel() {
    let scene = Scene::new();
    let echo = scene.lab.node().serve("[::]:80");
    for family in Family::BOTH {
        scene.captures(scene.lab.node().at(family, 80), &echo, as_is);
    }
}

#[test]
fn a_host_beyond_the_node_is_reached_through_ztunnel() {
    let scene = Scene::new();
    let outside = scene.lab.outside("outside");
    let echo = outside.serve("[::]:80");
    for family in Family::BOTH {
        scene.captures(outside.at(family, 80), &echo, as_is);
    }
}

#[test]
fn a_metadata_address_is_reached_through_ztunnel() {
    let scene = Scene::new();
    for address in ["169.254.169.254", "fd00:ec2::254"] {
        let address: IpAddr = address.parse().unwrap();
        scene.lab.node().ip(&format!("addr add {address} dev br0"));
        let echo = scene.lab.node().serve((address, 80));
        scene.captures((address, 80), &echo, as_is);
    }
}

#[test]
fn an_ipv6_link_local_destination_is_captured() {
    let scene = Scene::new();
    let scope = scene.client.interface_index("eth0");
    let to = SocketAddr::from(SocketAddrV6::new(scene.server.link_local("eth0"), 80, 0, scope));
    if !scene.lab.ztunnel().is_real() {
        return scene.captures(to, &scene.echo, as_is);
    }
    // ztunnel forgets the scope (`to_canonical`): its own connect is EINVAL. Captured all the same.
    let (before, wire) = (scene.client.counters(), scene.lab.wire());
    scene.client.connect(to).unwrap().closed();
    assert_eq!(scene.client.counted_since(&before).get("accepted_outbound"), Some(&1));
    assert_eq!(&*wire.stop().only(|frame| frame.flags.is_some()), []);
}

#[test]
fn a_client_with_a_bound_source_address_is_captured() {
    let scene = Scene::new();
    for (family, other) in OTHER_ADDRESSES {
        let (own, other) = (scene.client.address(family), other.parse().unwrap());
        scene.captures(scene.server.at(family, 80), &scene.echo, |dial| dial.from(other));
        scene.captures(scene.server.at(family, 80), &scene.echo, |dial| dial.from(own));
        scene.captures(scene.server.at(family, 80), &scene.echo, |dial| dial.from_port(own, 4711));
    }
}

#[test]
fn a_v4_mapped_destination_is_captured() {
    let scene = Scene::new();
    scene.captures(scene.server.at(Family::V4, 80), &scene.echo, |dial| dial.v4_mapped());
}

#[test]
fn an_unprivileged_client_bound_to_eth0_is_captured() {
    Scene::new().captures_each_family(|dial| dial.on_device("eth0").unprivileged());
}

#[test]
fn a_client_that_chose_eth0_by_unicast_if_is_captured() {
    Scene::new().captures_each_family(|dial| dial.unicast_interface("eth0"));
}

/// 1: sends data in the SYN once it has a cookie. 5: without one too.
const FAST_OPEN_BY_CLIENTS: [&str; 2] = ["1", "5"];

#[test]
fn a_client_with_msg_fastopen_is_captured() {
    let scene = Scene::new();
    for mode in FAST_OPEN_BY_CLIENTS {
        scene.client.set_sysctl("net/ipv4/tcp_fastopen", mode);
        for family in Family::BOTH {
            let to = scene.server.at(family, 80);
            scene.lab.ztunnel().forget();
            let wire = scene.lab.wire();
            let mut connection = scene.client.to(to).fast_open(b"first").connect().unwrap();
            assert_eq!(connection.receive(5).unwrap(), b"first");
            scene.was_captured(to, &scene.echo, &connection, &wire.stop());
        }
    }
}

#[test]
fn a_client_with_tcp_fastopen_connect_is_captured() {
    let scene = Scene::new();
    for mode in FAST_OPEN_BY_CLIENTS {
        scene.client.set_sysctl("net/ipv4/tcp_fastopen", mode);
        scene.captures_each_family(|dial| dial.fast_open_connect());
    }
}

#[test]
fn an_mptcp_client_is_captured_where_the_kernel_has_mptcp() {
    if Path::new("/proc/sys/net/mptcp").exists() {
        Scene::new().captures_each_family(|dial| dial.mptcp());
    }
}

#[test]
fn a_non_blocking_connect_is_captured() {
    Scene::new().captures_each_family(|dial| dial.non_blocking());
}

#[test]
fn ten_mebibytes_come_back_whole_after_a_half_close() {
    let Scene { lab: _lab, client, server, echo: _echo } = Scene::new();
    let sent: Vec<u8> =
        (0..10_u32 << 20).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for family in Family::BOTH {
        let listener = server.run(|| TcpListener::bind((family.any(), 81))).unwrap();
        // Not a byte of the answer before the client has ended its direction.
        let answerer = thread::spawn(move || {
            let (mut stream, _client) = listener.accept().unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            stream.write_all(&received).unwrap();
        });
        let mut connection = client.connect(server.at(family, 81)).unwrap();
        connection.send(&sent).unwrap();
        connection.finish().unwrap();
        assert!(connection.receive_to_end().unwrap() == sent, "what came back is not what was sent");
        answerer.join().unwrap();
    }
}

#[test]
fn a_client_of_a_closed_port_is_told_soon_and_no_reset_leaves_the_pod() {
    let scene = Scene::new();
    for family in Family::BOTH {
        let to = scene.server.at(family, 81);
        let (begin, wire) = (Instant::now(), scene.lab.wire());
        // As with Istio's rules: ztunnel accepts first and cannot take that back.
        let mut connection = scene.client.connect(to).unwrap();
        connection.closed();
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        let frames = wire.stop();
        let resets = frames.resets();
        assert!(!resets.is_empty());
        assert!(resets.iter().all(|reset| is(reset.source, to)), "{resets:?}");
        assert_eq!(&*of_socket(&frames, connection.local_addr()), []);
    }
}

#[test]
fn what_a_server_sends_to_a_client_that_is_gone_is_reset_inside_the_pod() {
    let scene = Scene::new();
    for family in Family::BOTH {
        let listener = scene.server.run(|| TcpListener::bind((family.any(), 81))).unwrap();
        let to = scene.server.at(family, 81);
        let mut connection = scene.client.connect(to).unwrap();
        let client = connection.local_addr();
        connection.send(b"hello").unwrap();
        let (mut stream, upstream) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 5]).unwrap();

        let (begin, wire) = (Instant::now(), scene.lab.wire());
        connection.vanish();
        stream.write_all(b"is anybody there?").unwrap();
        // ztunnel was told by a RST, and tells the server.
        stream.set_read_timeout(Some(SOON)).unwrap();
        match stream.read(&mut [0]) {
            Ok(0) => {}
            ended => assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset),
        }
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        let frames = wire.stop();
        assert_eq!(&*of_socket(&frames, client), []);
        let strangers =
            frames.resets().only(|reset| !is(reset.source, upstream) && !is(reset.destination, upstream));
        assert_eq!(&*strangers, []);
    }
}

/// Nothing of the conversation is seen by ztunnel or on a wire.
fn stays_inside(
    scene: &Scene,
    to: SocketAddr,
    echo: &Server,
    way: impl for<'a> Fn(Dial<'a>) -> Dial<'a>,
    counter: &str,
) {
    scene.lab.ztunnel().forget();
    let (before, wire) = (scene.client.counters(), scene.lab.wire());
    let dial = way(scene.client.to(to));
    let mut connection = dial.connect().unwrap_or_else(|error| panic!("{dial:?}: {error}"));
    assert_eq!(connection.say(b"to myself"), b"to myself", "{dial:?}");
    let accepted = echo.next_accepted();
    assert!(is(accepted.peer, connection.local_addr()), "{accepted:?}");
    assert_eq!(&*wire.stop().only(|frame| frame.flags.is_some()), []);
    assert_eq!(scene.lab.ztunnel().saw().accepted(), []);
    let counted = scene.client.counted_since(&before);
    assert_eq!(
        (counted.get(counter), counted.get("captured_outbound")),
        (Some(&1), None),
        "{dial:?}: {counted:?}"
    );
}

#[test]
fn a_pods_own_addresses_are_not_captured() {
    let scene = Scene::new();
    let echo = scene.client.serve("[::]:80");
    let scope = scene.client.interface_index("eth0");
    let link_local = SocketAddrV6::new(scene.client.link_local("eth0"), 80, 0, scope);
    for own in [scene.client.at(Family::V4, 80), scene.client.at(Family::V6, 80), link_local.into()] {
        stays_inside(&scene, own, &echo, as_is, "passed_own_addr");
        stays_inside(&scene, own, &echo, |dial| dial.on_device("eth0").unprivileged(), "passed_own_addr");
    }
    let others = OTHER_ADDRESSES.map(|(_, other)| SocketAddr::new(other.parse().unwrap(), 80));
    for other in others {
        stays_inside(&scene, other, &echo, as_is, "passed_own_addr");
    }
    for other in others {
        // Not captured, its SYN would leave by eth0 and nobody would answer. Here it stays inside.
        let wire = scene.lab.wire();
        let bound = scene.client.to(other).on_device("eth0").unprivileged();
        drop(bound.timeout(Duration::from_millis(300)).connect());
        assert_eq!(&*wire.stop().only(|frame| frame.flags.is_some()), []);
    }
}

#[test]
fn loopback_addresses_are_not_captured() {
    let scene = Scene::new();
    let echo = scene.client.serve("[::]:80");
    for loopback in [
        "127.0.0.1:80".into_address(),
        "127.0.0.9:80".into_address(),
        "[::1]:80".into_address(),
        // The kernel takes these for loopback, later than some of our hooks.
        "0.0.0.0:80".into_address(),
        "[::]:80".into_address(),
    ] {
        stays_inside(&scene, loopback, &echo, as_is, "passed_loopback");
    }
    for loopback in ["127.0.0.9:80", "0.0.0.0:80"] {
        stays_inside(&scene, loopback.into_address(), &echo, |dial| dial.v4_mapped(), "passed_loopback");
    }
}
