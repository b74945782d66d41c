//! A workload changes options of a socket that is captured already: nothing of it may leave in clear.
//!
//! ztunnel reaches the server by its tunnel port only, so whatever else carries the client's words on a wire is
//! a leak.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions")]

use std::{
    io::{self, Read as _, Write as _},
    net::TcpListener,
    os::fd::AsRawFd,
    time::Duration,
};

use caps::CapSet;
use culvert_dataplane::Restored;
use culvert_tests::{Capability, Connection, Family, Frames, Lab, Tunnelled, eventually};
use nix::net::if_::if_nametoindex;
use socket2::SockRef;

const PORT: u16 = 80;
/// None, an honest one, ztunnel's, ztunnel's and ours with the bits of others.
const MARKS: [u32; 5] = [0, 7, 0x539, 0x40539, 0x70111];
/// SO_MARK takes longer values too, and kernels hand only a page of them to a program.
const LENGTHS: [usize; 4] = [4, 8, 4096, 4097];
/// For words that may reach nobody.
const PATIENCE: Duration = Duration::from_millis(500);

/// What carries these words outside the stand-in's tunnel, which is not encrypted.
fn leaks(frames: &Frames, words: &[u8]) -> Frames {
    frames.only(|frame| {
        ![frame.source.port(), frame.destination.port()].contains(&15008)
            && frame.payload.windows(words.len()).any(|window| window == words)
    })
}

/// setsockopt(2) as a process with CAP_NET_RAW and nothing else, as containers have it.
fn set(socket: &(impl AsRawFd + Sync), level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    let descriptor = socket.as_raw_fd();
    std::thread::scope(|scope| {
        let set = scope.spawn(|| {
            let capabilities = [Capability::CAP_NET_RAW].into_iter().collect();
            caps::set(None, CapSet::Effective, &capabilities).map_err(io::Error::other)?;
            // SAFETY: pointer and length describe `value`.
            let result = unsafe {
                libc::setsockopt(descriptor, level, name, value.as_ptr().cast(), value.len() as u32)
            };
            if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
        set.join().unwrap()
    })
}

fn set_mark(socket: &(impl AsRawFd + Sync), mark: u32, length: usize) {
    let mut value = mark.to_ne_bytes().to_vec();
    value.resize(length, 0);
    set(socket, libc::SOL_SOCKET, libc::SO_MARK, &value).unwrap();
}

#[test]
fn a_mark_set_on_a_captured_connection_does_not_let_it_out() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    let (before, wire) = (scene.client.counters(), scene.lab.wire());
    for (mark, length) in MARKS.into_iter().flat_map(|mark| LENGTHS.map(|length| (mark, length))) {
        for family in Family::BOTH {
            let to = scene.server.at(family, PORT);
            for dial in
                [scene.client.to(to), scene.client.to(to).on_device("eth0"), scene.client.to(to).v4_mapped()]
            {
                let mut connection = dial.connect().unwrap();
                set_mark(connection.stream(), mark, length);
                assert_eq!(connection.mark(), mark & !0xfff | 0x111, "{dial:?}");
                assert_eq!(connection.say(b"marked late"), b"marked late", "{dial:?} {mark:#x} {length}");
            }
        }
    }
    assert_eq!(*leaks(&wire.stop(), b"marked late"), []);
    let moved = scene.client.counted_since(&before);
    assert_eq!(moved["mark_kept"], (MARKS.len() * LENGTHS.len() * 6) as u64, "{moved:?}");
}

#[test]
fn a_mark_set_on_a_captured_connection_of_mptcp_does_not_let_it_out() {
    let scene = Tunnelled::new();
    if scene
        .client
        .to(scene.server.at(Family::V4, PORT))
        .mptcp()
        .connect()
        .is_err_and(|error| matches!(error.raw_os_error(), Some(libc::EPROTONOSUPPORT | libc::ENOPROTOOPT)))
    {
        return eprintln!("this kernel has no MPTCP");
    }
    let _echo = scene.server.serve("[::]:80");
    let wire = scene.lab.wire();
    for (mark, family) in MARKS.into_iter().flat_map(|mark| Family::BOTH.map(|family| (mark, family))) {
        let mut connection = scene.client.to(scene.server.at(family, PORT)).mptcp().connect().unwrap();
        set_mark(connection.stream(), mark, 4);
        assert_eq!(connection.say(b"marked late"), b"marked late", "{mark:#x}");
    }
    assert_eq!(*leaks(&wire.stop(), b"marked late"), []);
}

/// What the workload accepts from ztunnel goes to the client's address, which is not in the pod.
#[test]
fn a_mark_set_on_an_accepted_connection_or_a_listener_does_not_let_the_answer_out() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client"), lab.pod("server").captured());
    for (mark, family) in MARKS.into_iter().flat_map(|mark| Family::BOTH.map(|family| (mark, family))) {
        for on_listener in [false, true] {
            let listener = server.run(|| TcpListener::bind((family.any(), PORT))).unwrap();
            if on_listener {
                set_mark(&listener, mark, 4);
                assert_eq!(SockRef::from(&listener).mark().unwrap(), 0);
            }
            let wire = lab.wire();
            let mut asking = client.connect(server.at(family, PORT)).unwrap();
            asking.send(b"question").unwrap();
            let (mut answering, peer) = listener.accept().unwrap();
            assert_eq!(peer.ip().to_canonical(), client.address(family));
            if !on_listener {
                set_mark(&answering, mark, 4);
            }
            let mut question = [0; 8];
            answering.read_exact(&mut question).unwrap();
            answering.write_all(b"answer").unwrap();
            assert_eq!(asking.receive(6).unwrap(), b"answer", "{mark:#x}");
            // From ztunnel's end of the client's connection, and not from the workload's with the same addresses.
            let marks = SockRef::from(&answering).mark().unwrap();
            assert_eq!(marks, if on_listener { 0x111 } else { mark & !0xfff | 0x111 });
            drop((asking, answering));
            let resets = wire.stop().resets();
            assert_eq!(*resets, [], "of a connection that nobody has");
        }
    }
    assert_eq!(server.counters().mark_kept, 2 * MARKS.len() as u64);
    assert_eq!(server.counters().mark_cleared, 2 * MARKS.iter().filter(|mark| **mark != 0).count() as u64);
}

/// What is not captured keeps the mark it asked for, before, during and after capture.
#[test]
fn a_mark_set_on_anything_else_is_what_was_asked_for() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let (echo, _own) = (other.serve("[::]:80"), pod.serve("[::]:80"));
    let before = pod.connect(other.at(Family::V4, PORT)).unwrap();
    let pod = pod.captured();
    for family in Family::BOTH {
        let loopback = pod.connect((family.loopback(), PORT)).unwrap();
        let probe = lab.node().connect(pod.at(family, PORT)).unwrap();
        let datagram = pod.run(|| std::net::UdpSocket::bind((family.any(), 0))).unwrap();
        // With one of ours it would be the workload that loops it.
        for mark in &MARKS[..4] {
            let mark = *mark;
            for connection in [&before, &loopback, &probe] {
                set_mark(connection.stream(), mark, 4);
                assert_eq!(connection.mark(), mark);
            }
            set_mark(&datagram, mark, 4);
            assert_eq!(SockRef::from(&datagram).mark().unwrap(), mark);
        }
    }
    let mut captured = pod.connect(other.at(Family::V6, PORT)).unwrap();
    assert_eq!(lab.dataplane().detach(pod.netns()).unwrap(), Restored::Draining(2));
    set_mark(captured.stream(), 7, 4);
    assert_eq!((captured.mark(), captured.say(b"drains")), (0x111, b"drains".to_vec()));
    drop(captured);
    eventually("the end of what was captured", || {
        (pod.restore().unwrap() == Restored::Complete).then_some(())
    });
    let mut released = pod.connect(other.at(Family::V6, PORT)).unwrap();
    set_mark(released.stream(), 0x111, 4);
    assert_eq!(released.mark(), 0x111);
    set_mark(released.stream(), 7, 4);
    assert_eq!((released.mark(), released.say(b"released")), (7, b"released".to_vec()));
    assert!(echo.accepted().len() >= 3);
}

#[test]
fn other_options_of_any_length_are_set_as_if_there_were_no_program() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    for host in [&*scene.client, scene.lab.node()] {
        let mut connection = host.connect(scene.server.at(Family::V4, PORT)).unwrap();
        for length in [4, 8, 4095, 4096, 4097, 8192, 65_536, 1 << 20] {
            let mut value = 1_u32.to_ne_bytes().to_vec();
            value.resize(length, 0);
            set(connection.stream(), libc::SOL_SOCKET, libc::SO_KEEPALIVE, &value).unwrap();
            set(connection.stream(), libc::IPPROTO_TCP, libc::TCP_NODELAY, &value).unwrap();
        }
        for length in 0..4 {
            let short = set(connection.stream(), libc::SOL_SOCKET, libc::SO_MARK, &[0; 4][..length]);
            assert_eq!(short.unwrap_err().raw_os_error(), Some(libc::EINVAL), "{length} bytes of a mark");
        }
        // Congestion control, a string: nothing is appended, nothing is cut.
        set(connection.stream(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").unwrap();
        assert_eq!(connection.say(b"still well"), b"still well", "{}", host.name());
    }
}

/// The options that choose an interface, an address or a route: none of them does without our mark.
#[test]
fn no_other_option_lets_a_captured_connection_out() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    let index = |name: &str| scene.client.run(|| if_nametoindex(name)).unwrap();
    let (eth0, lo) = (index("eth0").to_be_bytes(), index("lo").to_be_bytes());
    let (one, tos) = (1_u32.to_ne_bytes(), 0xb8_u32.to_ne_bytes());
    // include/uapi/linux/in6.h
    const IPV6_TRANSPARENT: i32 = 75;
    const IPV6_FREEBIND: i32 = 78;
    let options: [(&str, i32, i32, &[u8]); 14] = [
        ("SO_BINDTODEVICE eth0", libc::SOL_SOCKET, libc::SO_BINDTODEVICE, b"eth0"),
        ("SO_BINDTODEVICE lo", libc::SOL_SOCKET, libc::SO_BINDTODEVICE, b"lo"),
        ("SO_BINDTODEVICE none", libc::SOL_SOCKET, libc::SO_BINDTODEVICE, b"\0"),
        ("SO_DONTROUTE", libc::SOL_SOCKET, libc::SO_DONTROUTE, &one),
        ("SO_PRIORITY", libc::SOL_SOCKET, libc::SO_PRIORITY, &one),
        ("IP_UNICAST_IF eth0", libc::IPPROTO_IP, libc::IP_UNICAST_IF, &eth0),
        ("IPV6_UNICAST_IF eth0", libc::IPPROTO_IPV6, libc::IPV6_UNICAST_IF, &eth0),
        ("IPV6_UNICAST_IF lo", libc::IPPROTO_IPV6, libc::IPV6_UNICAST_IF, &lo),
        ("IP_TRANSPARENT", libc::IPPROTO_IP, libc::IP_TRANSPARENT, &one),
        ("IP_FREEBIND", libc::IPPROTO_IP, libc::IP_FREEBIND, &one),
        ("IPV6_TRANSPARENT", libc::IPPROTO_IPV6, IPV6_TRANSPARENT, &one),
        ("IPV6_FREEBIND", libc::IPPROTO_IPV6, IPV6_FREEBIND, &one),
        ("IP_TOS", libc::IPPROTO_IP, libc::IP_TOS, &tos),
        ("IPV6_TCLASS", libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &tos),
    ];
    let wire = scene.lab.wire();
    let mut broken = Vec::new();
    for family in Family::BOTH {
        for (name, level, option, value) in options {
            let to = scene.server.at(family, PORT);
            for dial in [scene.client.to(to), scene.client.to(to).on_device("eth0")] {
                let mut connection: Connection = dial.connect().unwrap();
                connection.stream().set_read_timeout(Some(PATIENCE)).unwrap();
                let set = set(connection.stream(), level, option, value);
                // A new route, in case the old one is only kept.
                SockRef::from(connection.stream()).set_mark(0).unwrap();
                if connection.try_say(b"changed late").is_err() {
                    broken.push((family, name, set.is_ok()));
                }
            }
        }
    }
    assert_eq!(*leaks(&wire.stop(), b"changed late"), []);
    eprintln!("broken by the option: {broken:?}");
    let breaks = |name: &str| name == "SO_BINDTODEVICE lo" || name == "SO_DONTROUTE";
    assert!(broken.iter().all(|(_, name, _)| breaks(name)), "{broken:?}");
}
