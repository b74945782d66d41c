//! The seven sockets of one pod.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener as StdListener},
};

use culvert_abi::ztunnel::{DNS_PORT, HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT, ZTUNNEL_MARK};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, UdpSocket};

use super::{fault::Faults, netns::PodNetns};

/// ztunnel's backlog.
const BACKLOG: i32 = 128;

/// Everything a pod needs; closing is dropping.
#[derive(Debug)]
pub(super) struct Sockets {
    pub(super) dns: Vec<TcpListener>,
    /// Open, as ztunnel's are; nobody answers yet.
    pub(super) dns_udp: Vec<UdpSocket>,
    pub(super) hbone: TcpListener,
    pub(super) inbound: TcpListener,
    pub(super) outbound: TcpListener,
}

impl Sockets {
    /// Opens them in ztunnel's order.
    pub(super) fn open(netns: &PodNetns, faults: &Faults) -> io::Result<Self> {
        let (mut dns, mut dns_udp) = (Vec::new(), Vec::new());
        for loopback in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            let address = SocketAddr::new(loopback, DNS_PORT);
            match listen(netns, address) {
                Ok(listener) => {
                    dns.push(listener);
                    dns_udp.push(bind_udp(netns, address)?);
                }
                // No IPv6 on `lo`.
                Err(error) if loopback.is_ipv6() && error.kind() == io::ErrorKind::AddrNotAvailable => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            dns,
            dns_udp,
            hbone: listen_transparent(netns, HBONE_PORT, faults)?,
            inbound: listen_transparent(netns, INBOUND_PORT, faults)?,
            outbound: listen_transparent(netns, OUTBOUND_PORT, faults)?,
        })
    }
}

/// Connections to every address, also to those the pod does not have.
fn listen_transparent(netns: &PodNetns, port: u16, faults: &Faults) -> io::Result<TcpListener> {
    let wildcard = match faults.v4_only {
        true => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        false => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let listener = listen(netns, SocketAddr::new(wildcard, port))?;
    if !faults.no_transparent {
        // After listen(2), and the option of SOL_IP for both families: as ztunnel does.
        socket2::SockRef::from(&listener).set_ip_transparent_v4(true)?;
    }
    Ok(listener)
}

fn listen(netns: &PodNetns, address: SocketAddr) -> io::Result<TcpListener> {
    let socket = bind(netns, address, Type::STREAM, Protocol::TCP)?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(StdListener::from(socket))
}

fn bind_udp(netns: &PodNetns, address: SocketAddr) -> io::Result<UdpSocket> {
    UdpSocket::from_std(bind(netns, address, Type::DGRAM, Protocol::UDP)?.into())
}

fn bind(netns: &PodNetns, address: SocketAddr, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    let socket = netns.socket(Domain::for_address(address), kind, protocol)?;
    socket.set_mark(ZTUNNEL_MARK)?;
    socket.set_reuse_port(true)?;
    if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}
