//! What happens on connections, logged here and handed to the owner for its metrics.

use std::{error::Error as StdError, io, time::Duration};

use tracing::{info, warn};

use crate::{ConnectionId, Error, Owner, WorkloadUid, owner::BoxError, wire::DecodeError};

/// Why a connection ended, or never counted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// SO_PEERCRED names another user than the configured one.
    #[error("peer has uid {uid}, expected {expected}")]
    PeerUid {
        /// Who connected.
        uid: u32,
        /// Who may.
        expected: u32,
    },
    /// Connected, but silent.
    #[error("no hello in time")]
    NoHello,
    /// The owner's [`introduce`](Owner::introduce) failed.
    #[error("introduction failed")]
    Introduction(#[source] BoxError),
    /// The owner's [`introduce`](Owner::introduce) took too long.
    #[error("introduction did not finish in time")]
    IntroductionTimeout,
    /// End of file.
    #[error("closed by ztunnel")]
    Closed,
    /// The socket failed; a reset or a broken pipe is the peer's end as well.
    #[error("socket failed")]
    Io(#[from] io::Error),
    /// A request was not answered in time.
    #[error("no ack in time")]
    NoAck,
    /// The peer spoke without being asked.
    #[error("message outside a request")]
    Unexpected,
    /// The peer's message was longer than any this protocol has.
    #[error("message is too long")]
    Truncated,
    /// The peer's message was not what it had to be.
    #[error("message can not be decoded")]
    Decode(#[from] DecodeError),
    /// ztunnel would not end the snapshot, after which it does not go on.
    #[error("ztunnel refused the end of the snapshot: {0}")]
    SnapshotRefused(String),
}

/// Something the owner may want to count. Already logged.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// accept(2) failed and is tried again after `pause`.
    AcceptFailed {
        /// The errno.
        error: &'a io::Error,
        /// Time until the next try.
        pause: Duration,
    },
    /// A connection ended before it counted as a ztunnel.
    Rejected {
        /// Which.
        connection: ConnectionId,
        /// Why.
        cause: &'a Cause,
    },
    /// A ztunnel said hello and was introduced: it gets requests from here on.
    Connected {
        /// Which.
        connection: ConnectionId,
        /// Protocol version of its hello.
        version: i32,
    },
    /// ztunnel acked the end of its snapshot.
    SnapshotSent {
        /// Whose.
        connection: ConnectionId,
        /// Workloads acked.
        added: usize,
        /// Workloads it was told to keep, their netns being unknown.
        kept: usize,
        /// Workloads not acked; each had an event of its own.
        refused: usize,
    },
    /// The newest ztunnel has gone; the one before it has been given what that one had been.
    TookOver {
        /// By whom.
        connection: ConnectionId,
        /// Workloads acked, those it had before included.
        added: usize,
        /// Workloads not acked; each had an event of its own.
        refused: usize,
    },
    /// A workload of a snapshot, or of a take-over, is not served by this ztunnel.
    Refused {
        /// By whom.
        connection: ConnectionId,
        /// Which workload.
        uid: &'a WorkloadUid,
        /// ztunnel's nack, or [`Error::TooLarge`].
        error: &'a Error,
        /// Count of refusals of this workload on this connection, from 1.
        attempt: u32,
        /// Time until the next try, if there is one.
        retry_in: Option<Duration>,
    },
    /// A workload that was refused is served now.
    Recovered {
        /// By whom.
        connection: ConnectionId,
        /// Which workload.
        uid: &'a WorkloadUid,
        /// How often it had been refused.
        refusals: u32,
    },
    /// A ztunnel's connection ended (not reported at shutdown).
    Disconnected {
        /// Which.
        connection: ConnectionId,
        /// Why.
        cause: &'a Cause,
    },
}

/// The one place where events are logged.
pub(crate) fn report<O: Owner>(owner: &O, event: Event<'_>) {
    match &event {
        Event::AcceptFailed { error, pause } => warn!(error = dynamic(*error), ?pause, "zds accept failed"),
        Event::Rejected { connection, cause } => {
            warn!(%connection, error = dynamic(*cause), "zds connection rejected");
        }
        Event::Connected { connection, version } => info!(%connection, version, "ztunnel connected"),
        Event::SnapshotSent { connection, added, kept, refused } => {
            info!(%connection, added, kept, refused, "zds snapshot sent");
        }
        Event::TookOver { connection, added, refused } => {
            info!(%connection, added, refused, "older ztunnel took over");
        }
        Event::Refused { connection, uid, error, attempt, retry_in } => {
            warn!(%connection, %uid, error = dynamic(*error), attempt, ?retry_in, "ztunnel does not serve workload");
        }
        Event::Recovered { connection, uid, refusals } => {
            info!(%connection, %uid, refusals, "ztunnel serves workload after refusal");
        }
        Event::Disconnected { connection, cause: Cause::Closed } => {
            info!(%connection, "ztunnel disconnected");
        }
        Event::Disconnected { connection, cause } => {
            warn!(%connection, error = dynamic(*cause), "zds connection closed");
        }
    }
    owner.event(event);
}

/// tracing prints the sources of an error only when it sees a trait object.
fn dynamic(error: &(impl StdError + 'static)) -> &(dyn StdError + 'static) {
    error
}
