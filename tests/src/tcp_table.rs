//! The TCP sockets of a netns, as /proc/net/tcp and tcp6 list them.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use crate::{address::canonical, eventually::eventually, host::Host};

/// States that tests ask for (include/net/tcp_states.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpState {
    /// Connected.
    Established,
    /// Closed by this side first, less than a minute ago.
    TimeWait,
    /// A server's.
    Listen,
    /// On the way from one to another.
    Other,
}

/// A line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSocket {
    /// Its state.
    pub state: TcpState,
    /// Its own address, IPv4 in its own form.
    pub local: SocketAddr,
    /// Its peer's.
    pub remote: SocketAddr,
}

impl Host {
    /// All TCP sockets of the netns.
    pub fn tcp_sockets(&self) -> Vec<TcpSocket> {
        let read = |name| fs::read_to_string(format!("/proc/thread-self/net/{name}"));
        let (v4, v6) = self.run(|| (read("tcp"), read("tcp6")));
        let tables = [v4.expect("/proc/net/tcp"), v6.unwrap_or_default()];
        tables.iter().flat_map(|table| table.lines().skip(1)).filter_map(socket).collect()
    }

    /// Waits until the list of all TCP sockets is as wanted. Panics with `what` after
    /// [`DEADLINE`](crate::DEADLINE).
    pub fn wait_for_tcp_sockets(&self, what: &str, fits: impl Fn(&[TcpSocket]) -> bool) {
        // The kernel tells nobody of the end of a socket.
        eventually(what, || fits(&self.tcp_sockets()).then_some(()));
    }
}

fn socket(line: &str) -> Option<TcpSocket> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (address(fields.next()?)?, address(fields.next()?)?);
    let state = match fields.next()? {
        "01" => TcpState::Established,
        "06" => TcpState::TimeWait,
        "0A" => TcpState::Listen,
        _ => TcpState::Other,
    };
    Some(TcpSocket { state, local, remote })
}

/// `0100007F:0050`: words of the address as this machine would print them, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let words = address.as_bytes().chunks(8).map(|word| {
        let word = u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?;
        Some(word.to_ne_bytes())
    });
    let words: Vec<[u8; 4]> = words.collect::<Option<_>>()?;
    let ip = match words.as_slice() {
        [word] => IpAddr::from(Ipv4Addr::from(*word)),
        words => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(words.concat()).ok()?)),
    };
    Some(canonical(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?)))
}
