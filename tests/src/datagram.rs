//! UDP and ICMP, which nobody is to touch (DNS aside).

use std::{
    io::{self, Read as _},
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
};

use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    address::{Family, IntoAddress, canonical},
    host::Host,
    journal::{DEADLINE, Journal},
};

/// Longest datagram.
const LONGEST: usize = 2048;

impl Host {
    /// Echoes datagrams, for as long as the process lives. Returns who asked.
    pub fn serve_udp(&self, on: impl IntoAddress) -> Journal<SocketAddr> {
        let on = on.into_address();
        let socket = self.run(|| UdpSocket::bind(on)).unwrap_or_else(|error| panic!("UDP {on}: {error}"));
        let askers = Journal::default();
        let asked = askers.clone();
        thread::spawn(move || {
            let mut buffer = [0; LONGEST];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
                asked.push(canonical(peer));
                socket.send_to(&buffer[..length], peer).ok();
            }
        });
        askers
    }

    /// Sends a datagram and returns the answer.
    pub fn ask_udp(&self, to: impl IntoAddress, question: &[u8]) -> io::Result<Vec<u8>> {
        let to = to.into_address();
        let socket = self.run(|| UdpSocket::bind((Family::of(to.ip()).any(), 0)))?;
        socket.set_read_timeout(Some(DEADLINE))?;
        socket.send_to(question, to)?;
        let mut buffer = [0; LONGEST];
        let (length, from) = socket.recv_from(&mut buffer)?;
        assert_eq!(from, to, "the answer's source");
        Ok(buffer[..length].to_vec())
    }

    /// Sends an ICMP echo request and waits for the reply.
    pub fn ping(&self, to: impl Into<IpAddr>) -> io::Result<()> {
        /// "abcd" and no identifier: the kernel fills it in.
        const REQUEST: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 1, b'a', b'b', b'c', b'd'];
        let to = to.into();
        let (domain, protocol, kind) = match Family::of(to) {
            Family::V4 => (Domain::IPV4, Protocol::ICMPV4, 8),
            Family::V6 => (Domain::IPV6, Protocol::ICMPV6, 128),
        };
        // For sockets that do without a raw one.
        self.set_sysctl("net/ipv4/ping_group_range", "0 0");
        let mut socket = self.run(|| Socket::new(domain, Type::DGRAM, Some(protocol)))?;
        socket.set_read_timeout(Some(DEADLINE))?;
        socket.connect(&SocketAddr::new(to, 0).into())?;
        let mut request = REQUEST;
        request[0] = kind;
        socket.send(&request)?;
        let mut reply = [0; LONGEST];
        let length = socket.read(&mut reply)?;
        assert!(reply[..length].ends_with(b"abcd"), "an answer to something else");
        Ok(())
    }
}
