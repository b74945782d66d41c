//! Why a pod could not be enrolled, by step.

use std::{fmt, io, path::PathBuf, sync::Arc, time::Duration};

use culvert_cni::{answer::Refusal, codes::Code};
use culvert_zds::Error as ZdsError;

use super::sandbox::NetnsId;
use crate::{discover, error_chain::Chain, membership, record, self_test};

/// The steps of an ADD, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Step {
    /// Whether the pod is one of the mesh.
    Membership,
    /// Its turn: another operation on the same pod is under way.
    Turn,
    /// Open the netns and compare it with the runtime's.
    Netns,
    /// Routing, sysctls and own addresses.
    Register,
    /// ztunnel's ack.
    Ztunnel,
    /// ztunnel's listeners, and the program.
    Attach,
    /// A connection is captured.
    SelfTest,
    /// The record that a later agent goes by.
    Record,
}

impl Step {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Membership,
        Self::Turn,
        Self::Netns,
        Self::Register,
        Self::Ztunnel,
        Self::Attach,
        Self::SelfTest,
        Self::Record,
    ];

    /// Name in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Membership => "membership",
            Self::Turn => "turn",
            Self::Netns => "netns",
            Self::Register => "register",
            Self::Ztunnel => "ztunnel",
            Self::Attach => "attach",
            Self::SelfTest => "self-test",
            Self::Record => "record",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why an ADD failed. Nothing of it is left, or what is left is being removed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// It is not known whether the pod is one of the mesh.
    #[error("cannot tell whether the pod is one of the mesh")]
    Membership(#[from] membership::Undecided),
    /// The netns cannot be opened.
    #[error("cannot open the pod's network namespace")]
    Netns(#[source] culvert_dataplane::Error),
    /// It runs already, and nobody told where.
    #[error("cannot find the pod's network namespace")]
    Unfound(#[from] discover::Unfound),
    /// `/proc` cannot be read.
    #[error("cannot look for the pod's network namespace")]
    Discovery(#[source] Arc<io::Error>),
    /// What is found are the last moments of a sandbox.
    #[error("the runtime has removed the pod's sandbox")]
    Removed,
    /// The path names the host's own netns.
    #[error("{path} is the network namespace of the host")]
    HostNetns {
        /// The path.
        path: PathBuf,
    },
    /// The path names another netns here than in the runtime's view.
    #[error("{path} is network namespace {found} for the agent, but {expected} for the runtime")]
    AnotherNetns {
        /// The path, as the agent sees it.
        path: PathBuf,
        /// The runtime's.
        expected: NetnsId,
        /// The agent's.
        found: NetnsId,
    },
    /// The kernel, or a socket in the netns, does not let capture begin.
    #[error("cannot attach capture to the pod")]
    Attach(#[source] culvert_dataplane::Error),
    /// ztunnel does not serve the pod.
    #[error("ztunnel does not serve the pod")]
    Ztunnel {
        /// How long its answer was awaited.
        waited: Duration,
        /// What became of the request.
        source: ZdsError,
    },
    /// A connection was not captured.
    #[error("the self-test found that the pod is not captured")]
    SelfTest(#[from] self_test::Error),
    /// The record could not be written.
    #[error("cannot record the pod")]
    Record(#[from] record::Error),
    /// Time is over.
    #[error("no time is left, in step {step}")]
    Deadline {
        /// The step it was in.
        step: Step,
    },
    /// The runtime went away, or asked for the removal of the attachment. Nobody reads the answer.
    #[error("cancelled by the runtime in step {step}")]
    Cancelled {
        /// The step it was in.
        step: Step,
    },
    /// A defect of the agent.
    #[error("step {step} panicked")]
    Panicked {
        /// The step it was in.
        step: Step,
    },
}

impl Failure {
    /// The code of the CNI error (`lifecycle.md` §2).
    pub fn code(&self) -> Code {
        match self {
            Self::Membership(_) | Self::Record(_) | Self::Cancelled { .. } => Code::TryLater,
            Self::Netns(_)
            | Self::Unfound(_)
            | Self::Discovery(_)
            | Self::Removed
            | Self::HostNetns { .. }
            | Self::AnotherNetns { .. } => Code::Netns,
            Self::Attach(_) => Code::Attach,
            Self::Ztunnel { source, .. } => match source {
                ZdsError::NoZtunnel | ZdsError::ConnectionLost { .. } => Code::TryLater,
                ZdsError::TimedOut { .. } => Code::Deadline,
                ZdsError::Nacked { .. } | ZdsError::TooLarge(_) => Code::Ztunnel,
            },
            Self::SelfTest(_) => Code::SelfTest,
            Self::Deadline { .. } => Code::Deadline,
            Self::Panicked { step } => match step {
                Step::Netns => Code::Netns,
                Step::Register | Step::Attach => Code::Attach,
                Step::Ztunnel => Code::Ztunnel,
                Step::SelfTest => Code::SelfTest,
                Step::Membership | Step::Turn | Step::Record => Code::TryLater,
            },
        }
    }

    /// The step that failed, for metrics.
    pub fn step(&self) -> Step {
        match self {
            Self::Membership(_) => Step::Membership,
            Self::Netns(_)
            | Self::Unfound(_)
            | Self::Discovery(_)
            | Self::Removed
            | Self::HostNetns { .. }
            | Self::AnotherNetns { .. } => Step::Netns,
            Self::Attach(_) => Step::Attach,
            Self::Ztunnel { .. } => Step::Ztunnel,
            Self::SelfTest(_) => Step::SelfTest,
            Self::Record(_) => Step::Record,
            Self::Deadline { step } | Self::Cancelled { step } | Self::Panicked { step } => *step,
        }
    }

    /// What the runtime is answered.
    pub fn refusal(&self) -> Refusal {
        let details = match self {
            Self::Ztunnel { waited, source: ZdsError::NoZtunnel } => {
                format!("waited {:.1} s for a ztunnel to connect", waited.as_secs_f64())
            }
            _ => Chain(self).causes(),
        };
        Refusal::new(self.code(), self.to_string(), details)
    }
}
