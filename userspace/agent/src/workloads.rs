//! What ztunnel is told: the workloads that the ZDS server asks for, and requests to it.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    os::fd::AsFd as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use culvert_dataplane::{Dataplane, Introduction as Introduced};
use culvert_zds::{
    BoxError, ConnectionId, Entry, Error, Event, Introduction, Owner, Workload, WorkloadInfo, WorkloadUid,
    Ztunnels,
};
use tokio::time::Instant;

use crate::{enroll::Ztunnel, metrics::Metrics};

/// Namespace and account of the workload by which a ztunnel introduces itself.
const OWN: &str = "culvert";

/// The owner of the ZDS server, and enrollment's way to it.
pub struct Workloads {
    dataplane: Arc<Dataplane>,
    ztunnels: Ztunnels,
    metrics: Arc<Metrics>,
    served: Mutex<BTreeMap<WorkloadUid, Workload>>,
    introduced: Mutex<HashMap<ConnectionId, Introduced>>,
}

impl Workloads {
    /// Serves nothing yet.
    pub fn new(dataplane: Arc<Dataplane>, ztunnels: Ztunnels, metrics: Arc<Metrics>) -> Self {
        Self { dataplane, ztunnels, metrics, served: Mutex::default(), introduced: Mutex::default() }
    }

    /// Whether a ztunnel is connected.
    pub fn has_ztunnel(&self) -> bool {
        !self.ztunnels.connected().borrow().is_empty()
    }
}

impl Ztunnel for Workloads {
    async fn add(&self, workload: Workload, deadline: Instant) -> Result<(), Error> {
        self.keep(workload.clone());
        if self.ztunnels.connected().borrow().is_empty() {
            tracing::info!(
                pod = %format_args!("{}/{}", workload.info.namespace, workload.info.name),
                uid = %workload.uid,
                "no ztunnel is connected; waiting for one"
            );
        }
        self.ztunnels.add(&workload, deadline).await.map(drop)
    }

    fn keep(&self, workload: Workload) {
        lock(&self.served).insert(workload.uid.clone(), workload);
    }

    async fn del(&self, uid: &WorkloadUid) -> Result<(), Error> {
        lock(&self.served).remove(uid);
        self.ztunnels.del(uid).await
    }
}

impl Owner for Workloads {
    fn uids(&self) -> Vec<WorkloadUid> {
        lock(&self.served).keys().cloned().collect()
    }

    fn entry(&self, uid: &WorkloadUid) -> Option<Entry> {
        lock(&self.served).get(uid).cloned().map(Entry::Workload)
    }

    /// An empty netns of its own: whoever listens there is this ztunnel (`dataplane.md`).
    async fn introduce(&self, introduction: &mut Introduction<'_>) -> Result<(), BoxError> {
        let dataplane = Arc::clone(&self.dataplane);
        let introduced = tokio::task::spawn_blocking(move || dataplane.introduce()).await??;
        let connection = introduction.connection();
        introduction.add(&own_workload(connection, &introduced)?).await?;
        if !introduced.is_known()? {
            return Err(
                "it acknowledged the introduction and listens nowhere: is its process in a cgroup below \
                        the one that Culvert follows (--host-cgroup)?"
                    .into(),
            );
        }
        lock(&self.introduced).insert(connection, introduced);
        Ok(())
    }

    fn ended(&self, connection: ConnectionId) {
        lock(&self.introduced).remove(&connection);
    }

    fn event(&self, event: Event<'_>) {
        self.metrics.zds(&event);
    }
}

fn own_workload(connection: ConnectionId, introduced: &Introduced) -> io::Result<Workload> {
    let name = format!("introduction-{connection}");
    Ok(Workload {
        uid: name.as_str().into(),
        info: WorkloadInfo { name, namespace: OWN.to_owned(), service_account: OWN.to_owned() },
        netns: Arc::new(introduced.netns().as_fd().try_clone_to_owned()?),
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
