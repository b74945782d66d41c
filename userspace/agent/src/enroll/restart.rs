//! What an earlier agent left: served again from records and pins alone.
//!
//! Who is served is known before anything else is answered; what each netns needs (its routing watched
//! and in step) follows at once and takes no part in it: capture has gone on all the time.

use std::{
    fs, io, num::NonZeroUsize, os::unix::fs::MetadataExt as _, path::Path, sync::Arc, thread, time::Duration,
};

use tokio::{sync::Semaphore, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    Enrollment, Failure, NetnsId, Redirect, Step, Ztunnel, reap::inhabitant, sandbox::Sandbox,
    steps::Progress, table::State,
};
use crate::{
    error_chain::Chain,
    record::{Phase, Record},
};

/// How long a pod without its pins may take to be captured again; then it is tried anew.
const AGAIN: Duration = Duration::from_secs(10);

/// Before a pod that could not be brought in step is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// How many netns are brought in step at once: pods that start now go first.
const IN_STEP_AT_ONCE: usize = 2;

/// What became of a record.
enum Found<N> {
    /// To be served.
    Enrolled(Sandbox<N>),
    /// To be taken out.
    Unfinished(Sandbox<N>),
    /// Gone.
    Dropped,
}

impl<R: Redirect, Z: Ztunnel> Enrollment<R, Z> {
    /// Takes up every recorded pod: call it before ztunnel and the runtime are served. Its netns is
    /// opened by its path and must be the recorded one; else the record is dropped with all it owned.
    pub async fn resume(self: &Arc<Self>) -> Result<(), crate::record::Error> {
        let records = self.records.read()?;
        let share = records.len().div_ceil(thread::available_parallelism().map_or(1, NonZeroUsize::get));
        let mut finding = JoinSet::new();
        for records in records.chunks(share.max(1)) {
            let (this, records) = (Arc::clone(self), records.to_vec());
            finding.spawn_blocking(move || -> Vec<_> {
                records.iter().map(|record| this.find(record)).collect()
            });
        }
        let mut enrolled = Vec::new();
        let mut unfinished = Vec::new();
        while let Some(found) = finding.join_next().await {
            match found {
                Ok(found) => found.into_iter().for_each(|found| match found {
                    Found::Enrolled(sandbox) => enrolled.push(Arc::new(sandbox)),
                    Found::Unfinished(sandbox) => unfinished.push(Arc::new(sandbox)),
                    Found::Dropped => {}
                }),
                Err(error) => tracing::error!(%error, "taking up recorded pods panicked"),
            }
        }
        // The newest sandbox of a pod is its current one.
        enrolled.sort_by_key(|sandbox| sandbox.since);
        for sandbox in &enrolled {
            self.ztunnel.keep(sandbox.workload());
            self.table().enroll(Sandbox::clone(sandbox));
        }
        for sandbox in unfinished {
            tracing::info!(pod = %sandbox.pod, uid = sandbox.pod.uid, netns = sandbox.cookie, "undoing what an earlier agent began");
            self.take_out(&sandbox).await;
        }
        let at_once = Arc::new(Semaphore::new(IN_STEP_AT_ONCE));
        for sandbox in enrolled {
            let (this, at_once) = (Arc::clone(self), Arc::clone(&at_once));
            self.tasks.spawn(async move { this.bring_in_step(&sandbox, &at_once).await });
        }
        self.metrics.set_sandboxes(self.count(State::Enrolled), self.count(State::Leaving));
        Ok(())
    }

    fn find(&self, record: &Record) -> Found<R::Netns> {
        let Record { pod, cookie, .. } = record;
        let open = |path: &Path| {
            let netns = self.redirect.open(path).ok()?;
            let sandbox = Sandbox::new::<R>(pod.clone(), path.to_owned(), netns).ok()?;
            Some(sandbox).filter(|found| (found.cookie, found.id) == (*cookie, record.netns_id))
        };
        // The path may be a process that has ended, or unmounted: a pod that may still send stays captured.
        let opened = open(&record.netns).or_else(|| open(&self.netns_by_process(record.netns_id)?));
        let Some(mut sandbox) = opened else {
            if !self.is_gone(record) {
                tracing::error!(%pod, uid = pod.uid, netns = cookie, path = %record.netns.display(), "a recorded netns cannot be opened; the pod stays captured, and is served when an agent that can starts");
                return Found::Dropped;
            }
            tracing::info!(%pod, uid = pod.uid, netns = cookie, path = %record.netns.display(), "a recorded netns is gone; the pod left the mesh");
            let forgotten = self.redirect.forget(*cookie).map_err(Failure::Attach);
            if let Err(error) = forgotten.and_then(|()| Ok(self.records.remove(*cookie)?)) {
                tracing::warn!(%pod, uid = pod.uid, error = %Chain(&error), "cannot remove what is left of a pod whose netns is gone");
            }
            return Found::Dropped;
        };
        sandbox.addresses.clone_from(&record.addresses);
        sandbox.attachments.clone_from(&record.attachments);
        sandbox.bypass_inbound = record.bypass_inbound;
        sandbox.since = record.since;
        if record.phase == Phase::Enrolled { Found::Enrolled(sandbox) } else { Found::Unfinished(sandbox) }
    }

    /// Only what is seen to be gone is: an error of ours opens no capture.
    fn is_gone(&self, record: &Record) -> bool {
        let is_elsewhere = match fs::metadata(&record.netns) {
            Ok(found) => NetnsId { dev: found.dev(), ino: found.ino() } != record.netns_id,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        is_elsewhere && matches!(inhabitant(&self.paths.proc, record.netns_id), Ok(None))
    }

    /// In the background: its processes run already, nobody waits.
    async fn bring_in_step(self: &Arc<Self>, sandbox: &Arc<Sandbox<R::Netns>>, at_once: &Semaphore) {
        let mut is_lost = false;
        loop {
            let turn = self.order.enter(&sandbox.pod.uid).await;
            // What came first may have taken it out, or learned more of it.
            let Some(sandbox) = self.table().enrolled(sandbox.cookie).cloned().map(Arc::new) else {
                return;
            };
            let resumed = {
                let _permit = at_once.acquire().await;
                self.blocking(Step::Register, &sandbox, |this, sandbox| {
                    this.redirect.resume(&sandbox.netns, &sandbox.addresses()).map_err(Failure::Attach)
                })
                .await
            };
            if let Err(error @ Failure::Attach(culvert_dataplane::Error::NotRegistered { .. })) = &resumed {
                sandbox.warn("an enrolled pod is no longer captured: its pins are gone", error);
                is_lost = true;
            }
            let is_in_step = match resumed {
                _ if is_lost => self.capture_again(&sandbox).await,
                Ok(()) => true,
                Err(error) => {
                    sandbox.warn("an enrolled pod's routing is not watched", &error);
                    false
                }
            };
            drop(turn);
            if is_in_step || self.tasks.is_closed() {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Captured first, so that its connections are refused rather than let out while ztunnel is not there.
    async fn capture_again(self: &Arc<Self>, sandbox: &Arc<Sandbox<R::Netns>>) -> bool {
        let closed = self.blocking(Step::Register, sandbox, |this, sandbox| {
            let (netns, addresses) = (&sandbox.netns, sandbox.addresses());
            let registered = this.redirect.register(netns, &addresses, sandbox.options());
            registered.and_then(|()| this.redirect.activate(netns)).map_err(Failure::Attach)
        });
        let progress = Progress::new(Instant::now() + AGAIN, CancellationToken::new());
        let captured = match closed.await {
            Ok(()) => self.steps(sandbox, true, &progress).await,
            Err(error) => Err(error),
        };
        let Err(error) = captured else {
            tracing::info!(pod = %sandbox.pod, uid = sandbox.pod.uid, "pod captured again");
            return true;
        };
        sandbox.warn("an enrolled pod is not captured; its connections are refused", &error);
        // A ztunnel that serves it already has sockets that the new map does not know, and opens no others.
        let unknown_sockets = matches!(
            error,
            Failure::Attach(
                culvert_dataplane::Error::NoListener { .. }
                    | culvert_dataplane::Error::ForeignListener { .. }
            )
        );
        if unknown_sockets && let Err(error) = self.ztunnel.del(&sandbox.pod.workload_uid()).await {
            sandbox.warn("ztunnel did not take the removal of a pod", &error);
        }
        false
    }
}
