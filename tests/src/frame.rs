//! Frames of a capture, taken apart.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    ops::Deref,
    sync::Arc,
};

use etherparse::{LaxNetSlice, LaxSlicedPacket, TcpSlice, TransportSlice};

use crate::address::{Family, IntoAddress};

/// TCP's flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// A connection is asked for or accepted.
    pub syn: bool,
    /// Acknowledges.
    pub ack: bool,
    /// This direction ends.
    pub fin: bool,
    /// The connection is no more.
    pub rst: bool,
}

/// An IP packet on one interface. A packet that crosses several interfaces is several frames.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    /// In whose netns.
    pub host: Arc<str>,
    /// On which interface.
    pub interface: Arc<str>,
    /// Leaving by the interface, not arriving.
    pub outgoing: bool,
    /// IP protocol number.
    pub protocol: u8,
    /// Sender; port 0 if the protocol has none.
    pub source: SocketAddr,
    /// Receiver; port 0 if the protocol has none.
    pub destination: SocketAddr,
    /// For TCP.
    pub flags: Option<Flags>,
    /// What TCP or UDP carries, or the whole of another protocol.
    pub payload: Vec<u8>,
}

impl Frame {
    /// `None` if it is not IP.
    pub(crate) fn parse(host: &Arc<str>, interface: &Arc<str>, outgoing: bool, bytes: &[u8]) -> Option<Self> {
        let packet = LaxSlicedPacket::from_ethernet(bytes).ok()?;
        let (source, destination, below) = match packet.net? {
            LaxNetSlice::Ipv4(ip) => (
                IpAddr::from(ip.header().source_addr()),
                IpAddr::from(ip.header().destination_addr()),
                ip.payload().clone(),
            ),
            LaxNetSlice::Ipv6(ip) => (
                IpAddr::from(ip.header().source_addr()),
                IpAddr::from(ip.header().destination_addr()),
                ip.payload().clone(),
            ),
            LaxNetSlice::Arp(_) => return None,
        };
        let (ports, flags, payload) = match &packet.transport {
            Some(TransportSlice::Tcp(tcp)) => {
                ((tcp.source_port(), tcp.destination_port()), Some(flags(tcp)), tcp.payload())
            }
            Some(TransportSlice::Udp(udp)) => {
                ((udp.source_port(), udp.destination_port()), None, udp.payload())
            }
            _ => ((0, 0), None, below.payload),
        };
        Some(Self {
            host: Arc::clone(host),
            interface: Arc::clone(interface),
            outgoing,
            protocol: below.ip_number.0,
            source: SocketAddr::new(source, ports.0),
            destination: SocketAddr::new(destination, ports.1),
            flags,
            payload: payload.to_vec(),
        })
    }

    /// The family.
    pub fn family(&self) -> Family {
        Family::of(self.source.ip())
    }

    /// Whether it asks for a TCP connection.
    pub fn is_syn(&self) -> bool {
        self.flags.is_some_and(|flags| flags.syn && !flags.ack)
    }

    /// Whether it is a TCP reset.
    pub fn is_rst(&self) -> bool {
        self.flags.is_some_and(|flags| flags.rst)
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.outgoing { "out" } else { "in" };
        write!(f, "{}/{} {direction} ", self.host, self.interface)?;
        match self.flags {
            Some(Flags { syn, ack, fin, rst }) => {
                let names = [(syn, " SYN"), (ack, " ACK"), (fin, " FIN"), (rst, " RST")];
                let names = names.iter().filter(|(set, _)| *set);
                write!(f, "TCP{}", names.map(|(_, name)| *name).collect::<String>())?;
            }
            None => write!(f, "protocol {}", self.protocol)?,
        }
        write!(f, " {} > {}, {} bytes", self.source, self.destination, self.payload.len())
    }
}

fn flags(tcp: &TcpSlice<'_>) -> Flags {
    Flags { syn: tcp.syn(), ack: tcp.ack(), fin: tcp.fin(), rst: tcp.rst() }
}

/// All frames of a capture, those of one interface in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frames(Vec<Frame>);

impl Deref for Frames {
    type Target = [Frame];

    fn deref(&self) -> &[Frame] {
        &self.0
    }
}

impl FromIterator<Frame> for Frames {
    fn from_iter<I: IntoIterator<Item = Frame>>(frames: I) -> Self {
        Self(frames.into_iter().collect())
    }
}

impl Frames {
    /// Those that fit.
    pub fn only(&self, fits: impl Fn(&Frame) -> bool) -> Self {
        self.0.iter().filter(|frame| fits(frame)).cloned().collect()
    }

    /// SYNs to this address and port.
    pub fn syns_to(&self, to: impl IntoAddress) -> Self {
        let to = to.into_address();
        self.only(|frame| frame.is_syn() && frame.destination == to)
    }

    /// SYNs from this address, whatever the port.
    pub fn syns_from(&self, from: impl Into<IpAddr>) -> Self {
        let from = from.into();
        self.only(|frame| frame.is_syn() && frame.source.ip() == from)
    }

    /// TCP resets.
    pub fn resets(&self) -> Self {
        self.only(Frame::is_rst)
    }

    /// Those on interfaces of this host.
    pub fn on(&self, host: &str) -> Self {
        self.only(|frame| *frame.host == *host)
    }

    /// Whether any packet carries these bytes.
    pub fn contains_payload(&self, bytes: &[u8]) -> bool {
        assert!(!bytes.is_empty());
        self.0.iter().any(|frame| frame.payload.windows(bytes.len()).any(|window| window == bytes))
    }
}
