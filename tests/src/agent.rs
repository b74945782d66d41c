//! The lab's part of the agent: hands pods to the dataplane and to ztunnel.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use culvert_dataplane::{Dataplane, Introduction as Introduced, Netns};
use culvert_zds::{
    BoxError, Config, ConnectionId, Entry, Event, Introduction, Owner, Server, Workload, WorkloadInfo,
    WorkloadUid, Ztunnels,
};
use tokio::{
    runtime::Handle,
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

use crate::journal::{DEADLINE, Journal};

/// What the ZDS server noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A connection was closed before it counted.
    Rejected {
        /// Which.
        connection: ConnectionId,
        /// Why.
        cause: String,
    },
    /// A ztunnel was introduced.
    Connected(ConnectionId),
    /// It acked the end of the snapshot.
    SnapshotSent(ConnectionId),
    /// It does not serve a workload of the snapshot.
    Refused {
        /// Who.
        connection: ConnectionId,
        /// Which workload.
        uid: String,
        /// Its words.
        error: String,
    },
    /// It is gone.
    Disconnected(ConnectionId),
}

pub(crate) struct Agent {
    /// `None` in a lab whose pods are captured by others.
    dataplane: Mutex<Option<Arc<Dataplane>>>,
    workloads: Mutex<BTreeMap<WorkloadUid, Workload>>,
    introduced: Mutex<HashMap<ConnectionId, Introduced>>,
    notes: Journal<Note>,
    ztunnels: Ztunnels,
    runtime: Handle,
    shutdown: CancellationToken,
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("workloads", &self.workloads).finish_non_exhaustive()
    }
}

impl Agent {
    /// Serves ZDS at `socket`, beginning with `workloads`.
    pub(crate) fn start(
        socket: &Path,
        dataplane: Option<Dataplane>,
        workloads: impl IntoIterator<Item = Workload>,
        runtime: &Handle,
    ) -> Arc<Self> {
        let config = Config {
            // Rollouts and restarts are what the lab is for.
            accept_interval: Duration::ZERO,
            ..Config::new(socket)
        };
        let server = {
            let _context = runtime.enter();
            Server::bind(config).expect("ZDS server")
        };
        let agent = Arc::new(Self {
            dataplane: Mutex::new(dataplane.map(Arc::new)),
            workloads: Mutex::new(
                workloads.into_iter().map(|workload| (workload.uid.clone(), workload)).collect(),
            ),
            introduced: Mutex::default(),
            notes: Journal::default(),
            ztunnels: server.ztunnels(),
            runtime: runtime.clone(),
            shutdown: CancellationToken::new(),
        });
        runtime.spawn(server.run(Arc::clone(&agent), agent.shutdown.clone()));
        agent
    }

    pub(crate) fn notes(&self) -> &Journal<Note> {
        &self.notes
    }

    pub(crate) fn dataplane(&self) -> Option<Arc<Dataplane>> {
        lock(&self.dataplane).clone()
    }

    /// Puts another in place of the dataplane, which `start` makes once the old one is gone.
    pub(crate) fn replace_dataplane(&self, start: impl FnOnce() -> Dataplane) {
        let mut dataplane = lock(&self.dataplane);
        if let Some(old) = dataplane.take() {
            let introduced = std::mem::take(&mut *lock(&self.introduced));
            drop(introduced);
            assert!(Arc::into_inner(old).is_some(), "somebody still uses the old dataplane");
        }
        *dataplane = Some(Arc::new(start()));
    }

    /// Hands the pod to ztunnel and waits for its ack.
    pub(crate) fn add(&self, workload: Workload) -> Result<(), culvert_zds::Error> {
        lock(&self.workloads).insert(workload.uid.clone(), workload.clone());
        let deadline = Instant::now() + DEADLINE;
        let added = self.runtime.block_on(async { self.ztunnels.add(&workload, deadline).await });
        added.map(|_acked| ())
    }

    /// Takes the pod from ztunnel.
    pub(crate) fn del(&self, name: &str) -> Result<(), culvert_zds::Error> {
        let uid = name.into();
        lock(&self.workloads).remove(&uid);
        self.runtime.block_on(self.ztunnels.del(&uid))
    }

    /// Ends every ZDS connection.
    pub(crate) fn stop(&self) {
        self.shutdown.cancel();
    }
}

impl Owner for Agent {
    fn uids(&self) -> Vec<WorkloadUid> {
        lock(&self.workloads).keys().cloned().collect()
    }

    fn entry(&self, uid: &WorkloadUid) -> Option<Entry> {
        lock(&self.workloads).get(uid).cloned().map(Entry::Workload)
    }

    async fn introduce(&self, introduction: &mut Introduction<'_>) -> Result<(), BoxError> {
        let Some(dataplane) = self.dataplane() else {
            return Ok(());
        };
        let introduced = tokio::task::block_in_place(|| dataplane.introduce())?;
        let connection = introduction.connection();
        let name = format!("introduction-{connection}");
        let info = WorkloadInfo {
            name: name.clone(),
            namespace: "culvert".to_owned(),
            service_account: "culvert".to_owned(),
        };
        introduction.add(&workload(&name, introduced.netns(), info)?).await?;
        lock(&self.introduced).insert(connection, introduced);
        Ok(())
    }

    fn ended(&self, connection: ConnectionId) {
        lock(&self.introduced).remove(&connection);
    }

    fn event(&self, event: Event<'_>) {
        self.notes.push(match event {
            Event::Rejected { connection, cause } => {
                Note::Rejected { connection, cause: format!("{cause}: {cause:?}") }
            }
            Event::Connected { connection, .. } => Note::Connected(connection),
            Event::SnapshotSent { connection, .. } => Note::SnapshotSent(connection),
            Event::Refused { connection, uid, error, .. } => {
                Note::Refused { connection, uid: uid.to_string(), error: error.to_string() }
            }
            Event::Disconnected { connection, .. } => Note::Disconnected(connection),
            _ => return,
        });
    }
}

/// The netns by a descriptor of its own.
pub(crate) fn workload(name: &str, netns: &Netns, info: WorkloadInfo) -> io::Result<Workload> {
    let netns: OwnedFd = netns.as_fd().try_clone_to_owned()?;
    Ok(Workload { uid: name.into(), info, netns: Arc::new(netns) })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
