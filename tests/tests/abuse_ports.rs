//! Somebody wants what is ztunnel's alone: its ports, and the connections to 15001.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use culvert_abi::{OwnAddress, names};
use culvert_dataplane::Options;
use culvert_tests::{CaptureError, Family, Lab, Pod, eventually, while_connecting};
use socket2::{Domain, Socket, Type};

const PORTS: [u16; 4] = [15001, 15006, 15008, 15053];
const RANGE: &str = "net/ipv4/ip_local_port_range";
const RESERVED: &str = "net/ipv4/ip_local_reserved_ports";
/// A client that nobody answers tries again at once.
const PATIENCE: Duration = Duration::from_millis(4);

/// The addresses of a pod by which a socket could reach a port.
fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let mapped = |v4: Ipv4Addr| IpAddr::from(v4.to_ipv6_mapped());
    let own = Family::BOTH.map(|family| [family.any(), family.loopback(), pod.address(family)]);
    let mut all = own.concat();
    all.extend([mapped(Ipv4Addr::UNSPECIFIED), mapped(Ipv4Addr::LOCALHOST), mapped(pod.v4())]);
    all
}

fn socket(domain: Domain, kind: Type, share: bool) -> io::Result<Socket> {
    let socket = Socket::new(domain, kind, None)?;
    socket.set_reuse_address(share)?;
    socket.set_reuse_port(share)?;
    Ok(socket)
}

/// Tries to bind every port at every address in every way. Returns how often.
fn nobody_can_bind(pod: &Pod) -> u64 {
    let mut tried = 0;
    for ip in addresses(pod) {
        for (port, kind, share) in PORTS.into_iter().flat_map(|port| {
            [Type::STREAM, Type::DGRAM]
                .into_iter()
                .flat_map(move |kind| [(port, kind, false), (port, kind, true)])
        }) {
            let to = SocketAddr::new(ip, port);
            let bound = pod.run(|| socket(Domain::for_address(to), kind, share)?.bind(&to.into()));
            assert_eq!(raw(bound), Err(libc::EADDRINUSE), "{to} {kind:?} {share}");
            tried += 1;
        }
    }
    tried
}

/// While the kernel has no other port to choose, it chooses none.
fn nobody_is_given(pod: &Pod) {
    let range = pod.sysctl(RANGE);
    for port in PORTS {
        pod.set_sysctl(RANGE, &format!("{port} {port}"));
        for (domain, any) in [(Domain::IPV4, Family::V4.any()), (Domain::IPV6, Family::V6.any())] {
            for share in [false, true] {
                let listening = pod.run(|| {
                    let socket = socket(domain, Type::STREAM, share)?;
                    socket.listen(1)?;
                    Ok(socket)
                });
                assert_eq!(
                    raw(listening.map(drop)),
                    Err(libc::EADDRINUSE),
                    "listen {port} {domain:?} {share}"
                );
                let bound =
                    pod.run(|| socket(domain, Type::STREAM, share)?.bind(&SocketAddr::new(any, 0).into()));
                assert_eq!(raw(bound), Err(libc::EADDRINUSE), "bind(0) {port} {domain:?} {share}");
                let bound =
                    pod.run(|| socket(domain, Type::DGRAM, share)?.bind(&SocketAddr::new(any, 0).into()));
                assert_eq!(raw(bound), Err(libc::EADDRINUSE), "UDP bind(0) {port} {domain:?} {share}");
            }
        }
        for family in Family::BOTH {
            let to = SocketAddr::new(family.loopback(), 9);
            let connected =
                pod.run(|| socket(Domain::for_address(to), Type::STREAM, false)?.connect(&to.into()));
            assert_eq!(raw(connected), Err(libc::EADDRNOTAVAIL), "connect from {port} {family:?}");
            let sent =
                pod.run(|| socket(Domain::for_address(to), Type::DGRAM, false)?.send_to(b"?", &to.into()));
            assert_eq!(raw(sent.map(drop)), Err(libc::EAGAIN), "sendto from {port} {family:?}");
        }
    }
    pod.set_sysctl(RANGE, &range);
}

fn raw(result: io::Result<()>) -> Result<(), i32> {
    result.map_err(|error| error.raw_os_error().unwrap_or_default())
}

#[test]
fn a_workload_cannot_have_ztunnels_ports_while_it_is_up_nor_while_it_is_down() {
    let lab = Lab::new();
    let pod = lab.pod("pod").captured();
    let tried = nobody_can_bind(&pod);
    assert_eq!(pod.counters().bind_reserved, tried);
    nobody_is_given(&pod);

    lab.ztunnel().kill();
    let before = pod.counters().bind_reserved;
    assert_eq!(before + nobody_can_bind(&pod), pod.counters().bind_reserved);
    nobody_is_given(&pod);

    lab.ztunnel().restart();
    let server = lab.pod("server");
    let _echo = server.serve("[::]:80");
    for family in Family::BOTH {
        assert_eq!(pod.connect(server.at(family, 80)).unwrap().say(b"hello"), b"hello");
    }
}

#[test]
fn a_workload_cannot_have_ztunnels_ports_before_it_was_ever_there() {
    let lab = Lab::builder().without_ztunnel().start();
    let registered = lab.pod("registered");
    registered.register(Options::default()).unwrap();
    let active = lab.pod("active");
    active.register(Options::default()).unwrap();
    active.activate().unwrap();
    for pod in [&registered, &active] {
        let tried = nobody_can_bind(pod);
        assert_eq!(pod.counters().bind_reserved, tried);
        nobody_is_given(pod);
    }
}

#[test]
fn a_connection_cannot_come_from_a_port_of_ztunnel() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    for family in Family::BOTH {
        for port in PORTS {
            let dial = client.to(server.at(family, 80)).from_port(client.address(family), port);
            assert_eq!(raw(dial.connect().map(drop)), Err(libc::EADDRINUSE), "{family:?} {port}");
        }
    }
}

#[test]
fn a_foreign_listener_from_before_enrollment_fails_it_with_that_reason() {
    let lab = Lab::new();
    for (number, port) in PORTS.into_iter().enumerate() {
        let pod = lab.pod(&format!("pod{number}"));
        let listener = pod.listen((Family::V6.any(), port)).reuse_port().serve();
        match pod.capture(Options::default()) {
            Err(CaptureError::Dataplane(error)) => {
                assert!(error.to_string().contains(&port.to_string()), "{error}")
            }
            other => panic!("{port}: {other:?}"),
        }
        assert_eq!(listener.accepted(), []);
    }
}

/// Whoever may write below /proc/sys can still make the kernel give away a port of ztunnel while it is
/// down, and be in its SO_REUSEPORT group afterwards.
#[test]
fn a_listener_that_was_given_ztunnels_port_by_the_kernel_receives_nothing() {
    let lab = Lab::new();
    let (pod, server) = (lab.pod("pod").captured(), lab.pod("server"));
    let echo = server.serve("[::]:80");
    let own = pod.serve("[::]:81");
    lab.ztunnel().kill();
    let (range, reserved) = (pod.sysctl(RANGE), pod.sysctl(RESERVED));
    pod.set_sysctl(RESERVED, "\n");
    let intruders: Vec<_> = [15001, 15006, 15008]
        .into_iter()
        .map(|port| {
            pod.set_sysctl(RANGE, &format!("{port} {port}"));
            pod.run(|| {
                let socket = socket(Domain::IPV6, Type::STREAM.nonblocking(), false).unwrap();
                socket.set_reuse_port(true).unwrap();
                socket.listen(128).unwrap();
                socket
            })
        })
        .collect();
    pod.set_sysctl(RANGE, &range);
    pod.set_sysctl(RESERVED, &reserved);
    lab.ztunnel().restart();
    for _ in 0..20 {
        for family in Family::BOTH {
            assert_eq!(pod.connect(server.at(family, 80)).unwrap().say(b"out"), b"out");
            assert_eq!(server.connect(pod.at(family, 81)).unwrap().say(b"in"), b"in");
        }
    }
    assert_eq!((echo.accepted().len(), own.accepted().len()), (40, 40));
    for intruder in intruders {
        let accepted = intruder.accept().map(|(_, from)| from);
        assert_eq!(accepted.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
    assert!(pod.counters().listener_foreign >= 3);
}

#[test]
fn a_connection_to_an_address_that_is_a_moment_old_is_not_taken_for_the_pods_own() {
    let lab = Lab::new();
    let (pod, outside) = (lab.pod("pod").captured(), lab.outside("outside"));
    let own = lab.map(names::OWN_ADDRESSES);
    let _echo = pod.serve("[::]:80");
    for round in 2..12 {
        let addresses = [format!("10.9.9.{round}"), format!("fd00:9::{round}")];
        for address in &addresses {
            let address: IpAddr = address.parse().unwrap();
            let (prefix, via) = match address {
                IpAddr::V4(_) => (32, IpAddr::from(pod.v4())),
                IpAddr::V6(_) => (128, pod.v6().into()),
            };
            lab.node().ip(&format!("route add {address}/{prefix} via {via}"));
            // Always one of them is on the way in the first millisecond.
            let dials: [_; 4] = std::array::from_fn(|_| outside.to((address, 80)).timeout(PATIENCE));
            let attempts = while_connecting(&dials, || {
                pod.ip(&format!("addr add {address}/{prefix} dev eth0"));
                // Until the watcher knows it, and no longer: they would be too many for ztunnel.
                let key = OwnAddress { netns: pod.cookie(), address: address.into() };
                let known = || own.get::<_, u32>(&key);
                eventually("the address to be known", known);
            });
            eventually("an answer", || outside.connect((address, 80)).ok()?.try_say(b"new").ok());
            assert!(attempts.total() > 0);
        }
    }
    assert_eq!(lab.ztunnel().saw().accepted_on(15001), []);
    // An echo that comes when its client has gone looks for a socket too, and is answered by a RST: that
    // lookup is no connection.
    let counters = pod.counters();
    assert_eq!((counters.accepted_outbound, counters.captured_outbound), (0, 0), "{counters:#?}");
}

#[test]
fn a_connection_to_an_anyip_prefix_of_the_pod_is_not_taken_for_the_pods_own() {
    let lab = Lab::new();
    let (pod, outside) = (lab.pod("pod").captured(), lab.outside("outside"));
    let _echo = pod.serve("[::]:80");
    for (prefix, address, via) in [
        ("192.0.2.0/24", "192.0.2.7", IpAddr::from(pod.v4())),
        ("2001:db8::/64", "2001:db8::7", pod.v6().into()),
    ] {
        pod.ip(&format!("route add local {prefix} dev lo"));
        lab.node().ip(&format!("route add {prefix} via {via}"));
        let to = SocketAddr::new(address.parse().unwrap(), 80);
        let outcome = outside.to(to).connect().and_then(|mut connection| connection.try_say(b"any"));
        // The real one may not know the address.
        assert!(lab.ztunnel().is_real() || outcome.is_ok(), "{to}: {outcome:?}");
    }
    let counters = pod.counters();
    assert_eq!((counters.accepted_outbound, counters.lookup_captured), (0, 0), "{counters:#?}");
    assert_eq!(counters.accepted_unknown, 2);
    assert_eq!(lab.ztunnel().saw().accepted_on(15001), []);
}
