//! A capture on every interface except `lo`: the judge over leaks.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsRawFd as _, RawFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::{
    errno::Errno,
    net::if_::{if_indextoname, if_nameindex},
    sys::socket::{
        LinkAddr, MsgFlags, SockaddrLike as _, recvfrom, sendto, setsockopt, sockopt::RcvBufForce,
    },
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    frame::{Frame, Frames},
    host::Host,
    journal::{DEADLINE, Journal},
};

/// The kernel's buffer per netns: packets beyond it are counted, and fail the test.
const KERNEL_BUFFER: usize = 64 << 20;
/// Longest packet, BIG TCP included.
const LONGEST: usize = 576 << 10;
/// "Local experimental EtherType 1" (IEEE 802).
const MARKER: u16 = 0x88b5;
/// How long a marker may take through the bridge. Without it only frames that are still between two
/// interfaces at the end can be missed; each was seen when it left the first.
const CROSSING: Duration = Duration::from_millis(500);

/// A running capture. Interfaces that appear later are part of it, network namespaces are not.
#[derive(Debug)]
#[must_use]
pub struct Wire {
    taps: Vec<Tap>,
    markers: Journal<Mark>,
}

/// One netns.
#[derive(Debug)]
struct Tap {
    host: Host,
    reader: JoinHandle<Vec<Frame>>,
}

/// A marker seen in a netns.
#[derive(Clone, Debug)]
struct Mark {
    host: Arc<str>,
    number: u64,
}

impl Wire {
    pub(crate) fn start(hosts: &[Host]) -> Self {
        let markers = Journal::default();
        let taps = hosts.iter().map(|host| Tap::start(host, &markers)).collect();
        Self { taps, markers }
    }

    /// Ends the capture with everything that was on the way when this was called. Panics if packets
    /// were lost.
    pub fn stop(self) -> Frames {
        let Self { taps, markers } = self;
        let hosts: Vec<_> = taps.iter().map(|tap| tap.host.clone()).collect();
        for host in &hosts {
            for number in host.run(|| mark(false)) {
                // To the other end, which is the node's for all but a test's own interfaces.
                markers.wait_within(CROSSING, |marks| {
                    marks
                        .iter()
                        .any(|mark| mark.number == number && *mark.host == *hosts[0].name())
                        .then_some(())
                });
            }
        }
        let readers: Vec<_> = taps
            .into_iter()
            .map(|Tap { host, reader }| {
                assert!(
                    !host.run(|| mark(true)).is_empty(),
                    "lo of {} is down: the capture cannot end",
                    host.name()
                );
                reader
            })
            .collect();
        readers.into_iter().flat_map(|reader| reader.join().expect("the capture failed, see above")).collect()
    }
}

impl Tap {
    fn start(host: &Host, markers: &Journal<Mark>) -> Self {
        let (ready, started) = mpsc::channel();
        let reader = thread::spawn({
            let (host, markers) = (host.clone(), markers.clone());
            move || host.run(|| read(&host, &markers, &ready))
        });
        started.recv_timeout(DEADLINE).expect("a capture must start");
        Self { host: host.clone(), reader }
    }
}

/// Until the marker on `lo`.
fn read(host: &Host, markers: &Journal<Mark>, ready: &mpsc::Sender<()>) -> Vec<Frame> {
    let socket = packet_socket(libc::ETH_P_ALL as u16).expect("packet socket");
    setsockopt(&socket, RcvBufForce, &KERNEL_BUFFER).expect("SO_RCVBUFFORCE");
    ready.send(()).expect("the lab waits");
    let name: Arc<str> = host.name().into();
    let (mut frames, mut names) = (Vec::new(), HashMap::new());
    let mut buffer = vec![0; LONGEST];
    loop {
        let (length, from) = match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut buffer) {
            Ok((length, Some(from))) => (length, from),
            // An interface went down.
            Err(Errno::ENETDOWN | Errno::EINTR) => continue,
            received => panic!("capture on {name}: {received:?}"),
        };
        let interface = names.entry(from.ifindex()).or_insert_with(|| {
            let name = if_indextoname(from.ifindex() as libc::c_uint).ok();
            Arc::<str>::from(name.and_then(|name| name.into_string().ok()).unwrap_or_default())
        });
        let loopback = &**interface == "lo";
        if u16::from_be(from.protocol()) == MARKER {
            if loopback {
                assert_eq!(lost(socket.as_raw_fd()), 0, "packets that the capture on {name} lost");
                return frames;
            }
            let number = buffer.get(14..22).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
            let host = Arc::clone(&name);
            markers.push(Mark { host, number: number.unwrap_or_default() });
        } else if !loopback {
            let outgoing = from.pkttype() == libc::PACKET_OUTGOING;
            frames.extend(Frame::parse(&name, interface, outgoing, &buffer[..length]));
        }
    }
}

/// Sends a marker by `lo`, or one by each other interface that is up; returns their numbers.
fn mark(loopback: bool) -> Vec<u64> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let socket = packet_socket(0).expect("packet socket");
    let mut numbers = Vec::new();
    for interface in &if_nameindex().expect("list of interfaces") {
        if (interface.name().to_bytes() == b"lo") != loopback {
            continue;
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut frame = [0xff_u8; 60];
        // A sender's address that no bridge refuses.
        frame[6..12].copy_from_slice(&[0x02, 0, 0, 0, 0, 0x01]);
        frame[12..14].copy_from_slice(&MARKER.to_be_bytes());
        frame[14..22].copy_from_slice(&number.to_be_bytes());
        let to = link_address(interface.index());
        if sendto(socket.as_raw_fd(), &frame, &to, MsgFlags::empty()).is_ok() {
            numbers.push(number);
        }
    }
    numbers
}

fn packet_socket(protocol: u16) -> io::Result<Socket> {
    let protocol = Protocol::from(libc::c_int::from(protocol.to_be()));
    Socket::new(Domain::PACKET, Type::RAW, Some(protocol))
}

fn link_address(index: u32) -> LinkAddr {
    // SAFETY: all bytes zero are a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = MARKER.to_be();
    address.sll_ifindex = index as libc::c_int;
    address.sll_halen = 6;
    address.sll_addr = [0xff; 8];
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the pointer is to a sockaddr_ll of this length.
    let address = unsafe { LinkAddr::from_raw((&raw const address).cast(), Some(length)) };
    address.expect("a link-layer address")
}

/// How many packets did not fit into the kernel's buffer.
fn lost(socket: RawFd) -> u32 {
    // struct tpacket_stats: tp_packets, tp_drops (include/uapi/linux/if_packet.h).
    const PACKET_STATISTICS: libc::c_int = 6;
    let mut statistics = [0_u32; 2];
    let mut length = size_of_val(&statistics) as libc::socklen_t;
    let value = (&raw mut statistics).cast();
    // SAFETY: pointer and length describe `statistics`, which outlives the call.
    let result =
        unsafe { libc::getsockopt(socket, libc::SOL_PACKET, PACKET_STATISTICS, value, &raw mut length) };
    assert_eq!(result, 0, "PACKET_STATISTICS: {}", io::Error::last_os_error());
    statistics[1]
}
