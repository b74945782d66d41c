//! Who is in the mesh: the seam between enrollment and wherever pods and namespaces are described.
//!
//! In: a decision for a pod that is about to start, and a signal that earlier decisions may have changed.
//! Out: how a pod stands, written whenever the other side gets to it. Neither direction is waited for by
//! an ADD beyond its deadline, and a failed write never affects one (`lifecycle.md` §7).

pub mod file;
pub mod kubernetes;
pub mod predicate;
pub mod selector;
pub mod standalone;

#[cfg(test)]
mod contract;

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use tokio::{sync::watch, time::Instant};

use crate::{
    enroll::{Failure, Pod},
    readiness::Readiness,
    scope_file::ScopeFile,
};

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
    /// The pod is known and its namespace is not, so that nobody knows the namespace's labels.
    #[error("nothing is known of the namespace of pod {namespace}/{name}")]
    Namespace {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
}

/// Asks again at each change, until there is a decision or time is over. Cancel safe.
async fn wait_for_decision(
    mut changes: watch::Receiver<u64>,
    deadline: Instant,
    decide: impl Fn() -> Result<Decision, Undecided>,
) -> Result<Decision, Undecided> {
    loop {
        let undecided = match decide() {
            Ok(decision) => return Ok(decision),
            Err(undecided) => undecided,
        };
        match tokio::time::timeout_at(deadline, changes.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return Err(undecided),
        }
    }
}

/// How a pod stands, in the words of the annotation `ambient.istio.io/redirection`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redirection {
    /// Captured, served and tested: others may tunnel to it.
    Enabled,
    /// It should be, and is not.
    Pending,
    /// Not in the mesh.
    Absent,
}

/// A pod of this node as it is described now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Who it is.
    pub pod: Pod,
    /// What its cgroup and its runtime may call it instead of the uid: a static pod's hash.
    pub hash: Option<String>,
    /// Whether it is one of the mesh. `None`: its namespace is not known (yet).
    pub member: Option<bool>,
    /// Inbound connections reach it directly.
    pub bypass_inbound: bool,
    /// Its addresses, none before it has a sandbox.
    pub addresses: BTreeSet<IpAddr>,
    /// Its phase is terminal: no container will run in it again.
    pub has_ended: bool,
}

/// Describes pods.
pub trait Membership: Send + Sync + 'static {
    /// Decides over a pod, waiting for its description until `deadline`. Cancel safe.
    fn decide(
        &self,
        pod: &Named,
        deadline: Instant,
    ) -> impl Future<Output = Result<Decision, Undecided>> + Send;

    /// Every pod of this node that is described one by one. A pod that is missing is not known to be gone.
    fn described(&self) -> Vec<Described>;

    /// Changes whenever decisions or descriptions may have changed.
    fn changes(&self) -> watch::Receiver<u64>;

    /// How a pod stands now. Returns at once; whoever wants to know is told later.
    fn announce(&self, pod: &Pod, redirection: Redirection);

    /// A running pod could not be taken into the mesh; it is tried again. Returns at once.
    fn report(&self, pod: &Pod, failure: &Failure);
}

/// Where descriptions come from.
pub trait Source: Membership {
    /// Keeps in step with it, and the scope file in step with that, until dropped. What goes wrong is a
    /// reason not to be ready; so is, from the call on, that nothing is known yet.
    fn follow(
        self: Arc<Self>,
        scope: ScopeFile,
        readiness: Arc<Readiness>,
    ) -> impl Future<Output = ()> + Send;
}
