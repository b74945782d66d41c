//! Who is in the mesh: the seam between enrollment and wherever pods and namespaces are described.
//!
//! In: a decision for a pod that is about to start, and a signal that earlier decisions may have changed.
//! Out: how a pod stands, written whenever the other side gets to it. Neither direction is waited for by
//! an ADD beyond its deadline, and a failed write never affects one (`lifecycle.md` §7).

pub mod file;
pub mod follow;
pub mod predicate;
pub mod selector;
pub mod standalone;

use tokio::{sync::watch, time::Instant};

use crate::enroll::Pod;

/// A pod as a container runtime names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// The uid, if the runtime tells it: of the API, or a static pod's hash.
    pub uid: Option<String>,
}

/// Whether a pod is one of the mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is, and this is its identity.
    Member {
        /// Who it is.
        pod: Pod,
        /// Inbound connections reach it directly (`ambient.istio.io/bypass-inbound-capture`).
        bypass_inbound: bool,
    },
    /// It is known, and is not.
    Outside,
}

/// There is no decision: not yet, or not any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Undecided {
    /// The pod was not described in time.
    #[error("nothing is known of pod {namespace}/{name}")]
    Unknown {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// A pod of that name is known, but it is another one.
    #[error("pod {namespace}/{name} is known with uid {known}, the runtime says {told}")]
    Another {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
        /// Uid of the description.
        known: String,
        /// Uid of the runtime.
        told: String,
    },
}

/// How a pod stands, in the words of the annotation `ambient.istio.io/redirection`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redirection {
    /// Captured and served: others may tunnel to it.
    Enabled,
    /// Not in the mesh.
    Absent,
}

/// Describes pods.
pub trait Membership: Send + Sync + 'static {
    /// Decides over a pod, waiting for its description until `deadline`. Cancel safe.
    fn decide(
        &self,
        pod: &Named,
        deadline: Instant,
    ) -> impl Future<Output = Result<Decision, Undecided>> + Send;

    /// Changes whenever decisions may have changed.
    fn changes(&self) -> watch::Receiver<u64>;

    /// How a pod stands now. Returns at once; whoever wants to know is told later.
    fn announce(&self, pod: &Pod, redirection: Redirection);
}
