//! ztunnel as enrollment sees it.

use culvert_zds::{Error, Workload, WorkloadUid};
use tokio::time::Instant;

/// Has ztunnel serve workloads. One that is served is also part of the snapshot of each ztunnel that
/// connects later, until [`del`](Self::del).
pub trait Ztunnel: Send + Sync + 'static {
    /// Serves `workload` from now on, in place of what its uid named before. On `Ok` ztunnel listens in
    /// its netns. Waits for a ztunnel until `deadline`.
    ///
    /// Cancel safe; after an error or a drop the workload has to be deleted or replaced.
    fn add(&self, workload: Workload, deadline: Instant) -> impl Future<Output = Result<(), Error>> + Send;

    /// Serves `workload` from now on; ztunnel learns of it when it connects.
    fn keep(&self, workload: Workload);

    /// Serves it no longer. Bounded by the time ztunnel has for an answer.
    fn del(&self, uid: &WorkloadUid) -> impl Future<Output = Result<(), Error>> + Send;
}
