//! What an earlier agent left: served again from records and pins alone.

use std::{path::Path, sync::Arc, time::Duration};

use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{Enrollment, Failure, Redirect, Ztunnel, sandbox::Sandbox, steps::Progress, table::State};
use crate::{
    error_chain::Chain,
    record::{Phase, Record},
};

/// How long a pod without its pins may take to be captured again, a start of ztunnel included.
const AGAIN: Duration = Duration::from_secs(60);

/// What became of a record.
enum Found<N> {
    /// Served.
    Resumed(Sandbox<N>),
    /// Its netns lives, and what was pinned for it does not.
    Unpinned(Sandbox<N>),
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
        let mut resuming = JoinSet::new();
        for record in records {
            let this = Arc::clone(self);
            resuming.spawn_blocking(move || this.find(&record));
        }
        let mut resumed = Vec::new();
        let mut unpinned = Vec::new();
        let mut unfinished = Vec::new();
        while let Some(found) = resuming.join_next().await {
            match found {
                Ok(Found::Resumed(sandbox)) => resumed.push(sandbox),
                Ok(Found::Unpinned(sandbox)) => unpinned.push(sandbox),
                Ok(Found::Unfinished(sandbox)) => unfinished.push(sandbox),
                Ok(Found::Dropped) => {}
                Err(error) => tracing::error!(%error, "taking up a recorded pod panicked"),
            }
        }
        // The kernel counts cookies up: the newest netns of a pod is its current one.
        resumed.sort_by_key(|sandbox| sandbox.cookie);
        for sandbox in resumed {
            self.ztunnel.keep(sandbox.workload());
            self.table().enroll(sandbox);
        }
        for sandbox in unfinished {
            let sandbox = Arc::new(sandbox);
            tracing::info!(pod = %sandbox.pod, uid = sandbox.pod.uid, netns = sandbox.cookie, "undoing what an earlier agent began");
            self.take_out(&sandbox).await;
        }
        for sandbox in unpinned {
            self.enroll_again(Arc::new(sandbox));
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
        if record.phase != Phase::Enrolled {
            return Found::Unfinished(sandbox);
        }
        match self.redirect.resume(&sandbox.netns, &sandbox.addresses()) {
            Ok(()) => Found::Resumed(sandbox),
            Err(error @ culvert_dataplane::Error::NotRegistered { .. }) => {
                sandbox.warn("an enrolled pod is no longer captured: its pins are gone", &error);
                Found::Unpinned(sandbox)
            }
            Err(error) => {
                sandbox.warn("an enrolled pod's routing is not watched", &error);
                Found::Resumed(sandbox)
            }
        }
    }

    /// All steps once more, in the background: its processes run already, nobody waits.
    fn enroll_again(self: &Arc<Self>, sandbox: Arc<Sandbox<R::Netns>>) {
        self.ztunnel.keep(sandbox.workload());
        self.table().enroll(Sandbox::clone(&sandbox));
        let this = Arc::clone(self);
        self.tasks.spawn(async move {
            let _turn = this.order.enter(&sandbox.pod.uid).await;
            let progress = Progress::new(Instant::now() + AGAIN, CancellationToken::new());
            match this.steps(&sandbox, true, &progress).await {
                Ok(()) => tracing::info!(pod = %sandbox.pod, uid = sandbox.pod.uid, "pod captured again"),
                Err(error) => sandbox.warn("an enrolled pod is not captured", &error),
            }
        });
    }
}
