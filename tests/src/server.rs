//! Servers that echo and remember who came.

use std::{
    io,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use crate::{address::canonical, host::Host, journal::Journal};

const BACKLOG: i32 = 4096;
const BUFFER: usize = 64 << 10;
const ACCEPT_PAUSE: Duration = Duration::from_millis(1);

/// A server to be started: options, then [`serve`](Listen::serve).
#[derive(Clone, Debug)]
#[must_use]
pub struct Listen<'a> {
    host: &'a Host,
    on: SocketAddr,
    v6_only: bool,
    reuse_address: bool,
    reuse_port: bool,
    mark: Option<u32>,
    mptcp: bool,
}

impl<'a> Listen<'a> {
    pub(crate) fn new(host: &'a Host, on: SocketAddr) -> Self {
        Self { host, on, v6_only: false, reuse_address: true, reuse_port: false, mark: None, mptcp: false }
    }

    /// IPV6_V6ONLY.
    pub fn v6_only(mut self) -> Self {
        self.v6_only = true;
        self
    }

    /// SO_REUSEADDR, which servers set unless told otherwise.
    pub fn reuse_address(mut self, set: bool) -> Self {
        self.reuse_address = set;
        self
    }

    /// SO_REUSEPORT.
    pub fn reuse_port(mut self) -> Self {
        self.reuse_port = true;
        self
    }

    /// SO_MARK.
    pub fn mark(mut self, mark: u32) -> Self {
        self.mark = Some(mark);
        self
    }

    /// An MPTCP listener, as Go's since 1.24.
    pub fn mptcp(mut self) -> Self {
        self.mptcp = true;
        self
    }

    /// Starts, or panics.
    pub fn serve(&self) -> Server {
        self.try_serve()
            .unwrap_or_else(|error| panic!("{} cannot listen on {}: {error}", self.host.name(), self.on))
    }

    /// Starts.
    pub fn try_serve(&self) -> io::Result<Server> {
        let listener = self.host.run(|| self.socket())?;
        let on = listener.local_addr()?.as_socket().map(canonical).expect("an inet socket");
        let runtime = self.host.runtime();
        let _context = runtime.enter();
        let listener = TcpListener::from_std(listener.into())?;
        let accepted = Journal::default();
        let (stopped, killed) = (CancellationToken::new(), CancellationToken::new());
        let accept = accept(listener, accepted.clone(), killed.clone());
        let acceptor = runtime.spawn({
            let stopped = stopped.clone();
            async move {
                stopped.run_until_cancelled(accept).await;
            }
        });
        Ok(Server {
            host: self.host.clone(),
            on,
            accepted,
            told: AtomicUsize::new(0),
            stopped,
            killed,
            acceptor: Some(acceptor),
        })
    }

    fn socket(&self) -> io::Result<Socket> {
        let protocol = if self.mptcp { Protocol::MPTCP } else { Protocol::TCP };
        let socket = Socket::new(Domain::for_address(self.on), Type::STREAM.nonblocking(), Some(protocol))?;
        if self.on.is_ipv6() {
            socket.set_only_v6(self.v6_only)?;
        }
        socket.set_reuse_address(self.reuse_address)?;
        socket.set_reuse_port(self.reuse_port)?;
        if let Some(mark) = self.mark {
            socket.set_mark(mark)?;
        }
        socket.bind(&self.on.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket)
    }
}

/// A connection that a server accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Who connected, in the server's eyes.
    pub peer: SocketAddr,
    /// At which address of the server.
    pub local: SocketAddr,
}

/// A running server. Dropping it stops it and ends its connections.
#[derive(Debug)]
pub struct Server {
    host: Host,
    on: SocketAddr,
    accepted: Journal<Accepted>,
    told: AtomicUsize,
    stopped: CancellationToken,
    killed: CancellationToken,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.on.port()
    }

    /// Everybody it accepted until now.
    pub fn accepted(&self) -> Vec<Accepted> {
        self.accepted.all()
    }

    /// The next accepted connection this method has not returned yet. Waits for it.
    pub fn next_accepted(&self) -> Accepted {
        let next = self.told.fetch_add(1, Ordering::SeqCst);
        let what = format!("connection {} to {} of {}", next + 1, self.on, self.host.name());
        self.accepted.wait_until(&what, |accepted| accepted.get(next).copied())
    }

    /// Closes the listening socket. Open connections go on, also when the server is dropped.
    pub fn stop(&mut self) {
        self.stopped.cancel();
        if let Some(acceptor) = self.acceptor.take() {
            self.host.runtime().block_on(acceptor).ok();
        }
        self.killed = CancellationToken::new();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.killed.cancel();
        self.stop();
    }
}

async fn accept(listener: TcpListener, accepted: Journal<Accepted>, killed: CancellationToken) {
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            // A client that is gone already, or no descriptor left.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        if let Ok(local) = stream.local_addr() {
            accepted.push(Accepted { peer: canonical(peer), local: canonical(local) });
        }
        let killed = killed.clone();
        tokio::spawn(async move {
            killed.run_until_cancelled(echo(stream)).await;
        });
    }
}

async fn echo(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = stream.read(&mut buffer).await?;
        if read == 0 {
            return stream.shutdown().await;
        }
        stream.write_all(&buffer[..read]).await?;
    }
}
