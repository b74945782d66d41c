//! One accepted connection: who, where to, and what is told of it.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use culvert_abi::ztunnel::{HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT, ZTUNNEL_MARK};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpSocket, TcpStream};

use super::{Proxy, copy, netns::PodNetns};
use crate::{address::canonical, event::Event};

/// ztunnel's for connections to the workload.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// ztunnel's defaults (`socketConfig`).
const KEEPALIVE: Duration = Duration::from_secs(180);
const KEEPALIVE_RETRIES: u32 = 9;

/// Ports at which a proxied connection would come back to the proxy.
pub(super) fn is_self_call(port: u16) -> bool {
    matches!(port, OUTBOUND_PORT | INBOUND_PORT | HBONE_PORT)
}

/// An accepted connection.
pub(super) struct Connection {
    pub(super) proxy: Arc<Proxy>,
    pub(super) netns: Arc<PodNetns>,
    pod: Arc<str>,
    number: u64,
    pub(super) stream: TcpStream,
    /// IPv4 in its own form.
    pub(super) peer: SocketAddr,
    /// Where the client wanted to go.
    pub(super) destination: SocketAddr,
}

impl Connection {
    /// Finds the original destination and tells of the connection.
    pub(super) fn new(
        proxy: &Arc<Proxy>,
        netns: &Arc<PodNetns>,
        pod: &Arc<str>,
        listener: u16,
        stream: TcpStream,
        peer: SocketAddr,
    ) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        stream.set_nodelay(true)?;
        let destination = match listener {
            // ztunnel asks only where a redirection may have rewritten it.
            OUTBOUND_PORT | INBOUND_PORT => original_destination(&stream)?,
            _ => canonical(stream.local_addr()?),
        };
        let connection = Self {
            proxy: Arc::clone(proxy),
            netns: Arc::clone(netns),
            pod: Arc::clone(pod),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            stream,
            peer: canonical(peer),
            destination,
        };
        connection.tell(|pod, number| Event::Accepted {
            pod,
            connection: number,
            listener,
            peer: connection.peer,
            destination,
        });
        Ok(connection)
    }

    /// Closes the connection.
    pub(super) fn refuse(self, reason: impl ToString) {
        self.tell(|pod, connection| Event::Refused { pod, connection, reason: reason.to_string() });
    }

    /// Copies until both ends are done.
    pub(super) async fn splice(mut self, mut upstream: TcpStream) {
        if let (Ok(local), Ok(remote)) = (upstream.local_addr(), upstream.peer_addr()) {
            let (local, remote) = (canonical(local), canonical(remote));
            self.tell(|pod, connection| Event::Upstream { pod, connection, local, remote });
        }
        let (sent, received) = copy::both_ways(&mut self.stream, &mut upstream).await.unwrap_or_default();
        self.tell(|pod, connection| Event::Closed { pod, connection, sent, received });
    }

    fn tell(&self, event: impl FnOnce(String, u64) -> Event) {
        if self.proxy.report.tells_connections() {
            self.proxy.report.tell(event(self.pod.to_string(), self.number));
        }
    }

    /// A connection from the pod with the pod's own address.
    pub(super) async fn connect(&self, remote: SocketAddr) -> io::Result<TcpStream> {
        let socket = self.socket(remote)?;
        TcpSocket::from_std_stream(socket.into()).connect(remote).await
    }

    /// A connection to the workload from the client's address (`freebind_connect`).
    pub(super) async fn connect_as_client(&self, remote: SocketAddr) -> io::Result<TcpStream> {
        let socket = self.socket(remote)?;
        if self.peer.ip() != remote.ip() {
            let mut source = self.peer;
            source.set_port(0);
            match remote.ip() {
                IpAddr::V4(_) => {
                    socket.set_ip_transparent_v4(true)?;
                    socket.set_freebind_v4(true)?;
                }
                IpAddr::V6(_) => {
                    socket.set_ip_transparent_v6(true)?;
                    socket.set_freebind_v6(true)?;
                }
            }
            socket.bind(&source.into())?;
        }
        let connect = TcpSocket::from_std_stream(socket.into()).connect(remote);
        match tokio::time::timeout(CONNECT_TIMEOUT, connect).await {
            Ok(connected) => connected,
            Err(_elapsed) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn socket(&self, remote: SocketAddr) -> io::Result<Socket> {
        let socket = self.netns.socket(Domain::for_address(remote), Type::STREAM, Protocol::TCP)?;
        socket.set_tcp_nodelay(true)?;
        let keepalive =
            TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE).with_retries(KEEPALIVE_RETRIES);
        socket.set_tcp_keepalive(&keepalive)?;
        socket.set_mark(ZTUNNEL_MARK)?;
        Ok(socket)
    }
}

/// `SO_ORIGINAL_DST` of either family, or the address the connection was accepted at.
fn original_destination(stream: &TcpStream) -> io::Result<SocketAddr> {
    let socket = SockRef::from(stream);
    let rewritten = socket.original_dst_v4().or_else(|_| socket.original_dst_v6()).ok();
    let address = match rewritten.and_then(|address| address.as_socket()) {
        Some(address) => address,
        None => stream.local_addr()?,
    };
    Ok(canonical(address))
}
