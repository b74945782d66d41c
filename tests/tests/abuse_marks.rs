//! A workload pretends to be somebody else: by marks, by a name, by a foreign source address.
//!
//! ztunnel reaches the server by its tunnel port only, so a SYN to the server's own port on any wire is
//! one of the workload's that went out in clear.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions")]

use std::{
    ffi::CString,
    fs,
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    process, ptr,
    time::Duration,
};

use culvert_tests::{Capability, Dial, Family, Frames, Lab, Pod, Tunnelled, eventually};
use nix::{
    sys::{
        prctl,
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};
use socket2::{Domain, SockRef, Socket, Type};

const PORT: u16 = 80;
/// ztunnel's, ztunnel's with the bits of others, and the two of captured connections.
const MARKS: [u32; 4] = [0x539, 0x40539, 0x111, 0x112];
/// What is left of root's capabilities in a container that may set a mark.
const NET_RAW: [Capability; 1] = [Capability::CAP_NET_RAW];
/// For clients that may find nobody.
const PATIENCE: Duration = Duration::from_millis(150);

fn syns_to_the_server(frames: &Frames) -> Frames {
    frames.only(|frame| frame.is_syn() && frame.destination.port() == PORT)
}

#[test]
fn a_workload_with_a_mark_of_ours_stays_captured() {
    let scene = Tunnelled::new();
    let other = scene.lab.pod("other").captured();
    let echo = scene.server.serve("[::]:80");
    let (before, wire) = (other.counters(), scene.lab.wire());
    for mark in MARKS {
        for family in Family::BOTH {
            let plain = scene.client.to(scene.server.at(family, PORT)).mark(mark).with_capabilities(&NET_RAW);
            for dial in [plain.clone(), plain.on_device("eth0")] {
                let mut connection = dial.connect().unwrap_or_else(|error| panic!("{dial:?}: {error}"));
                assert_eq!(connection.say(b"marked"), b"marked", "{dial:?}");
                assert_eq!(connection.mark(), mark & !0xfff | 0x111, "{dial:?}");
                assert_eq!(echo.next_accepted().peer.ip(), scene.client.address(family));
            }
        }
    }
    let frames = wire.stop();
    assert_eq!(*syns_to_the_server(&frames), []);
    // The stand-in's tunnel is not encrypted.
    let clear = frames.only(|frame| ![frame.source.port(), frame.destination.port()].contains(&15008));
    assert!(!clear.contains_payload(b"marked"), "{clear:?}");
    assert_eq!(scene.client.counters().captured_outbound, 2 * 2 * MARKS.len() as u64);
    assert_eq!(other.counters(), before);
    for family in Family::BOTH {
        assert_eq!(other.connect(scene.server.at(family, PORT)).unwrap().say(b"other"), b"other");
    }
}

#[test]
fn a_workload_with_a_mark_of_ours_is_refused_without_a_ztunnel() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    scene.lab.ztunnel().kill();
    let wire = scene.lab.wire();
    for (mark, family) in MARKS.into_iter().flat_map(|mark| Family::BOTH.map(|family| (mark, family))) {
        let dial = scene.client.to(scene.server.at(family, PORT)).mark(mark).with_capabilities(&NET_RAW);
        assert_eq!(dial.connect().unwrap_err().kind(), ErrorKind::ConnectionRefused, "{dial:?}");
    }
    assert_eq!(*wire.stop().only(|frame| frame.is_syn()), []);
    assert_eq!(scene.client.counters().refused_outbound, 2 * MARKS.len() as u64);
}

#[test]
fn a_listener_with_a_mark_of_ours_is_reached_through_ztunnel() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client"), lab.pod("server").captured());
    for (port, mark) in (80..).zip(MARKS) {
        let echo = server.listen((Family::V6.any(), port)).mark(mark).serve();
        for family in Family::BOTH {
            assert_eq!(client.connect(server.at(family, port)).unwrap().say(b"hello"), b"hello", "{mark:#x}");
            assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
        }
    }
    assert_eq!(server.counters().listener_mark_clr, MARKS.len() as u64);
    assert_eq!(server.counters().accepted_inbound, 2 * MARKS.len() as u64);
}

/// Ours routes a datagram as it does a connection: it stays in the pod that sent it, harms nobody else,
/// and is answered by nobody.
#[test]
fn a_datagram_with_a_mark_of_ours_reaches_its_destination_or_stays_in_the_pod() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server").captured());
    for family in Family::BOTH {
        let to = server.at(family, 5300);
        let asked = server.serve_udp(to);
        let wire = lab.wire();
        for mark in MARKS {
            let socket = client.run(|| UdpSocket::bind((family.any(), 0))).unwrap();
            SockRef::from(&socket).set_mark(mark).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket.send_to(&mark.to_be_bytes(), to).unwrap();
            let answer = socket.recv_from(&mut [0; 4]);
            assert_eq!(answer.is_ok(), mark & 0xfff == 0x539, "{mark:#x}: {answer:?}");
        }
        let frames = wire.stop();
        for mark in MARKS {
            assert_eq!(frames.contains_payload(&mark.to_be_bytes()), mark & 0xfff == 0x539, "{mark:#x}");
        }
        assert_eq!(asked.len(), 2);
    }
}

#[test]
fn a_process_with_the_name_of_ztunnel_is_not_ztunnel() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    let wire = scene.lab.wire();
    for family in Family::BOTH {
        let (mut connection, bound) = scene.client.run(|| {
            prctl::set_name(c"ztunnel").unwrap();
            let dial = scene.client.to(scene.server.at(family, PORT)).mark(0x539);
            let bound = Socket::new(Domain::IPV6, Type::STREAM, None).and_then(|socket| {
                socket.set_reuse_port(true)?;
                socket.set_mark(0x539)?;
                socket.bind(&SocketAddr::from((Family::V6.any(), 15001)).into())
            });
            (dial.connect_here().unwrap(), bound)
        });
        assert_eq!(connection.say(b"hello"), b"hello");
        assert_eq!(bound.unwrap_err().kind(), ErrorKind::AddrInUse);
    }
    assert_eq!(*syns_to_the_server(&wire.stop()), []);
    assert_eq!(scene.client.counters().captured_outbound, 2);
}

#[test]
fn a_child_of_a_workload_and_what_it_executes_are_not_ztunnel() {
    let scene = Tunnelled::new();
    let echo = scene.server.serve("[::]:80");
    let directory = std::env::temp_dir().join(format!("culvert-abuse-{}", process::id()));
    fs::create_dir_all(&directory).unwrap();
    let ztunnel = directory.join("ztunnel");
    std::os::unix::fs::symlink("/bin/bash", &ztunnel).unwrap();
    let wire = scene.lab.wire();
    for family in Family::BOTH {
        let talk = format!(
            "exec 3<>/dev/tcp/{}/{PORT}; echo hello >&3; head -n 1 <&3",
            scene.server.address(family)
        );
        for script in [format!("({talk}); exit"), format!("exec '{}' -c '{talk}'", ztunnel.display())] {
            let output =
                scene.client.command(ztunnel.to_str().unwrap()).args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), "hello\n", "{script}: {output:?}");
            assert_eq!(echo.next_accepted().peer.ip(), scene.client.address(family));
        }
    }
    fs::remove_dir_all(&directory).unwrap();
    assert_eq!(*syns_to_the_server(&wire.stop()), []);
    assert_eq!(scene.client.counters().captured_outbound, 4);
}

#[test]
fn a_restarted_ztunnel_is_known_under_its_new_process_id() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    let known = || scene.lab.map("ZTUNNELS").keys::<u32>();
    assert_eq!(known(), [scene.lab.ztunnel().pid().as_raw() as u32]);
    scene.lab.ztunnel().kill();
    assert_eq!(known(), [0; 0]);
    scene.lab.ztunnel().restart();
    let new = scene.lab.ztunnel().pid().as_raw() as u32;
    eventually("the new process to be known", || known().contains(&new).then_some(()));
    for family in Family::BOTH {
        assert_eq!(scene.client.connect(scene.server.at(family, PORT)).unwrap().say(b"again"), b"again");
    }
    assert_eq!(known(), [new]);
}

/// Executes a command under a process id of our choice.
fn execute_as(id: Pid, words: &[&str]) -> WaitStatus {
    let words: Vec<_> = words.iter().map(|word| CString::new(*word).unwrap()).collect();
    let pointers: Vec<_> = words.iter().map(|word| word.as_ptr()).chain([ptr::null()]).collect();
    let ids = [id.as_raw()];
    // SAFETY: all zero is a valid value.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.exit_signal = libc::SIGCHLD as u64;
    (arguments.set_tid, arguments.set_tid_size) = (ids.as_ptr() as u64, 1);
    // SAFETY: as fork(2); the child does nothing but execute or end.
    let child = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of_val(&arguments)) };
    if child == 0 {
        // SAFETY: the array ends with a null pointer.
        unsafe { libc::execvp(pointers[0], pointers.as_ptr()) };
        // SAFETY: no arguments of interest.
        unsafe { libc::_exit(127) };
    }
    assert_eq!(child, i64::from(id.as_raw()), "{}", io::Error::last_os_error());
    waitpid(id, None).unwrap()
}

#[test]
fn a_process_that_is_given_the_id_of_a_ztunnel_that_ended_is_not_ztunnel() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    let id = scene.lab.ztunnel().pid();
    assert_eq!(scene.lab.map("ZTUNNELS").keys::<u32>(), [id.as_raw() as u32]);
    scene.lab.ztunnel().kill();
    let netns = format!("--net={}", scene.client.netns_path().display());
    for family in Family::BOTH {
        let wire = scene.lab.wire();
        let connect = format!("exec 3<>/dev/tcp/{}/{PORT}", scene.server.address(family));
        let ended = execute_as(id, &["nsenter", &netns, "bash", "-c", &connect]);
        assert_eq!(ended, WaitStatus::Exited(id, 1));
        assert_eq!(*wire.stop().only(|frame| frame.is_syn()), []);
    }
    assert_eq!(scene.client.counters().refused_outbound, 2);
}

/// A source that is not the pod's cannot be answered, but its SYN does not leave.
#[test]
fn a_connection_from_a_foreign_source_address_does_not_leave() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    let wire = scene.lab.wire();
    let foreign: [IpAddr; 2] = ["192.0.2.77".parse().unwrap(), "2001:db8::77".parse().unwrap()];
    for (family, source) in Family::BOTH.into_iter().zip(foreign) {
        let to = scene.server.at(family, PORT);
        for (transparent, device) in [(false, false), (true, false), (false, true)] {
            let outcome = scene.client.run(|| -> io::Result<()> {
                let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
                match (family, transparent) {
                    (Family::V4, true) => socket.set_ip_transparent_v4(true)?,
                    (Family::V4, false) => socket.set_freebind_v4(true)?,
                    // IPV6_TRANSPARENT, IPV6_FREEBIND (include/uapi/linux/in6.h).
                    (Family::V6, true) => set(&socket, 75)?,
                    (Family::V6, false) => set(&socket, 78)?,
                }
                if device {
                    socket.bind_device(Some(b"eth0"))?;
                }
                socket.bind(&SocketAddr::new(source, 0).into())?;
                socket.connect_timeout(&to.into(), PATIENCE)
            });
            assert!(outcome.is_err(), "{source} to {to}");
        }
    }
    let frames = wire.stop();
    assert_eq!(*syns_to_the_server(&frames), []);
    // What does leave is ztunnel's SYN ACK, to whoever has the address.
    assert_eq!(*frames.only(|frame| foreign.contains(&frame.source.ip())), []);
}

fn set(socket: &Socket, option: libc::c_int) -> io::Result<()> {
    let one: libc::c_int = 1;
    let length = size_of_val(&one) as libc::socklen_t;
    // SAFETY: pointer and length describe `one`, which outlives the call.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IPV6, option, (&raw const one).cast(), length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A generator of numbers that are the same in each run (xorshift64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    fn dial<'a>(&mut self, client: &'a Pod, server: &Pod) -> Dial<'a> {
        let family = Family::BOTH[self.roll(2) as usize];
        let mut dial = client.to(server.at(family, PORT)).timeout(PATIENCE);
        let marked = self.roll(3) == 0;
        if marked {
            dial = dial.mark(MARKS[self.roll(4) as usize]);
        }
        if self.roll(2) == 0 {
            let port = if self.roll(2) == 0 { 20_000 + self.roll(10_000) as u16 } else { 0 };
            dial = dial.from_port(client.address(family), port);
        }
        dial = match self.roll(4) {
            0 => dial.on_device("eth0"),
            1 => dial.unicast_interface("eth0"),
            _ => dial,
        };
        if family == Family::V4 && self.roll(2) == 0 {
            dial = dial.v4_mapped();
        }
        dial = match self.roll(5) {
            0 => dial.fast_open(b"first"),
            1 => dial.fast_open_connect(),
            2 => dial.non_blocking(),
            3 if self.roll(2) == 0 => dial.mptcp(),
            _ => dial,
        };
        // Only with this one capability may a mark be set.
        dial.with_capabilities(if marked { &NET_RAW } else { &[] })
    }
}

#[test]
fn no_mix_of_socket_options_lets_a_syn_out() {
    let scene = Tunnelled::new();
    let _echo = scene.server.serve("[::]:80");
    scene.client.set_sysctl("net/ipv4/tcp_fastopen", "3");
    let mut dice = Dice(0x5eed);
    for up in [true, false] {
        if !up {
            scene.lab.ztunnel().kill();
        }
        let (wire, mut connected) = (scene.lab.wire(), 0);
        for _ in 0..300 {
            // TCP_FASTOPEN_CONNECT may put the connecting off until the first write.
            let sent = dice.dial(&scene.client, &scene.server).connect().map(|mut open| open.send(b"clear"));
            connected += usize::from(matches!(sent, Ok(Ok(()))));
        }
        let frames = wire.stop();
        let leaks = if up { syns_to_the_server(&frames) } else { frames.only(|frame| frame.is_syn()) };
        assert_eq!(*leaks, []);
        assert_eq!(connected > 250, up, "{connected} connected");
    }
}
