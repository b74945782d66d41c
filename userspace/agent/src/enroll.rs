//! The only owner of pod state: who is in the mesh on this node, and the way in and out.
//!
//! ```text
//! ADD  turn ► netns ► register ► ztunnel's ack ► attach ► self-test ► record ► reply
//! DEL  turn ► capture off ► ztunnel del ► netns as before ► record removed
//! ```
//!
//! A sandbox (one netns) is what is captured; a pod uid may have several, the newest is the one that
//! ztunnel serves. Operations on one pod take turns, pods run in parallel. An ADD that fails, or whose
//! caller goes away, undoes all it did; the work goes on in a task of its own, so a dropped call leaves
//! nothing half done.

mod attachment;
mod check;
mod failure;
mod order;
mod path;
mod reap;
mod redirect;
mod restart;
mod running;
mod sandbox;
mod steps;
mod table;
mod ztunnel;

#[cfg(test)]
pub(crate) mod fakes;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use culvert_cni::answer::StepTime;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use attachment::Attachment;
pub use check::Captured;
pub use failure::{Failure, Step};
pub use path::HostPaths;
pub use redirect::Redirect;
pub use sandbox::{NetnsId, Pod, Sandbox};
pub use steps::StepTimes;
pub use ztunnel::Ztunnel;

use crate::{
    error_chain::Chain,
    metrics::Metrics,
    record::{Phase, Record, Records},
};
use order::Order;
use steps::Progress;
use table::{Detached, Pending, State, Table};

/// After its deadline an ADD is answered at the latest after this, though its undoing may go on.
const GRACE: Duration = Duration::from_millis(500);

/// How long the answer of an ADD that failed waits for its undoing, which a ztunnel may delay that lets go
/// of nothing.
const UNDOING: Duration = Duration::from_millis(300);

/// A pod that is about to start.
#[derive(Clone, Debug)]
pub struct Add {
    /// Who it is.
    pub pod: Pod,
    /// Its netns in the runtime's view.
    pub netns: PathBuf,
    /// What the path names in the runtime's view, if it was told.
    pub netns_id: Option<NetnsId>,
    /// What the plugins before have assigned. If there is nothing, the netns is asked.
    pub addresses: BTreeSet<IpAddr>,
    /// What the pod asks for.
    pub bypass_inbound: bool,
    /// Who asks.
    pub attachment: Attachment,
}

/// What a removal found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// No such attachment.
    Unknown,
    /// It is gone, or will be.
    Removed,
}

/// See the module.
pub struct Enrollment<R: Redirect, Z> {
    redirect: Arc<R>,
    ztunnel: Arc<Z>,
    records: Records,
    paths: HostPaths,
    metrics: Arc<Metrics>,
    /// How long ztunnel has for a request that nobody waits for.
    patience: Duration,
    table: Mutex<Table<R::Netns>>,
    order: Order<String>,
    tasks: TaskTracker,
}

impl<R: Redirect, Z: Ztunnel> Enrollment<R, Z> {
    /// Knows no pod yet.
    pub fn new(
        redirect: Arc<R>,
        ztunnel: Arc<Z>,
        records: Records,
        paths: HostPaths,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            redirect,
            ztunnel,
            records,
            paths,
            metrics,
            patience: Duration::from_secs(5),
            table: Mutex::default(),
            order: Order::default(),
            tasks: TaskTracker::new(),
        })
    }

    /// Takes a pod into the mesh. On `Ok` it is captured and served; otherwise nothing is left, or is
    /// about to be. Answers at most [`GRACE`] after `deadline`, with the time of each step. A dropped call is undone.
    pub async fn add(self: &Arc<Self>, add: Add, deadline: Instant) -> Result<StepTimes, Failure> {
        let progress = Progress::new(deadline, CancellationToken::new());
        let _cancel_on_drop = progress.cancel.clone().drop_guard();
        let task = self.tasks.spawn({
            let (this, progress) = (Arc::clone(self), progress.clone());
            async move { this.add_in_turn(add, &progress).await }
        });
        match timeout_at(deadline + GRACE, task).await {
            Ok(Ok(result)) => result.map(|()| progress.times()),
            Ok(Err(_panic)) => Err(Failure::Panicked { step: progress.step() }),
            Err(tokio::time::error::Elapsed { .. }) => Err(Failure::Deadline { step: progress.step() }),
        }
    }

    async fn add_in_turn(self: &Arc<Self>, add: Add, progress: &Progress) -> Result<(), Failure> {
        let pod = add.pod.clone();
        let pending = Pending {
            uid: pod.uid.clone(),
            attachment: add.attachment.clone(),
            cancel: progress.cancel.clone(),
        };
        let number = self.table().begin(pending);
        let result = self.add_counted(add, progress).await;
        self.table().end(number);
        self.metrics.add_finished(&progress.times(), result.as_ref().err());
        self.metrics.set_sandboxes(self.count(State::Enrolled), self.count(State::Leaving));
        let times: Vec<_> = progress
            .times()
            .iter()
            .map(|(step, time)| StepTime::new(step.name(), *time).to_string())
            .collect();
        let times = times.join(", ");
        match &result {
            Ok(()) => tracing::info!(%pod, uid = pod.uid, times, "pod enrolled"),
            Err(error @ Failure::Cancelled { .. }) => {
                tracing::info!(%pod, uid = pod.uid, times, error = %Chain(error), "pod not enrolled");
            }
            Err(error) => {
                tracing::error!(%pod, uid = pod.uid, times, error = %Chain(error), "pod not enrolled")
            }
        }
        result
    }

    async fn add_counted(self: &Arc<Self>, add: Add, progress: &Progress) -> Result<(), Failure> {
        let turn =
            progress.run(Step::Turn, progress.wait(Step::Turn, self.order.enter(&add.pod.uid))).await?;
        let pod = add.pod.clone();
        let sandbox = progress.run(Step::Netns, self.open(add)).await?;
        let sandbox = Arc::new(sandbox);
        // One that is captured without being recorded lost its record: a failing ADD does not let it out.
        let is_known = self.table().enrolled(sandbox.cookie).is_some()
            || self
                .blocking(Step::Netns, &sandbox, |this, sandbox| {
                    this.redirect.is_active(&sandbox.netns).map_err(Failure::Attach)
                })
                .await?;
        let mut result = self.steps(&sandbox, is_known, progress).await;
        if result.is_ok() && progress.cancel.is_cancelled() {
            result = Err(Failure::Cancelled { step: progress.step() });
        }
        match result {
            Ok(()) => {
                self.table().enroll(Sandbox::clone(&sandbox));
                Ok(())
            }
            Err(failure) => {
                // A sandbox that was in the mesh before stays so: this ADD was not the one that took it in.
                if !is_known {
                    let undone = self.tasks.spawn({
                        let this = Arc::clone(self);
                        async move {
                            let _turn = turn;
                            this.take_out(&sandbox).await;
                        }
                    });
                    if timeout(UNDOING, undone).await.is_err() {
                        tracing::debug!(%pod, uid = pod.uid, "the undoing of an ADD goes on after its answer");
                    }
                }
                Err(failure)
            }
        }
    }

    /// Opens the netns; what an earlier ADD of the same sandbox told is kept.
    async fn open(self: &Arc<Self>, add: Add) -> Result<Sandbox<R::Netns>, Failure> {
        let this = Arc::clone(self);
        let open = move || {
            let path = this.paths.of_netns(&add.netns);
            let netns = this.redirect.open(&path).map_err(Failure::Netns)?;
            let mut addresses = add.addresses;
            if addresses.is_empty() {
                addresses = this.redirect.addresses(&netns).map_err(Failure::Netns)?.into_iter().collect();
            }
            let system =
                |source| culvert_dataplane::Error::System { call: "fstat or dup of the netns", source };
            let mut sandbox =
                Sandbox::new::<R>(add.pod, path, netns).map_err(system).map_err(Failure::Netns)?;
            if let Some(expected) = add.netns_id.filter(|expected| *expected != sandbox.id) {
                return Err(Failure::AnotherNetns { path: sandbox.path, expected, found: sandbox.id });
            }
            sandbox.addresses = addresses;
            sandbox.bypass_inbound = add.bypass_inbound;
            sandbox.attachments.insert(add.attachment);
            if let Some(known) = this.table().enrolled(sandbox.cookie) {
                sandbox.addresses.extend(&known.addresses);
                sandbox.attachments.extend(known.attachments.iter().cloned());
                sandbox.netns = Arc::clone(&known.netns);
                sandbox.descriptor = Arc::clone(&known.descriptor);
            }
            Ok(sandbox)
        };
        tokio::task::spawn_blocking(open).await.unwrap_or(Err(Failure::Panicked { step: Step::Netns }))
    }

    /// Takes attachments out of the mesh, and their sandbox with the last of them. An ADD of them that
    /// is under way is cancelled and undone. Dropping the call does not stop it.
    pub async fn del(self: &Arc<Self>, named: Attachment) -> Removal {
        let mut uids: BTreeSet<String> = {
            let table = self.table();
            let uids = table.covered(&named).map(|sandbox| sandbox.pod.uid.clone());
            uids.chain(table.cancel(&named)).collect()
        };
        if uids.is_empty() {
            return Removal::Unknown;
        }
        let this = Arc::clone(self);
        let task = self.tasks.spawn(async move {
            while let Some(uid) = uids.pop_first() {
                let _turn = this.order.enter(&uid).await;
                this.detach(&named, &uid).await;
            }
        });
        if let Err(error) = task.await {
            tracing::error!(%error, "the removal of an attachment panicked");
        }
        Removal::Removed
    }

    /// In turn.
    async fn detach(self: &Arc<Self>, named: &Attachment, uid: &str) {
        let cookies: Vec<u64> = {
            let table = self.table();
            let own = table.covered(named).filter(|sandbox| sandbox.pod.uid == uid);
            own.map(|sandbox| sandbox.cookie).collect()
        };
        for cookie in cookies {
            let detached = self.table().detach(cookie, named);
            match detached {
                Detached::Nothing => {}
                Detached::OneOfMany(sandbox) => {
                    let sandbox = Arc::new(sandbox);
                    let written = self.blocking(Step::Record, &sandbox, |this, sandbox| {
                        Ok(this.records.write(&sandbox.record(Phase::Enrolled))?)
                    });
                    if let Err(error) = written.await {
                        sandbox.warn("cannot record that an attachment is gone", &error);
                    }
                }
                Detached::Last(sandbox) => {
                    self.table().set_removed(cookie);
                    let sandbox = Arc::new(sandbox);
                    self.take_out(&sandbox).await;
                    tracing::info!(pod = %sandbox.pod, uid, netns = cookie, attachment = %named, "pod left the mesh");
                }
            }
        }
        self.metrics.set_sandboxes(self.count(State::Enrolled), self.count(State::Leaving));
    }

    /// Removes the attachments of one network that are not in the runtime's list.
    pub async fn retain(self: &Arc<Self>, network: &str, valid: BTreeSet<(String, String)>) {
        let stale: Vec<Attachment> = {
            let table = self.table();
            let attachments = table.in_state(State::Enrolled).flat_map(|sandbox| &sandbox.attachments);
            let stale = attachments.filter(|attachment| {
                attachment.network.as_deref() == Some(network)
                    && matches!(attachment, Attachment { container_id: Some(container), if_name: Some(interface), .. }
                        if !valid.contains(&(container.clone(), interface.clone())))
            });
            stale.cloned().collect()
        };
        for attachment in stale {
            tracing::info!(%attachment, "the runtime's garbage collection does not know an attachment");
            self.del(attachment).await;
        }
    }

    /// The way to ztunnel.
    pub fn ztunnel(&self) -> &Z {
        &self.ztunnel
    }

    /// How many sandboxes are in the mesh.
    pub fn enrolled(&self) -> usize {
        self.count(State::Enrolled)
    }

    /// Every sandbox, as it is recorded, the oldest first.
    pub fn dump(&self) -> Vec<Record> {
        let table = self.table();
        let enrolled = table.in_state(State::Enrolled).map(|sandbox| sandbox.record(Phase::Enrolled));
        let leaving = table.in_state(State::Leaving).map(|sandbox| sandbox.record(Phase::Leaving));
        let mut records: Vec<_> = enrolled.chain(leaving).collect();
        records.sort_by_key(|record| (record.since, record.cookie));
        records
    }

    /// Waits for what is under way. Call it when nothing new can come.
    pub async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn count(&self, state: State) -> usize {
        self.table().in_state(state).count()
    }

    /// Never held across a wait.
    fn table(&self) -> MutexGuard<'_, Table<R::Netns>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
