//! Brings enrollment in line with what the pods' descriptions say.
//!
//! ```text
//! described (membership) ─┐
//!                         ├─► one pass: who differs? ─► one operation a pod, some pods at a time
//! enrolled (enroll)      ─┘         ▲                                   │
//!                                   └── change · end of an operation ◄──┘
//! ```
//!
//! Level-triggered: a pass looks at the whole state, so events may be lost, repeated or reordered, and the
//! last state wins. A pod that fails is tried again with a backoff of its own, at once if its description
//! changes or a ztunnel connects. Only a description takes a pod out: one that nothing is known of any more
//! stays captured (`lifecycle.md` §6).

mod failing;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{Semaphore, watch},
    task::{Id, JoinError, JoinSet},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    discover::{Found, Wanted},
    enroll::{Add, Attachment, Enrollment, Failure, NetnsId, Pod, Redirect, Ztunnel},
    error_chain::Chain,
    membership::{Decision, Described, Membership, Named, Redirection},
    metrics::Metrics,
    record::{Phase, Record},
};
use failing::Failing;

/// Operations under way at the same time.
const PARALLEL: usize = 16;
/// For one enrollment, a start of ztunnel included.
const DEADLINE: Duration = Duration::from_secs(20);
/// Between passes at least: changes come in bursts.
const PAUSE: Duration = Duration::from_millis(10);
/// Between passes at most.
const RESYNC: Duration = Duration::from_secs(30);
/// Between looks whether an ended pod has processes left.
const ENDED: Duration = Duration::from_secs(5);
/// A failure of a pod is reported if it is at least the second in a row: the first may be a race with the
/// runtime.
const REPORTED: u32 = 2;

/// See the module.
pub struct Reconciler<R: Redirect, Z, M> {
    /// Does the work.
    pub enrollment: Arc<Enrollment<R, Z>>,
    /// Describes pods.
    pub membership: Arc<M>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// The host's netns, which no pod is found in.
    pub host: Option<NetnsId>,
}

/// What is done to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Enroll,
    Update,
    Withdraw,
    /// Withdraw if no process is left.
    End,
}

impl Operation {
    const fn name(self) -> &'static str {
        match self {
            Self::Enroll => "enroll",
            Self::Update => "update",
            Self::Withdraw => "withdraw",
            Self::End => "end",
        }
    }
}

/// An operation under way.
#[derive(Clone)]
struct Job {
    operation: Operation,
    pod: Pod,
    described: Option<Described>,
}

type Outcome = Result<bool, Failure>;

/// What one pass leaves to the next.
struct State {
    busy: HashMap<Id, Job>,
    jobs: JoinSet<Outcome>,
    turns: Arc<Semaphore>,
    failing: HashMap<String, Failing>,
    /// When an ended pod is looked at again.
    ended: HashMap<String, Instant>,
}

/// How pods stand, for the metric.
type Counts = BTreeMap<(&'static str, &'static str), i64>;

impl<R: Redirect, Z: Ztunnel, M: Membership> Reconciler<R, Z, M> {
    /// Runs until membership ends. `ztunnels` changes when one connects.
    pub async fn run<T: Send + Sync>(self, mut ztunnels: watch::Receiver<T>) {
        let mut changes = self.membership.changes();
        let mut state = State {
            busy: HashMap::new(),
            jobs: JoinSet::new(),
            turns: Arc::new(Semaphore::new(PARALLEL)),
            failing: HashMap::new(),
            ended: HashMap::new(),
        };
        let mut has_ztunnels = true;
        loop {
            let next = self.pass(&mut state).await;
            sleep(PAUSE).await;
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                changed = ztunnels.changed(), if has_ztunnels => {
                    has_ztunnels = changed.is_ok();
                    state.failing.values_mut().for_each(Failing::ztunnel_changed);
                }
                Some(ended) = state.jobs.join_next_with_id() => self.ended(ended, &mut state),
                () = sleep_until(next) => {}
            }
            while let Some(ended) = state.jobs.try_join_next_with_id() {
                self.ended(ended, &mut state);
            }
        }
    }

    /// One look at everything; when the next one is due without a change.
    async fn pass(&self, state: &mut State) -> Instant {
        let described = self.membership.described();
        let mut enrolled: HashMap<String, Record> = HashMap::new();
        for record in self.enrollment.dump().into_iter().filter(|record| record.phase == Phase::Enrolled) {
            enrolled.insert(record.pod.uid.clone(), record);
        }
        let busy: HashSet<String> = state.busy.values().map(|job| job.pod.uid.clone()).collect();
        let known: HashSet<&str> = described.iter().map(|pod| pod.pod.uid.as_str()).collect();
        state.failing.retain(|uid, _| known.contains(uid.as_str()));
        state.ended.retain(|uid, _| known.contains(uid.as_str()));
        drop(known);
        let mut counts = Counts::new();
        let mut next = Instant::now() + RESYNC;
        let mut missing = Vec::new();
        for pod in described {
            let record = enrolled.remove(&pod.pod.uid);
            let standing = if busy.contains(&pod.pod.uid) {
                ("busy", "")
            } else {
                self.compare(pod, record, state, &mut missing, &mut next)
            };
            *counts.entry(standing).or_default() += 1;
        }
        for record in enrolled.into_values().filter(|record| !busy.contains(&record.pod.uid)) {
            self.undescribed(record, state).await;
            *counts.entry(("enrolled", "not described")).or_default() += 1;
        }
        self.metrics.set_pods(&counts);
        if !missing.is_empty() {
            self.find(missing, state).await;
        }
        for failing in state.failing.values() {
            next = next.min(failing.again());
        }
        next
    }

    /// How the pod stands; begins what has to be done, or leaves it to be found.
    fn compare(
        &self,
        pod: Described,
        record: Option<Record>,
        state: &mut State,
        missing: &mut Vec<Described>,
        next: &mut Instant,
    ) -> (&'static str, &'static str) {
        let announce = |redirection| self.membership.announce(&pod.pod, redirection);
        match (pod.member, record) {
            (None, _) => ("waiting", "namespace"),
            (Some(false), Some(_)) => {
                self.begin(Operation::Withdraw, pod, None, state);
                ("leaving", "")
            }
            (Some(false), None) => {
                announce(Redirection::Absent);
                state.failing.remove(&pod.pod.uid);
                ("outside", "")
            }
            (Some(true), Some(record)) => {
                if pod.has_ended {
                    let now = Instant::now();
                    let due = *state.ended.entry(pod.pod.uid.clone()).or_insert(now);
                    if due <= now {
                        state.ended.insert(pod.pod.uid.clone(), now + ENDED);
                        self.begin(Operation::End, pod, None, state);
                    }
                    *next = (*next).min(now + ENDED);
                    return ("ended", "enrolled");
                }
                announce(Redirection::Enabled);
                let is_same =
                    pod.addresses.is_subset(&record.addresses) && pod.bypass_inbound == record.bypass_inbound;
                let is_due = state.failing.get(&pod.pod.uid).is_none_or(|failing| failing.is_due(&pod));
                if is_same {
                    state.failing.remove(&pod.pod.uid);
                } else if is_due {
                    self.begin(Operation::Update, pod, None, state);
                }
                ("enrolled", "")
            }
            (Some(true), None) if pod.has_ended => {
                announce(Redirection::Absent);
                ("ended", "")
            }
            (Some(true), None) if pod.addresses.is_empty() => ("waiting", "address"),
            (Some(true), None) if self.is_starting(&pod) => ("starting", ""),
            (Some(true), None) => match state.failing.get(&pod.pod.uid) {
                Some(failing) if !failing.is_due(&pod) => {
                    announce(Redirection::Pending);
                    ("failing", failing.reason())
                }
                failing => {
                    let standing = failing.map_or(("busy", ""), |failing| ("failing", failing.reason()));
                    missing.push(pod);
                    standing
                }
            },
        }
    }

    fn is_starting(&self, pod: &Described) -> bool {
        self.enrollment.is_starting(&pod.pod.uid)
            || pod.hash.as_ref().is_some_and(|hash| self.enrollment.is_starting(hash))
    }

    /// An enrolled pod that is not described one by one: only a decision takes it out.
    async fn undescribed(&self, record: Record, state: &mut State) {
        let Pod { uid, namespace, name, .. } = record.pod.clone();
        let named = Named { namespace, name, uid: Some(uid) };
        if let Ok(Decision::Outside) = self.membership.decide(&named, Instant::now()).await {
            let job = Job { operation: Operation::Withdraw, pod: record.pod, described: None };
            self.spawn(job, None, state);
        }
    }

    /// One look through `/proc` for all that are missing.
    async fn find(&self, missing: Vec<Described>, state: &mut State) {
        let wanted = missing.iter().map(|pod| Wanted {
            uid: pod.pod.uid.clone(),
            hash: pod.hash.clone(),
            addresses: pod.addresses.clone(),
        });
        let scanned = self.enrollment.discover(self.host, wanted.collect()).await;
        match scanned {
            Ok(mut found) => {
                for pod in missing {
                    match found.remove(&pod.pod.uid) {
                        Some(Ok(found)) => self.begin(Operation::Enroll, pod, Some(found), state),
                        Some(Err(unfound)) => {
                            self.failed(
                                Operation::Enroll,
                                &pod.pod.clone(),
                                Some(pod),
                                unfound.into(),
                                state,
                            );
                        }
                        None => {}
                    }
                }
            }
            Err(failure) => {
                let again = |failure: &Failure| match failure {
                    Failure::Discovery(error) => Failure::Discovery(Arc::clone(error)),
                    other => Failure::Panicked { step: other.step() },
                };
                for pod in missing {
                    self.failed(Operation::Enroll, &pod.pod.clone(), Some(pod), again(&failure), state);
                }
            }
        }
    }

    fn begin(&self, operation: Operation, pod: Described, found: Option<Found>, state: &mut State) {
        self.spawn(Job { operation, pod: pod.pod.clone(), described: Some(pod) }, found, state);
    }

    fn spawn(&self, job: Job, found: Option<Found>, state: &mut State) {
        let (enrollment, turns) = (Arc::clone(&self.enrollment), Arc::clone(&state.turns));
        let Job { operation, pod, described } = job.clone();
        let task = state.jobs.spawn(async move {
            let _turn = turns.acquire_owned().await;
            let deadline = Instant::now() + DEADLINE;
            match (operation, described, found) {
                (Operation::Enroll, Some(described), Some(found)) => {
                    enrollment.add_running(add(described, found), deadline).await?;
                }
                (Operation::Update, Some(Described { addresses, bypass_inbound, .. }), _) => {
                    enrollment.update(&pod.uid, addresses, bypass_inbound, deadline).await?;
                }
                (Operation::End, ..) if !enrollment.has_no_process(&pod.uid).await => return Ok(false),
                _ => enrollment.withdraw(&pod.uid).await,
            }
            Ok(true)
        });
        state.busy.insert(task.id(), job);
    }

    /// An operation ended. What follows from it is up to the next pass.
    fn ended(&self, ended: Result<(Id, Outcome), JoinError>, state: &mut State) {
        let (id, outcome) = match ended {
            Ok((id, outcome)) => (id, outcome),
            Err(panic) => (panic.id(), Err(Failure::Panicked { step: crate::enroll::Step::Turn })),
        };
        let Some(Job { operation, pod, described }) = state.busy.remove(&id) else {
            return;
        };
        match outcome {
            Ok(true) => {
                self.metrics.reconciled(operation.name(), "success");
                state.failing.remove(&pod.uid);
                if matches!(operation, Operation::Withdraw | Operation::End) {
                    self.membership.announce(&pod, Redirection::Absent);
                }
            }
            Ok(false) => {}
            Err(failure) => self.failed(operation, &pod, described, failure, state),
        }
    }

    fn failed(
        &self,
        operation: Operation,
        pod: &Pod,
        described: Option<Described>,
        failure: Failure,
        state: &mut State,
    ) {
        let reason = failure.step().name();
        self.metrics.reconciled(operation.name(), reason);
        if operation == Operation::Enroll {
            self.membership.announce(pod, Redirection::Pending);
        }
        let failing = state.failing.entry(pod.uid.clone()).or_default();
        let is_new = failing.failed(reason, described);
        let error = Chain(&failure).to_string();
        let operation = operation.name();
        if is_new {
            tracing::warn!(%pod, uid = pod.uid, operation, error, "a running pod is not in the mesh yet; trying again");
        } else {
            tracing::debug!(%pod, uid = pod.uid, operation, error, "a running pod is still not in the mesh");
        }
        if failing.failures() >= REPORTED {
            self.membership.report(pod, &failure);
        }
    }
}

fn add(described: Described, found: Found) -> Add {
    Add {
        pod: described.pod,
        netns: found.path,
        netns_id: Some(found.id),
        addresses: described.addresses,
        bypass_inbound: described.bypass_inbound,
        attachment: Attachment { container_id: found.container, ..Attachment::default() },
    }
}
