//! One pod: its sockets, and a task per listener.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use culvert_abi::ztunnel::{DNS_PORT, HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio_util::sync::CancellationToken;

use super::{Proxy, connection::Connection, inbound, netns::PodNetns, outbound, sockets::Sockets, tunnel};

/// After a failing accept(2), which mostly means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// A pod that is served. Dropping it closes listeners and connections (`DrainMode::Immediate`).
#[derive(Debug)]
pub(super) struct Workload {
    pub(super) netns: Arc<PodNetns>,
    pod: Arc<str>,
    gone: CancellationToken,
    _dns: Vec<UdpSocket>,
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.gone.cancel();
    }
}

/// A pod whose sockets listen and whose ack is still to be sent.
pub(super) struct Listening {
    workload: Workload,
    listeners: Vec<(u16, TcpListener)>,
}

impl Listening {
    pub(super) fn open(proxy: &Proxy, pod: &str, netns: PodNetns) -> io::Result<Self> {
        let Sockets { dns, dns_udp, hbone, inbound, outbound } =
            Sockets::open(&netns, &proxy.options.faults)?;
        let mut listeners: Vec<_> = dns.into_iter().map(|listener| (DNS_PORT, listener)).collect();
        listeners.extend([(HBONE_PORT, hbone), (INBOUND_PORT, inbound), (OUTBOUND_PORT, outbound)]);
        Ok(Self {
            workload: Workload {
                netns: Arc::new(netns),
                pod: pod.into(),
                gone: CancellationToken::new(),
                _dns: dns_udp,
            },
            listeners,
        })
    }

    /// Accepts from here on.
    pub(super) fn serve(self, proxy: &Arc<Proxy>) -> Workload {
        let Self { workload, listeners } = self;
        for (port, listener) in listeners {
            let acceptor = Acceptor {
                proxy: Arc::clone(proxy),
                netns: Arc::clone(&workload.netns),
                pod: Arc::clone(&workload.pod),
                port,
                gone: workload.gone.clone(),
            };
            tokio::spawn(acceptor.run(listener));
        }
        workload
    }
}

struct Acceptor {
    proxy: Arc<Proxy>,
    netns: Arc<PodNetns>,
    pod: Arc<str>,
    port: u16,
    gone: CancellationToken,
}

impl Acceptor {
    async fn run(self, listener: TcpListener) {
        loop {
            let accepted = tokio::select! {
                biased;
                () = self.gone.cancelled() => return,
                // Listeners close, connections go on.
                () = self.proxy.shutdown.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => self.connection(stream, peer),
                Err(error) => {
                    tracing::warn!(%error, pod = %self.pod, port = self.port, "accept failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn connection(&self, stream: TcpStream, peer: SocketAddr) {
        let (port, gone) = (self.port, self.gone.clone());
        let connection = match Connection::new(&self.proxy, &self.netns, &self.pod, port, stream, peer) {
            Ok(connection) => connection,
            Err(error) => return tracing::debug!(%error, "client is gone already"),
        };
        self.proxy.connections.spawn(async move {
            let life = async {
                match port {
                    OUTBOUND_PORT => outbound::serve(connection).await,
                    INBOUND_PORT => inbound::serve(connection).await,
                    HBONE_PORT => tunnel::serve(connection).await,
                    _ => connection.refuse("DNS is not served"),
                }
            };
            tokio::select! {
                () = life => {}
                () = gone.cancelled() => {}
            }
        });
    }
}
