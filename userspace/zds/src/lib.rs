//! Server side of ZDS: hands workloads' network namespaces to ztunnel and waits for its word.
//!
//! ```text
//!  owner ──uids, entry──► Server ◄──connect, hello── ztunnel
//!    │                      │ one task per connection:
//!    │                      │   introduction → snapshot → live requests
//!    └──add, del──► Ztunnels ──newest / all──► queue ──packet + netns──► ack
//! ```
//!
//! The crate knows the wire and the peer, not what a workload is: no pods, no BPF, no Kubernetes.
//! The peer's side of the contract is ztunnel's `src/inpod/` (read at 62d82653), Istio's server is
//! `cni/pkg/nodeagent/ztunnelserver.go`; where the two servers differ, this one is the stricter:
//!
//! - A connection counts only after its hello and its [introduction](Owner::introduce).
//! - A missed ack closes the connection. There are no message ids on the wire, so a late ack would
//!   be taken for the answer to the next request.
//! - When the newest ztunnel goes, the one before it is given the workloads that it missed.
//! - An add waits for a ztunnel, and moves to another one if the connection is lost under it.
//!
//! # Order that the owner keeps
//!
//! Put a workload where [`Owner::entry`] finds it, then call [`Ztunnels::add`]; take it away, then
//! call [`Ztunnels::del`]. A ztunnel that connects at any moment then learns of it by its snapshot,
//! by the request or by both (a repeated add is a no-op for ztunnel, `statemanager.rs`).

#![forbid(unsafe_code)]
#![deny(missing_docs)]

use std::{fmt, os::fd::OwnedFd, sync::Arc};

mod channel;
mod connection;
mod event;
mod owner;
mod retry;
mod server;
mod socket_file;
mod suspects;
pub mod wire;
mod ztunnels;

pub use event::{Cause, Event};
pub use owner::{BoxError, Entry, Introduction, Owner};
pub use retry::Backoff;
pub use server::{Config, Server};
pub use socket_file::SocketFile;
pub use ztunnels::{Acked, Connected, Ztunnels};

/// Key of a workload on the wire; the Kubernetes pod uid in Istio.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkloadUid(Arc<str>);

impl WorkloadUid {
    /// The uid as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<T: Into<Arc<str>>> From<T> for WorkloadUid {
    fn from(uid: T) -> Self {
        Self(uid.into())
    }
}

impl fmt::Display for WorkloadUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for WorkloadUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Who the workload is. ztunnel takes its identity from these three and ends its process on an add
/// without them (`workloadmanager.rs`, `run_internal`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkloadInfo {
    /// Pod name.
    pub name: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Service account of the pod.
    pub service_account: String,
}

/// A workload that ztunnel can serve.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Key for later requests.
    pub uid: WorkloadUid,
    /// Identity.
    pub info: WorkloadInfo,
    /// Network namespace in which ztunnel is to listen. Borrowed for each send; ztunnel gets a
    /// duplicate.
    pub netns: Arc<OwnedFd>,
}

/// Names one connection of one ztunnel. A later connection has a greater number; numbers are not
/// used again while the server lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a request to ztunnel did not succeed. Logged by the caller, who knows what it was for.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody was connected until the deadline, or the server has been shut down.
    #[error("no ztunnel is connected")]
    NoZtunnel,
    /// ztunnel answered with an error. It keeps the refused workload (and its netns) and tries
    /// again every 5 s by itself until it is deleted (`workloadmanager.rs`, `RETRY_DURATION`).
    #[error("ztunnel on connection {connection} refused: {message}")]
    Nacked {
        /// Who refused.
        connection: ConnectionId,
        /// ztunnel's own words.
        message: String,
    },
    /// No answer within the deadline. ztunnel may or may not have acted on the request.
    #[error("ztunnel on connection {connection} did not answer in time")]
    TimedOut {
        /// Who was asked.
        connection: ConnectionId,
    },
    /// The connection ended before the answer and no other ztunnel came until the deadline.
    #[error("connection {connection} to ztunnel was lost before its answer")]
    ConnectionLost {
        /// Who was asked.
        connection: ConnectionId,
    },
    /// The request does not fit into a packet that ztunnel can read. Nothing was sent.
    #[error(transparent)]
    TooLarge(#[from] wire::TooLarge),
}
