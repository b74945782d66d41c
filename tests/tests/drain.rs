//! A pod that was withdrawn while its workload was connecting, or before it connected again.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{
    io,
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::AsRawFd as _,
    thread,
};

use culvert_abi::{ListenerKey, names::LISTENERS};
use culvert_dataplane::{Options, Restored};
use culvert_tests::{Connection, Family, Lab, Pod, eventually, while_connecting};
use socket2::{Domain, Socket, Type};

const PORT: u16 = 80;
/// How often a pod is captured and withdrawn: a SYN under way is only met by chance.
const FLAPS: usize = 25;

/// Ends the connection of a socket and leaves the socket usable (connect(2), AF_UNSPEC).
fn disconnect(socket: &Socket) {
    let unspecified = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    // SAFETY: the address and its length belong together.
    let result = unsafe {
        libc::connect(socket.as_raw_fd(), &raw const unspecified, size_of_val(&unspecified) as u32)
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

/// While it lives, no SYN gets through the `lo` of the pod: each is dropped, or delayed.
struct Held<'a> {
    pod: &'a Pod,
    release: &'static str,
}

impl<'a> Held<'a> {
    fn dropping(pod: &'a Pod) -> Self {
        run(pod, "nft add table inet held");
        run(pod, "nft add chain inet held input { type filter hook input priority 0 ; }");
        run(pod, "nft add rule inet held input iif lo tcp flags & (syn|ack) == syn drop");
        Self { pod, release: "nft delete table inet held" }
    }

    /// What fills a bucket of 200 bytes at one byte each second has to wait.
    fn delaying(pod: &'a Pod) -> Self {
        run(pod, "tc qdisc replace dev lo root tbf rate 8bit burst 200b latency 1000s");
        wake(pod);
        Self { pod, release: "tc qdisc change dev lo root tbf rate 10gbit burst 1mb latency 1s" }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        run(self.pod, self.release);
        wake(self.pod);
    }
}

/// Sends something by `lo`: a queue looks at what it holds when more comes.
fn wake(pod: &Pod) {
    let socket = pod.run(|| UdpSocket::bind("127.0.0.1:0")).unwrap();
    socket.send_to(&[0; 120], "127.0.0.1:9").unwrap();
}

fn run(pod: &Pod, words: &str) {
    let mut words = words.split(' ');
    let mut command = pod.command(words.next().unwrap());
    let status = command.args(words).status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}

/// Runs `meanwhile` when the SYN of a new connection is held back, then lets it, or the next one, through.
fn connect_slowly<'a>(
    pod: &'a Pod,
    to: SocketAddr,
    hold: impl Fn(&'a Pod) -> Held<'a>,
    meanwhile: impl FnOnce(),
) -> Connection {
    let held = hold(pod);
    let before = pod.counters().captured_outbound;
    thread::scope(|scope| {
        let connecting = scope.spawn(|| pod.connect(to));
        eventually("the connection to be under way", || {
            (pod.counters().captured_outbound > before).then_some(())
        });
        meanwhile();
        drop(held);
        connecting.join().unwrap().unwrap_or_else(|error| panic!("{} to {to}: {error}", pod.name()))
    })
}

fn drained(pod: &Pod) {
    eventually("the last captured connection to close", || {
        (pod.restore().unwrap() == Restored::Complete).then_some(())
    });
}

#[test]
fn a_used_socket_connects_directly_while_its_pod_drains() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod").captured(), lab.pod("other"));
    let echo = other.serve("[::]:80");
    let open = pod.connect(other.at(Family::V4, PORT)).unwrap();
    let used = Family::BOTH.map(|family| {
        let to = other.at(family, PORT);
        let socket = pod.run(|| Socket::new(Domain::for_address(to), Type::STREAM, None)).unwrap();
        socket.connect(&to.into()).unwrap();
        assert_eq!(socket.mark().unwrap(), 0x111);
        disconnect(&socket);
        (to, socket)
    });
    lab.ztunnel().wait_for_accepted(15001, 3);
    assert!(matches!(pod.release().unwrap(), Restored::Draining(_)));
    eventually("the server to have accepted them all", || (echo.accepted().len() == 3).then_some(()));
    let wire = lab.wire();
    for (number, (to, socket)) in used.into_iter().enumerate() {
        socket.connect(&to.into()).unwrap_or_else(|error| panic!("again to {to}: {error}"));
        assert_eq!(socket.mark().unwrap(), 0);
        let mut connection = Connection::from(TcpStream::from(socket));
        assert_eq!(connection.say(b"again"), b"again");
        assert_eq!(echo.accepted()[3 + number].peer, connection.local_addr());
    }
    let frames = wire.stop();
    for family in Family::BOTH {
        assert_eq!(frames.on("pod").syns_to(other.at(family, PORT)).len(), 1, "{frames:?}");
    }
    drop(open);
    drained(&pod);
}

/// The workload listens on that port too: no SYN to somebody else may be taken for one to itself.
#[test]
fn a_connection_under_way_when_its_pod_is_withdrawn_is_still_ztunnels() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let (echo, own) = (other.serve("[::]:80"), pod.serve("[::]:80"));
    for family in Family::BOTH {
        let pod = pod.clone().captured();
        lab.ztunnel().forget();
        let to = other.at(family, PORT);
        let withdraw = || lab.dataplane().withdraw(pod.netns()).unwrap();
        let mut connection = connect_slowly(&pod, to, Held::delaying, withdraw);
        assert_eq!(connection.say(b"late"), b"late");
        let accepted = lab.ztunnel().wait_for_accepted(15001, 1);
        assert_eq!((accepted[0].peer, accepted[0].destination), (connection.local_addr(), to));
        assert!(matches!(pod.restore().unwrap(), Restored::Draining(_)));
        assert_eq!(connection.say(b"later"), b"later");
        drop(connection);
        drained(&pod);
        pod.remove_from_ztunnel().unwrap();
    }
    assert_eq!((echo.accepted().len(), own.accepted().len()), (2, 0));
}

#[test]
fn a_connection_under_way_when_ztunnel_has_left_its_pod_goes_directly() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let (echo, own) = (other.serve("[::]:80"), pod.serve("[::]:80"));
    for family in Family::BOTH {
        let pod = pod.clone().captured();
        lab.ztunnel().forget();
        let (before, wire) = (pod.counters().passed_late, lab.wire());
        let to = other.at(family, PORT);
        let mut connection = connect_slowly(&pod, to, Held::dropping, || {
            assert_eq!(pod.release().unwrap(), Restored::Draining(1));
            eventually("ztunnel's listeners to close", || {
                let of_pod = |key: &ListenerKey| key.netns == pod.cookie();
                (!lab.map(LISTENERS).keys().iter().any(of_pod)).then_some(())
            });
        });
        assert_eq!(connection.say(b"late"), b"late");
        assert_eq!(echo.next_accepted().peer, connection.local_addr());
        assert_eq!(connection.mark(), 0);
        assert_eq!(pod.counters().passed_late, before + 1);
        // It holds nothing up, though it is open.
        drained(&pod);
        assert_eq!(connection.say(b"later"), b"later");
        let syns = wire.stop().syns_to(to);
        assert!(syns.iter().all(|syn| syn.source == connection.local_addr()), "{syns:?}");
    }
    assert_eq!(lab.ztunnel().saw().accepted(), []);
    assert_eq!(own.accepted(), []);
}

#[test]
fn connections_of_a_pod_that_is_captured_and_withdrawn_again_and_again_never_fail() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let (_echo, own) = (other.serve("[::]:80"), pod.serve("[::]:80"));
    let dials = Family::BOTH.map(|family| pod.to(other.at(family, PORT)));
    let attempts = while_connecting(&[dials.clone(), dials].concat(), || {
        for _ in 0..FLAPS {
            pod.capture(Options::default()).unwrap();
            let before = pod.counters().accepted_outbound;
            eventually("a captured connection", || {
                (pod.counters().accepted_outbound > before + 20).then_some(())
            });
            pod.release().unwrap();
        }
    });
    assert!(attempts.failed.is_empty() && attempts.connected > 20 * FLAPS, "{attempts:?}");
    drained(&pod);
    assert_eq!(own.accepted(), []);
}
