//! A connection that a client has made.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::fd::{AsRawFd as _, RawFd},
    time::Duration,
};

use socket2::{SockRef, Socket};

use crate::{address::canonical, journal::DEADLINE};

/// A client's end. Reads and writes give up after [`DEADLINE`].
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
}

/// What a test has connected or accepted itself.
impl From<TcpStream> for Connection {
    fn from(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(DEADLINE)).expect("SO_RCVTIMEO");
        Self { stream }
    }
}

impl Connection {
    pub(crate) fn new(socket: Socket) -> Self {
        Self { stream: socket.into() }
    }

    /// Sends `bytes` and returns as many bytes of the answer: the same, from an echo server. Panics
    /// when the connection fails.
    pub fn say(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.try_say(bytes).unwrap_or_else(|error| panic!("no answer on {self:?}: {error}"))
    }

    /// [`say`](Self::say) with an error.
    pub fn try_say(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        self.send(bytes)?;
        self.receive(bytes.len())
    }

    /// Says something and waits this long for the answer, whatever becomes of it.
    pub(crate) fn wait_for_echo(&mut self, patience: Duration) {
        self.stream.set_read_timeout(Some(patience)).expect("SO_RCVTIMEO");
        self.try_say(b"?").ok();
    }

    /// Sends all of `bytes`.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Receives exactly this many bytes.
    pub fn receive(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, error),
            _ => error,
        })?;
        Ok(bytes)
    }

    /// Everything until the other side ends; a timeout is an error.
    pub fn receive_to_end(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.stream.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Waits for the other side to end the connection, gracefully or not. Panics if it says something
    /// or does not.
    pub fn closed(&mut self) {
        match self.stream.read(&mut [0]) {
            Ok(0) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Ok(_) => panic!("data instead of an end on {self:?}"),
            Err(error) => panic!("not closed: {self:?}: {error}"),
        }
    }

    /// Ends the sending direction.
    pub fn finish(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    /// Closes with a RST.
    pub fn reset(self) {
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).expect("SO_LINGER");
    }

    /// Destroys the socket without a word to the other side (TCP_REPAIR), as if it had never been.
    pub fn vanish(self) {
        set_option(self.stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, 1).expect("TCP_REPAIR");
    }

    /// The client's own address.
    pub fn local_addr(&self) -> SocketAddr {
        canonical(self.stream.local_addr().expect("getsockname"))
    }

    /// Whom the client believes to talk to.
    pub fn peer_addr(&self) -> SocketAddr {
        canonical(self.stream.peer_addr().expect("getpeername"))
    }

    /// The mark of the socket.
    pub fn mark(&self) -> u32 {
        SockRef::from(&self.stream).mark().expect("SO_MARK")
    }

    /// The socket.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

/// setsockopt(2) with an integer, for options that no crate names.
pub(crate) fn set_option(
    socket: RawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: pointer and length describe `value`, which outlives the call.
    let result = unsafe { libc::setsockopt(socket, level, name, (&raw const value).cast(), length) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
