use std::{io, path::PathBuf};

use crate::answer::Refusal;

/// Why a request has no good answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing was asked: there is no agent. Somebody else has to decide.
    #[error("agent not reached at {}: {why}", path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// What is wrong with it.
        why: Absence,
    },
    /// The deadline passed. The agent may or may not have acted on the request.
    #[error("agent at {} did not answer in time", path.display())]
    TimedOut {
        /// The socket.
        path: PathBuf,
    },
    /// The agent answered with an error of the protocol: the request failed, and why.
    #[error(transparent)]
    Refused(Refusal),
    /// Somebody answered with an error that is none of the protocol, as Istio's agent does. It does not
    /// say whether the pod is one of the mesh.
    #[error("answer {status} is not of the culvert agent: {text:?}")]
    Foreign {
        /// HTTP status.
        status: u16,
        /// The body.
        text: String,
    },
    /// The connection ended before the answer, or the answer was not HTTP. The agent may or may not
    /// have acted on the request.
    #[error("connection to the agent was lost before its answer: {0}")]
    Lost(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// What is wrong with the agent's socket.
#[derive(Debug, thiserror::Error)]
pub enum Absence {
    /// No such file.
    #[error("there is no socket")]
    Missing,
    /// Some other kind of file.
    #[error("it is not a socket")]
    NotASocket,
    /// A socket on which nobody listens.
    #[error("nobody listens there")]
    Refused,
    /// The caller may not connect.
    #[error("permission denied")]
    Permission,
    /// Somebody else than root listens.
    #[error("uid {uid} listens there, not uid {expected}")]
    NotRoot {
        /// Who listens.
        uid: u32,
        /// Who should.
        expected: u32,
    },
    /// Anything else.
    #[error(transparent)]
    Other(io::Error),
}
