//! What a ztunnel did, as told by the stand-in (a JSON line each) or read from the real one's log.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// One thing that happened. `pod` is the uid of the workload, `connection` a number that the
/// events of one accepted connection share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The snapshot of the workloads was acked.
    Ready,
    /// A workload's sockets listen.
    Added {
        /// Which.
        pod: String,
    },
    /// A workload's sockets are closed.
    Deleted {
        /// Which.
        pod: String,
    },
    /// A connection was accepted.
    Accepted {
        /// In which pod.
        pod: String,
        /// Its number.
        connection: u64,
        /// Port of the listener: 15001, 15006, 15008 or 15053.
        listener: u16,
        /// Who connected.
        peer: SocketAddr,
        /// Where to. For 15008 the tunnel's endpoint, not what it is asked to connect to.
        destination: SocketAddr,
    },
    /// The connection on the other side is established.
    Upstream {
        /// In which pod.
        pod: String,
        /// The accepted connection it belongs to.
        connection: u64,
        /// Its own address.
        local: SocketAddr,
        /// Whom it reached.
        remote: SocketAddr,
    },
    /// An accepted connection was closed without reaching anything.
    Refused {
        /// In which pod.
        pod: String,
        /// Which.
        connection: u64,
        /// Why.
        reason: String,
    },
    /// An accepted connection that had reached its destination is over.
    Closed {
        /// In which pod.
        pod: String,
        /// Which.
        connection: u64,
        /// Bytes from the accepted side to the upstream side.
        sent: u64,
        /// Bytes the other way.
        received: u64,
    },
    /// SIGTERM came; listeners are closed.
    Draining,
    /// Answer to SIGUSR1: everything before has been told.
    Flushed,
}

impl Event {
    /// The pod that is served from now on.
    pub(crate) fn added(&self) -> Option<&str> {
        match self {
            Self::Added { pod } => Some(pod),
            _ => None,
        }
    }
}
