//! What sockets a netns has, by `sock_diag`.

use std::{io, net::IpAddr};

use culvert_abi::ztunnel::{ACCEPTED_MARK, LOOP_MARK, MARK_MASK};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags, nlas::Nla},
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use crate::netlink::Netlink;

const IPPROTO_TCP: u8 = 6;
/// INET_DIAG_SOCKOPT (include/uapi/linux/inet_diag.h, Linux 5.10): bit fields, `transparent` is bit 5.
const INET_DIAG_SOCKOPT: u16 = 22;
const TRANSPARENT: u8 = 1 << 5;

/// A listening TCP socket.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
    /// SO_COOKIE.
    pub(crate) cookie: u64,
    pub(crate) is_transparent: bool,
}

/// The listening sockets of the calling thread's netns.
pub(crate) fn listening() -> io::Result<Vec<Listening>> {
    let sockets = tcp_sockets(StateFlags::LISTEN)?;
    Ok(sockets
        .into_iter()
        .map(|socket| Listening {
            address: socket.header.socket_id.source_address.to_canonical(),
            port: socket.header.socket_id.source_port,
            cookie: u64::from_ne_bytes(socket.header.socket_id.cookie),
            is_transparent: socket.nlas.iter().any(is_transparent),
        })
        .collect())
}

/// How many connections of the calling thread's netns carry one of our marks. TIME_WAIT reports none.
pub(crate) fn count_marked() -> io::Result<usize> {
    let sockets = tcp_sockets(StateFlags::all() - StateFlags::LISTEN - StateFlags::TIME_WAIT)?;
    Ok(sockets.iter().filter(|socket| socket.nlas.iter().any(is_ours)).count())
}

fn is_ours(attribute: &Nla) -> bool {
    matches!(attribute, Nla::Mark(mark) if matches!(mark & MARK_MASK, LOOP_MARK | ACCEPTED_MARK))
}

fn is_transparent(attribute: &Nla) -> bool {
    use netlink_packet_core::Nla as _;
    let mut value = [0_u8; 16];
    if attribute.kind() != INET_DIAG_SOCKOPT || attribute.value_len() > value.len() {
        return false;
    }
    attribute.emit_value(&mut value[..attribute.value_len()]);
    value[0] & TRANSPARENT != 0
}

fn tcp_sockets(states: StateFlags) -> io::Result<Vec<InetResponse>> {
    let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
    let mut sockets = Vec::new();
    for (family, socket_id) in [(libc::AF_INET, SocketId::new_v4()), (libc::AF_INET6, SocketId::new_v6())] {
        let request = InetRequest {
            family: family as u8,
            protocol: IPPROTO_TCP,
            extensions: ExtensionFlags::empty(),
            states: states.clone(),
            socket_id,
        };
        let found = match netlink.dump(SockDiagMessage::InetRequest(request)) {
            // A kernel without IPv6 has no such sockets.
            Err(error) if family == libc::AF_INET6 && error.raw_os_error() == Some(libc::ENOENT) => {
                Vec::new()
            }
            found => found?,
        };
        sockets.extend(found.into_iter().filter_map(|message| match message {
            SockDiagMessage::InetResponse(response) => Some(*response),
            _ => None,
        }));
    }
    Ok(sockets)
}
