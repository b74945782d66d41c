//! The steps of an ADD, what each took, and how the whole is undone.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use culvert_dataplane::Restored;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Enrollment, Failure, Redirect, Step, Ztunnel, sandbox::Sandbox};
use crate::{error_chain::Chain, record::Phase};

/// How long the probes of an ADD may wait for an answer. An IPv6 address that was assigned a moment ago can be used
/// before the kernel routes to it: that waits for linkwatch, up to a second (`net/core/link_watch.c`).
const ADD_PROBE: Duration = Duration::from_secs(3);

/// What the steps of an ADD took, in order.
pub type StepTimes = Vec<(Step, Duration)>;

/// What one ADD has to keep to, and how far it is. Clones are the same ADD.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    pub(super) deadline: Instant,
    /// The runtime went away, or a DEL asks for the removal.
    pub(super) cancel: CancellationToken,
    step: Arc<AtomicU8>,
    times: Arc<Mutex<StepTimes>>,
}

impl Progress {
    pub(super) fn new(deadline: Instant, cancel: CancellationToken) -> Self {
        let step = Arc::new(AtomicU8::new(Step::Turn as u8));
        Self { deadline, cancel, step, times: Arc::default() }
    }

    /// The step that is under way.
    pub(super) fn step(&self) -> Step {
        let number = self.step.load(Ordering::Relaxed);
        Step::ALL.get(usize::from(number)).copied().unwrap_or(Step::Turn)
    }

    /// Runs a step unless the ADD is over, and takes its time. The step itself is not cut short: what it
    /// did in the kernel has to be known to be undone.
    pub(super) async fn run<T>(
        &self,
        step: Step,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.step.store(step as u8, Ordering::Relaxed);
        if self.cancel.is_cancelled() {
            return Err(Failure::Cancelled { step });
        }
        if Instant::now() >= self.deadline {
            return Err(Failure::Deadline { step });
        }
        let start = Instant::now();
        let result = work.await;
        self.times.lock().unwrap_or_else(PoisonError::into_inner).push((step, start.elapsed()));
        result
    }

    /// Waits for something that may be given up at any moment.
    pub(super) async fn wait<T>(&self, step: Step, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(Failure::Cancelled { step }),
            result = tokio::time::timeout_at(self.deadline, work) => {
                result.map_err(|tokio::time::error::Elapsed { .. }| Failure::Deadline { step })
            }
        }
    }

    pub(super) fn times(&self) -> StepTimes {
        self.times.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<R: Redirect, Z: Ztunnel> Enrollment<R, Z> {
    /// All steps from an open netns to a recorded pod. Repeating them is harmless.
    pub(super) async fn steps(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox<R::Netns>>,
        is_known: bool,
        progress: &Progress,
    ) -> Result<(), Failure> {
        progress
            .run(Step::Register, async {
                self.blocking(Step::Register, sandbox, move |this, sandbox| {
                    if !is_known {
                        this.records.write(&sandbox.record(Phase::Enrolling))?;
                    }
                    this.redirect.register(&sandbox.netns, &sandbox.addresses(), sandbox.options()).map_err(
                        |error| match error {
                            culvert_dataplane::Error::HostNetns { .. } => {
                                Failure::HostNetns { path: sandbox.path.clone() }
                            }
                            error => Failure::Attach(error),
                        },
                    )
                })
                .await
            })
            .await?;
        progress
            .run(Step::Ztunnel, async {
                let start = Instant::now();
                let add = self.ztunnel.add(sandbox.workload(), progress.deadline);
                let added = tokio::select! {
                    biased;
                    () = progress.cancel.cancelled() => return Err(Failure::Cancelled { step: Step::Ztunnel }),
                    added = add => added,
                };
                match added {
                    Ok(()) => Ok(()),
                    Err(source) => Err(self.why_refused(sandbox, start.elapsed(), source).await),
                }
            })
            .await?;
        progress
            .run(Step::Attach, async {
                self.blocking(Step::Attach, sandbox, |this, sandbox| {
                    this.redirect.check_listeners(&sandbox.netns).map_err(Failure::Attach)?;
                    this.redirect.activate(&sandbox.netns).map_err(Failure::Attach)
                })
                .await
            })
            .await?;
        progress
            .run(Step::SelfTest, async {
                self.blocking(Step::SelfTest, sandbox, |this, sandbox| {
                    Ok(this.redirect.self_test(&sandbox.netns, &sandbox.addresses(), ADD_PROBE)?)
                })
                .await
            })
            .await?;
        progress
            .run(Step::Record, async {
                self.blocking(Step::Record, sandbox, |this, sandbox| {
                    Ok(this.records.write(&sandbox.record(Phase::Enrolled))?)
                })
                .await
            })
            .await
    }

    /// Somebody who listens on a port of ztunnel's makes its bind(2) fail, and it does not say where.
    async fn why_refused(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox<R::Netns>>,
        waited: Duration,
        source: culvert_zds::Error,
    ) -> Failure {
        if matches!(source, culvert_zds::Error::Nacked { .. }) {
            let checked = self.blocking(Step::Attach, sandbox, |this, sandbox| {
                this.redirect.check_listeners(&sandbox.netns).map_err(Failure::Attach)
            });
            if let Err(reason @ Failure::Attach(culvert_dataplane::Error::ForeignListener { .. })) =
                checked.await
            {
                return reason;
            }
        }
        Failure::Ztunnel { waited, source }
    }

    /// Takes a sandbox out of the mesh, as far as it had come in: capture ends, ztunnel closes its
    /// listeners or turns to the sandbox that is current now, routing goes back. What cannot be finished
    /// stays in the table and is tried again by [`reap`](Self::reap). Never cut short.
    pub(super) async fn take_out(self: &Arc<Self>, sandbox: &Arc<Sandbox<R::Netns>>) {
        self.table().leave(Sandbox::clone(sandbox));
        let withdrawn = self
            .blocking(Step::Attach, sandbox, |this, sandbox| {
                if let Err(error) = this.records.write(&sandbox.record(Phase::Leaving)) {
                    // Nobody finishes this for us if we die now, and nobody may serve it again.
                    sandbox.warn("cannot record that a pod leaves", &error);
                    this.records.remove(sandbox.cookie)?;
                }
                this.redirect.withdraw(&sandbox.netns).map_err(Failure::Attach)
            })
            .await;
        if let Err(error) = withdrawn {
            sandbox.warn("cannot end a pod's capture yet", &error);
        }
        let uid = &sandbox.pod.uid;
        let current = self.table().current(uid).map(Sandbox::workload);
        let told = match current {
            Some(current) => self.ztunnel.add(current, Instant::now() + self.patience).await,
            None => self.ztunnel.del(&sandbox.pod.workload_uid()).await,
        };
        if let Err(error) = told {
            sandbox.warn("ztunnel did not take the removal of a pod", &error);
        }
        self.finish(sandbox).await;
    }

    /// The last part of [`take_out`](Self::take_out): whether nothing is left of the sandbox.
    pub(super) async fn finish(self: &Arc<Self>, sandbox: &Arc<Sandbox<R::Netns>>) -> bool {
        let restored = self
            .blocking(Step::Attach, sandbox, |this, sandbox| {
                let is_restored = match this.redirect.restore(&sandbox.netns) {
                    Ok(restored) => restored == Restored::Complete,
                    // Not withdrawn yet.
                    Err(culvert_dataplane::Error::NotRegistered { .. }) => {
                        this.redirect.withdraw(&sandbox.netns).map_err(Failure::Attach)?;
                        false
                    }
                    Err(error) => return Err(Failure::Attach(error)),
                };
                if is_restored {
                    this.records.remove(sandbox.cookie)?;
                }
                Ok(is_restored)
            })
            .await;
        match restored {
            Ok(true) => {
                self.table().remove(sandbox.cookie);
                true
            }
            Ok(false) => false,
            Err(error) => {
                sandbox.warn("cannot put a pod's netns back yet", &error);
                false
            }
        }
    }

    /// Runs what may block on a thread for that.
    pub(super) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        step: Step,
        sandbox: &Arc<Sandbox<R::Netns>>,
        work: impl FnOnce(&Self, &Sandbox<R::Netns>) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (this, sandbox) = (Arc::clone(self), Arc::clone(sandbox));
        let work = tokio::task::spawn_blocking(move || work(&this, &sandbox));
        work.await.unwrap_or(Err(Failure::Panicked { step }))
    }
}

impl<N> Sandbox<N> {
    pub(super) fn warn(&self, message: &str, error: &(dyn std::error::Error + 'static)) {
        tracing::warn!(pod = %self.pod, uid = self.pod.uid, netns = self.cookie, error = %Chain(error), "{message}");
    }
}
