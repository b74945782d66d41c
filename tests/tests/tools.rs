//! The lab's clients, servers and captures, between pods that nobody captures.

use std::{
    io::ErrorKind,
    net::SocketAddrV6,
    time::{Duration, Instant},
};

use culvert_tests::{Capability, Family, Lab};

fn lab() -> Lab {
    Lab::builder().without_ztunnel().without_dataplane().start()
}

#[test]
fn a_client_connects_in_every_way() {
    let lab = lab();
    let (client, server) = (lab.pod("client"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    for pod in [&client, &server] {
        pod.set_sysctl("net/ipv4/tcp_fastopen", "3");
    }
    for family in Family::BOTH {
        let (to, own) = (server.at(family, 80), client.address(family));
        for dial in [
            client.to(to),
            client.to(to).from(own),
            client.to(to).on_device("eth0").unprivileged(),
            client.to(to).unicast_interface("eth0"),
            client.to(to).fast_open_connect(),
            client.to(to).mptcp(),
            client.to(to).mark(0x40539).with_capabilities(&[Capability::CAP_NET_RAW]),
            client.to(to).non_blocking(),
        ] {
            let mut connection = dial.connect().unwrap_or_else(|error| panic!("{dial:?}: {error}"));
            assert_eq!(connection.say(b"hello"), b"hello", "{dial:?}");
            assert_eq!((connection.local_addr().ip(), connection.peer_addr()), (own, to), "{dial:?}");
        }
        assert_eq!(client.to(to).from_port(own, 4711).connect().unwrap().local_addr().port(), 4711);
        assert_eq!(client.to(to).fast_open(b"first").connect().unwrap().receive(5).unwrap(), b"first");
    }
    let mapped = client.to(server.at(Family::V4, 80)).v4_mapped().connect().unwrap();
    assert!(mapped.stream().local_addr().unwrap().is_ipv6());
    assert_eq!(mapped.local_addr().ip(), client.v4());
    let denied = client.to(server.at(Family::V4, 80)).mark(1).unprivileged().connect().unwrap_err();
    assert_eq!(denied.kind(), ErrorKind::PermissionDenied);
}

#[test]
fn a_connect_that_nobody_answers_times_out() {
    let lab = lab();
    let (client, server) = (lab.pod("client"), lab.pod("server"));
    server.ip("route add blackhole 10.9.9.0/24");
    lab.node().ip(&format!("route add 10.9.9.9/32 via {}", server.v4()));
    server.set_sysctl("net/ipv4/ip_forward", "1");
    for dial in [client.to("10.9.9.9:80"), client.to("10.9.9.9:80").non_blocking()] {
        let begin = Instant::now();
        let error = dial.timeout(Duration::from_millis(300)).connect().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(begin.elapsed() < Duration::from_secs(2));
    }
    assert_eq!(client.connect((server.v4(), 81)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn a_server_listens_in_every_way_and_can_be_stopped() {
    let lab = lab();
    let (client, server) = (lab.pod("client"), lab.pod("server"));
    let any = Family::V6.any();
    let _v6 = server.listen((any, 81)).v6_only().serve();
    assert!(client.connect((server.v6(), 81)).is_ok());
    assert_eq!(client.connect((server.v4(), 81)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let go = server.listen((any, 82)).mptcp().serve();
    let marked = server.listen((any, 83)).mark(7).reuse_port().serve();
    for (port, echo) in [(82, &go), (83, &marked)] {
        assert_eq!(client.connect((server.v4(), port)).unwrap().say(b"hello"), b"hello");
        let accepted = echo.next_accepted();
        assert_eq!((accepted.peer.ip(), accepted.local), (client.v4().into(), (server.v4(), port).into()));
    }

    let mut echo = server.serve((server.v4(), 84));
    let mut open = client.connect((server.v4(), 84)).unwrap();
    assert_eq!(open.say(b"before"), b"before");
    echo.stop();
    assert_eq!(open.say(b"after"), b"after");
    assert_eq!(client.connect((server.v4(), 84)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(
        server.listen((server.v4(), 84)).reuse_address(false).try_serve().unwrap_err().kind(),
        ErrorKind::AddrInUse
    );
    let echo = server.serve((server.v4(), 84));
    let mut killed = client.connect((server.v4(), 84)).unwrap();
    assert_eq!(killed.say(b"again"), b"again");
    drop(echo);
    killed.closed();
}

#[test]
fn link_local_addresses_datagrams_pings_and_second_interfaces() {
    let lab = lab();
    let client = lab.pod("client").with_interface("net1", &["10.9.0.2/24", "fd00:9::2/64"]);
    let server = lab.pod("server");
    let _echo = server.serve("[::]:80");
    let scope = client.interface_index("eth0");
    let to = SocketAddrV6::new(server.link_local("eth0"), 80, 0, scope);
    assert_eq!(client.connect(std::net::SocketAddr::from(to)).unwrap().say(b"near"), b"near");

    let askers = server.serve_udp("[::]:53");
    for family in Family::BOTH {
        assert_eq!(client.ask_udp(server.at(family, 53), b"who?").unwrap(), b"who?");
        let own = client.address(family);
        askers.wait_for("the question", |asker| asker.ip() == own);
        client.ping(server.address(family)).unwrap();
    }

    lab.node().ip("addr add 10.9.0.1/24 dev net1-2");
    let host = lab.node().serve("0.0.0.0:80");
    let wire = lab.wire();
    let dial = client.to("10.9.0.1:80").on_device("net1").unprivileged();
    assert_eq!(dial.connect().unwrap().say(b"aside"), b"aside");
    assert_eq!(host.next_accepted().peer.ip().to_string(), "10.9.0.2");
    let syns = wire.stop().syns_to("10.9.0.1:80");
    assert!(syns.iter().all(|syn| syn.interface.starts_with("net1")), "{syns:?}");
    assert_eq!(syns.len(), 2);
}

#[test]
fn a_pod_may_lack_ipv6_or_its_loopback_address() {
    let lab = lab();
    let client = lab.pod("client").without_ipv6();
    let server = lab.pod("server").without_v6_loopback();
    let _echo = server.serve("[::]:80");
    assert!(client.connect((server.v4(), 80)).is_ok());
    assert!(client.connect((server.v6(), 80)).is_err());
    assert!(lab.node().connect((server.v6(), 80)).is_ok());
    // ::1 is an address like any other then, somewhere beyond the default route.
    let loopback = server.to((Family::V6.loopback(), 80)).timeout(Duration::from_millis(200));
    assert!(loopback.connect().is_err());
    client.delete();
}

#[test]
fn a_capture_misses_nothing_of_a_large_transfer() {
    let lab = lab();
    let (client, server) = (lab.pod("client"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    let wire = lab.wire();
    let chunk = vec![b'x'; 64 << 10];
    let mut connection = client.connect((server.v4(), 80)).unwrap();
    for _ in 0..320 {
        connection.say(&chunk);
    }
    connection.say(b"the last words");
    let frames = wire.stop();
    let sent: usize = frames
        .only(|frame| *frame.host == *"client" && frame.outgoing)
        .iter()
        .map(|frame| frame.payload.len())
        .sum();
    // A loaded machine repeats a segment now and then.
    let said = 320 * chunk.len() + b"the last words".len();
    assert!(sent >= said, "{sent} of {said}");
    assert!(frames.on("server").contains_payload(b"the last words"));
}
