//! Blocking netlink requests: many messages in one system call, one answer each.
//!
//! Programming a pod is on the path of a CNI ADD, and one round trip through an async runtime per route
//! costs more than the kernel's whole work.

use std::{
    fmt::Debug,
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};

/// Larger than any datagram of a dump (the kernel fills 32 KiB at most).
const RECEIVE_BUFFER: usize = 65536;

/// A netlink socket. It stays in the netns in which it was opened.
pub(crate) struct Netlink {
    socket: Socket,
    port: u32,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket of this protocol in the calling thread's netns.
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        let port = socket.bind_auto()?.port_number();
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, port, sequence: 0 })
    }

    /// The port id that the kernel's announcements of our own changes carry.
    pub(crate) const fn port(&self) -> u32 {
        self.port
    }

    /// Sends all requests at once and returns the kernel's answer to each. A request that fails does
    /// not keep the next from being carried out.
    ///
    /// The kernel answers in their order, to what fails even when it is not asked to (`netlink_rcv_skb`,
    /// net/netlink/af_netlink.c): only the last is asked for its answer, instead of one datagram for each.
    pub(crate) fn batch<M>(&mut self, requests: Vec<(M, u16)>) -> io::Result<Vec<io::Result<()>>>
    where
        M: NetlinkSerializable + NetlinkDeserializable + Debug,
    {
        let count = requests.len();
        let first = self.sequence.wrapping_add(1);
        let mut packet = Vec::new();
        for (position, (request, flags)) in requests.into_iter().enumerate() {
            let ack = if position + 1 == count { NLM_F_ACK } else { 0 };
            self.append(&mut packet, request, flags | ack);
        }
        if count == 0 {
            return Ok(Vec::new());
        }
        self.socket.send(&packet, 0)?;
        let mut answers: Vec<io::Result<()>> = (0..count).map(|_| Ok(())).collect();
        let mut buffer = Vec::with_capacity(RECEIVE_BUFFER);
        let mut is_last = false;
        while !is_last {
            self.receive::<M>(&mut buffer, |header, payload| {
                let NetlinkPayload::Error(error) = payload else {
                    return;
                };
                let position = header.sequence_number.wrapping_sub(first) as usize;
                if let Some(answer) = answers.get_mut(position) {
                    *answer = if error.code.is_none() { Ok(()) } else { Err(error.to_io()) };
                    is_last |= position + 1 == count;
                }
            })?;
        }
        Ok(answers)
    }

    /// All objects of a kind.
    pub(crate) fn dump<M>(&mut self, request: M) -> io::Result<Vec<M>>
    where
        M: NetlinkSerializable + NetlinkDeserializable + Debug,
    {
        let mut packet = Vec::new();
        self.append(&mut packet, request, NLM_F_DUMP);
        self.socket.send(&packet, 0)?;
        let sequence = self.sequence;
        let mut buffer = Vec::with_capacity(RECEIVE_BUFFER);
        let (mut objects, mut done) = (Vec::new(), None);
        while done.is_none() {
            self.receive::<M>(&mut buffer, |header, payload| match payload {
                _ if header.sequence_number != sequence => {}
                NetlinkPayload::InnerMessage(object) => objects.push(object),
                NetlinkPayload::Done(_) => done = Some(Ok(())),
                NetlinkPayload::Error(error) => done = Some(Err(error.to_io())),
                _ => {}
            })?;
        }
        done.unwrap_or(Ok(())).map(|()| objects)
    }

    fn append<M: NetlinkSerializable>(&mut self, packet: &mut Vec<u8>, request: M, flags: u16) {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(request));
        message.finalize();
        let start = packet.len();
        packet.resize(start + message.buffer_len().next_multiple_of(4), 0);
        if let Some(room) = packet.get_mut(start..) {
            message.serialize(room);
        }
    }

    /// The buffer is the caller's: a socket that is kept for a pod keeps no memory.
    fn receive<M>(
        &self,
        buffer: &mut Vec<u8>,
        mut each: impl FnMut(NetlinkHeader, NetlinkPayload<M>),
    ) -> io::Result<()>
    where
        M: NetlinkDeserializable + Debug,
    {
        buffer.clear();
        self.socket.recv(buffer, 0)?;
        let mut rest = buffer.as_slice();
        while rest.len() >= 16 {
            let message = NetlinkMessage::<M>::deserialize(rest).map_err(io::Error::other)?;
            let step = (message.header.length as usize).next_multiple_of(4).max(16);
            let (header, payload) = message.into_parts();
            each(header, payload);
            rest = rest.get(step..).unwrap_or_default();
        }
        Ok(())
    }
}

/// Tells that something changed in a netns, not what.
pub(crate) struct Changes {
    socket: Socket,
}

impl Changes {
    /// Subscribes to groups of rtnetlink (bits of `nl_groups`) in the calling thread's netns. What requests
    /// from `own_port` cause is left out.
    pub(crate) fn subscribe(groups: u32, own_port: u32) -> io::Result<Self> {
        let mut socket = Socket::new(netlink_sys::protocols::NETLINK_ROUTE)?;
        leave_out(socket.as_fd(), own_port)?;
        socket.set_non_blocking(true)?;
        socket.bind(&SocketAddr::new(0, groups))?;
        Ok(Self { socket })
    }

    /// Takes everything that has been announced and says whether there was any. An overrun (ENOBUFS) is
    /// an announcement too.
    pub(crate) fn drain(&self) -> bool {
        let mut any = false;
        loop {
            match self.socket.recv(&mut &mut [0_u8; 16][..], libc::MSG_TRUNC) {
                Ok(_) => any = true,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => any = true,
                Err(_) => return any,
            }
        }
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Makes the kernel drop announcements whose `nlmsg_pid` (offset 12 of `struct nlmsghdr`) is this port, and
/// cut the others to their header. Programming a pod causes about 20.
fn leave_out(socket: BorrowedFd<'_>, port: u32) -> io::Result<()> {
    const PORT_ID: u32 = 12;
    const HEADER: u32 = 16;
    let step = |code, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, PORT_ID),
        // The load takes the field for big-endian.
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, port.swap_bytes()),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, HEADER),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: `program` and its filter outlive the call, which copies them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
