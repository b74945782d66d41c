//! The listener.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use tokio::time::sleep;
use tokio_seqpacket::UnixSeqpacketListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Backoff, ConnectionId, Owner, SocketFile, Ztunnels, connection,
    event::{Event, report},
    ztunnels::Registry,
};

/// Pauses after a failing accept(2), which mostly means that descriptors have run out.
const ACCEPT_BACKOFF: Backoff = Backoff { initial: Duration::from_millis(10), max: Duration::from_secs(1) };

/// Where to listen and how patient to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// Socket path. Istio's is `/var/run/ztunnel/ztunnel.sock`; the directory must exist.
    pub path: PathBuf,
    /// User that a peer must have by SO_PEERCRED; `None` lets anybody in.
    pub peer_uid: Option<u32>,
    /// From accept to the client's hello.
    pub hello_timeout: Duration,
    /// For the whole of [`Owner::introduce`].
    pub introduction_timeout: Duration,
    /// From the start of sending a request to its ack.
    pub ack_timeout: Duration,
    /// Between two accepts. A rejected ztunnel connects again at once (`workloadmanager.rs`,
    /// `run_internal`); Istio's server lets in five per second.
    pub accept_interval: Duration,
    /// For workloads refused in a snapshot or a take-over.
    pub retry: Backoff,
}

impl Config {
    /// Root only, and Istio's timeouts of 5 s (`ztunnelserver.go`).
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            peer_uid: Some(0),
            hello_timeout: Duration::from_secs(5),
            introduction_timeout: Duration::from_secs(10),
            ack_timeout: Duration::from_secs(5),
            accept_interval: Duration::from_millis(200),
            retry: Backoff { initial: Duration::from_secs(1), max: Duration::from_secs(30) },
        }
    }
}

/// A bound server that does not accept yet.
#[derive(Debug)]
pub struct Server {
    config: Config,
    listener: UnixSeqpacketListener,
    socket: SocketFile,
    registry: Registry,
    ztunnels: Ztunnels,
}

impl Server {
    /// Binds the socket, mode 0600, in place of whatever was at the path. Connections wait in the
    /// backlog until [`run`](Self::run). Needs a tokio runtime.
    pub fn bind(config: Config) -> io::Result<Self> {
        let (listener, socket) = SocketFile::listen(&config.path, |path| UnixSeqpacketListener::bind(path))?;
        let (registry, ztunnels) = Registry::new();
        Ok(Self { config, listener, socket, registry, ztunnels })
    }

    /// The handle for requests; usable before [`run`](Self::run).
    pub fn ztunnels(&self) -> Ztunnels {
        self.ztunnels.clone()
    }

    /// The socket's file, to see whether another server has taken its place.
    pub fn socket(&self) -> &SocketFile {
        &self.socket
    }

    /// Serves until `shutdown`, then closes every connection, removes the socket file if it is still
    /// this server's, and returns when the last [`Owner::ended`] has been called. Requests under way
    /// fail. Dropping the future instead leaves the connections' tasks to `shutdown`.
    pub async fn run<O: Owner>(self, owner: Arc<O>, shutdown: CancellationToken) {
        let Self { config, mut listener, socket, registry, ztunnels: _ } = self;
        let config = Arc::new(config);
        let connections = TaskTracker::new();
        let accept = async {
            let mut failures = 0_u32;
            for number in 1.. {
                let accepted = loop {
                    match listener.accept().await {
                        Ok(accepted) => break accepted,
                        Err(error) => {
                            failures = failures.saturating_add(1);
                            let pause = ACCEPT_BACKOFF.pause(failures);
                            report(&*owner, Event::AcceptFailed { error: &error, pause });
                            sleep(pause).await;
                        }
                    }
                };
                failures = 0;
                let interval = config.accept_interval;
                let (config, owner, registry, shutdown) =
                    (Arc::clone(&config), Arc::clone(&owner), registry.clone(), shutdown.clone());
                connections.spawn(async move {
                    let life = connection::run(ConnectionId(number), accepted, &config, &*owner, &registry);
                    shutdown.run_until_cancelled(life).await;
                });
                sleep(interval).await;
            }
        };
        shutdown.run_until_cancelled(accept).await;
        socket.remove();
        drop(listener);
        drop(registry);
        connections.close();
        connections.wait().await;
    }
}
