//! Connecting, in every way a workload may.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
    time::Duration,
};

use caps::{CapSet, Capability, CapsHashSet};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::{
    address::Family,
    connection::{Connection, set_option},
    host::Host,
    journal::DEADLINE,
};

/// A connection to be made: options, then [`connect`](Dial::connect).
#[derive(Clone, Debug)]
#[must_use]
pub struct Dial<'a> {
    host: &'a Host,
    remote: SocketAddr,
    source: Option<SocketAddr>,
    device: Option<String>,
    unicast_interface: Option<String>,
    capabilities: Option<CapsHashSet>,
    mapped: bool,
    fast_open: Option<Vec<u8>>,
    fast_open_connect: bool,
    mptcp: bool,
    mark: Option<u32>,
    non_blocking: bool,
    timeout: Duration,
}

impl<'a> Dial<'a> {
    pub(crate) fn new(host: &'a Host, remote: SocketAddr) -> Self {
        Self {
            host,
            remote,
            source: None,
            device: None,
            unicast_interface: None,
            capabilities: None,
            mapped: false,
            fast_open: None,
            fast_open_connect: false,
            mptcp: false,
            mark: None,
            non_blocking: false,
            timeout: DEADLINE,
        }
    }

    /// Binds the source address first.
    pub fn from(self, source: IpAddr) -> Self {
        self.from_port(source, 0)
    }

    /// Binds source address and port first, with SO_REUSEADDR.
    pub fn from_port(mut self, source: IpAddr, port: u16) -> Self {
        self.source = Some((source, port).into());
        self
    }

    /// SO_BINDTODEVICE.
    pub fn on_device(mut self, name: &str) -> Self {
        self.device = Some(name.to_owned());
        self
    }

    /// IP_UNICAST_IF or IPV6_UNICAST_IF.
    pub fn unicast_interface(mut self, name: &str) -> Self {
        self.unicast_interface = Some(name.to_owned());
        self
    }

    /// As a process without any capability.
    pub fn unprivileged(self) -> Self {
        self.with_capabilities(&[])
    }

    /// As a process with these capabilities only.
    pub fn with_capabilities(mut self, capabilities: &[Capability]) -> Self {
        self.capabilities = Some(capabilities.iter().copied().collect());
        self
    }

    /// By an AF_INET6 socket, an IPv4 destination as `::ffff:a.b.c.d`.
    pub fn v4_mapped(mut self) -> Self {
        self.mapped = true;
        self
    }

    /// `sendto(MSG_FASTOPEN)` instead of connect(2); read the answer to `first` with
    /// [`Connection::receive`].
    pub fn fast_open(mut self, first: &[u8]) -> Self {
        self.fast_open = Some(first.to_owned());
        self
    }

    /// TCP_FASTOPEN_CONNECT: with a cookie, the first write connects.
    pub fn fast_open_connect(mut self) -> Self {
        self.fast_open_connect = true;
        self
    }

    /// An MPTCP socket.
    pub fn mptcp(mut self) -> Self {
        self.mptcp = true;
        self
    }

    /// SO_MARK.
    pub fn mark(mut self, mark: u32) -> Self {
        self.mark = Some(mark);
        self
    }

    /// A non-blocking connect(2), then poll(2).
    pub fn non_blocking(mut self) -> Self {
        self.non_blocking = true;
        self
    }

    /// Gives up after this long (`ErrorKind::TimedOut`) instead of [`DEADLINE`].
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub(crate) fn host(&self) -> &Host {
        self.host
    }

    /// Connects.
    pub fn connect(&self) -> io::Result<Connection> {
        self.host.run(|| self.connect_here())
    }

    /// Connects from the calling thread, which is inside [`Host::run`] already. For many connections.
    pub fn connect_here(&self) -> io::Result<Connection> {
        if let Some(capabilities) = &self.capabilities {
            // Of this thread only, which ends here.
            caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(io::Error::other)?;
            caps::set(None, CapSet::Effective, capabilities).map_err(io::Error::other)?;
            caps::set(None, CapSet::Permitted, capabilities).map_err(io::Error::other)?;
        }
        let socket = self.socket()?;
        socket.set_read_timeout(Some(DEADLINE))?;
        let remote = SockAddr::from(self.destination());
        if let Some(first) = &self.fast_open {
            socket.set_write_timeout(Some(self.timeout))?;
            let sent = socket.send_to_with_flags(first, &remote, libc::MSG_FASTOPEN).map_err(timed_out)?;
            assert_eq!(sent, first.len(), "the first packet's data");
        } else if self.non_blocking {
            socket.connect_timeout(&remote, self.timeout)?;
        } else {
            socket.set_write_timeout(Some(self.timeout))?;
            socket.connect(&remote).map_err(timed_out)?;
        }
        socket.set_write_timeout(Some(DEADLINE))?;
        Ok(Connection::new(socket))
    }

    fn socket(&self) -> io::Result<Socket> {
        let destination = self.destination();
        let protocol = if self.mptcp { Protocol::MPTCP } else { Protocol::TCP };
        let socket = Socket::new(Domain::for_address(destination), Type::STREAM, Some(protocol))?;
        if let Some(mark) = self.mark {
            socket.set_mark(mark)?;
        }
        if let Some(device) = &self.device {
            socket.bind_device(Some(device.as_bytes()))?;
        }
        if let Some(name) = &self.unicast_interface {
            let index = if_nametoindex(name.as_str())?.to_be() as libc::c_int;
            let (level, option) = match Family::of(destination.ip()) {
                Family::V4 => (libc::IPPROTO_IP, libc::IP_UNICAST_IF),
                Family::V6 => (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_IF),
            };
            set_option(socket.as_raw_fd(), level, option, index)?;
        }
        if self.fast_open_connect {
            set_option(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1)?;
        }
        if let Some(source) = self.source {
            socket.set_reuse_address(true)?;
            socket.bind(&self.mapped(source).into())?;
        }
        Ok(socket)
    }

    fn destination(&self) -> SocketAddr {
        self.mapped(self.remote)
    }

    fn mapped(&self, address: SocketAddr) -> SocketAddr {
        match address.ip() {
            IpAddr::V4(v4) if self.mapped => (v4.to_ipv6_mapped(), address.port()).into(),
            _ => address,
        }
    }
}

/// With SO_SNDTIMEO, connect(2) says EINPROGRESS when the time is over.
fn timed_out(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EINPROGRESS | libc::EAGAIN) => io::Error::new(io::ErrorKind::TimedOut, error),
        _ => error,
    }
}
