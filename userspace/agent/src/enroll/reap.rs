//! What a runtime does not tell: netns that vanish, and leaving pods that can now be finished.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::time::{MissedTickBehavior, interval, timeout};

use super::{Enrollment, Failure, NetnsId, Redirect, Step, Ztunnel, sandbox::Sandbox, table::State};
use crate::error_chain::Chain;

/// How long a look waits for one pod's turn; the next look comes to it again.
const TURN: Duration = Duration::from_millis(100);

impl<R: Redirect, Z: Ztunnel> Enrollment<R, Z> {
    /// Looks every `pause`. A netns has vanished when its path named another one, or none, at two looks
    /// in a row, and no process lives in it: a pod that may still send stays captured (`lifecycle.md`
    /// §6).
    pub async fn reap(self: Arc<Self>, pause: Duration) {
        let mut ticks = interval(pause);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut missing = HashSet::new();
        loop {
            ticks.tick().await;
            missing = self.look(&missing).await;
        }
    }

    /// One look; the netns whose path does not name them, unless they are dealt with.
    pub(super) async fn look(self: &Arc<Self>, missing_before: &HashSet<u64>) -> HashSet<u64> {
        let mut missing = HashSet::new();
        for (sandbox, state) in self.all() {
            let gone = self.blocking(Step::Netns, &sandbox, |_, sandbox| Ok(!sandbox.is_at_its_path())).await;
            if gone.unwrap_or(false) {
                missing.insert(sandbox.cookie);
            }
            let vanished = missing.contains(&sandbox.cookie) && missing_before.contains(&sandbox.cookie);
            if vanished && self.is_deserted(&sandbox).await {
                self.vanished(&sandbox).await;
                missing.remove(&sandbox.cookie);
            } else if state == State::Leaving {
                let Ok(_turn) = timeout(TURN, self.order.enter(&sandbox.pod.uid)).await else {
                    continue;
                };
                // A new ADD may have taken it in again meanwhile.
                let is_leaving =
                    self.table().in_state(State::Leaving).any(|own| own.cookie == sandbox.cookie);
                if is_leaving && self.finish(&sandbox).await {
                    tracing::info!(pod = %sandbox.pod, uid = sandbox.pod.uid, netns = sandbox.cookie, "what was left of a pod is gone");
                }
            }
        }
        let this = Arc::clone(self);
        match tokio::task::spawn_blocking(move || this.redirect.collect()).await {
            Ok(Err(error)) => tracing::warn!(error = %Chain(&error), "cannot collect what is left of pods"),
            Err(error) => tracing::error!(%error, "collecting what is left of pods panicked"),
            Ok(Ok(_)) => {}
        }
        self.metrics.set_sandboxes(self.count(State::Enrolled), self.count(State::Leaving));
        missing
    }

    /// The netns of a sandbox is gone but for our own descriptor.
    async fn vanished(self: &Arc<Self>, sandbox: &Arc<Sandbox<R::Netns>>) {
        let Ok(_turn) = timeout(TURN, self.order.enter(&sandbox.pod.uid)).await else {
            return;
        };
        self.table().remove(sandbox.cookie);
        let current = self.table().current(&sandbox.pod.uid).map(|own| own.cookie);
        if current.is_none()
            && let Err(error) = self.ztunnel.del(&sandbox.pod.workload_uid()).await
        {
            sandbox.warn("ztunnel did not take the removal of a pod", &error);
        }
        let forgotten = self.blocking(Step::Attach, sandbox, |this, sandbox| {
            this.redirect.forget(sandbox.cookie).map_err(Failure::Attach)?;
            Ok(this.records.remove(sandbox.cookie)?)
        });
        match forgotten.await {
            Ok(()) => {
                tracing::info!(pod = %sandbox.pod, uid = sandbox.pod.uid, netns = sandbox.cookie, "a pod's netns is gone; the pod left the mesh")
            }
            Err(error) => sandbox.warn("cannot remove what is left of a pod whose netns is gone", &error),
        }
    }

    pub(super) async fn is_deserted(self: &Arc<Self>, sandbox: &Arc<Sandbox<R::Netns>>) -> bool {
        let inhabited =
            self.blocking(Step::Netns, sandbox, |this, sandbox| Ok(inhabitant(&this.paths.proc, sandbox.id)));
        match inhabited.await {
            Ok(Ok(None)) => true,
            Ok(Ok(Some(pid))) => {
                tracing::debug!(pod = %sandbox.pod, uid = sandbox.pod.uid, pid, "a netns without a path has a process; the pod stays captured");
                false
            }
            Ok(Err(error)) => {
                tracing::warn!(pod = %sandbox.pod, uid = sandbox.pod.uid, %error, "cannot tell whether processes are left in a netns");
                false
            }
            Err(error) => {
                sandbox.warn("cannot tell whether processes are left in a netns", &error);
                false
            }
        }
    }

    /// The netns by a process that lives in it, in this process's view.
    pub(super) fn netns_by_process(&self, id: NetnsId) -> Option<PathBuf> {
        let pid = inhabitant(&self.paths.proc, id).ok().flatten()?;
        Some(self.paths.proc.join(pid.to_string()).join("ns/net"))
    }

    fn all(&self) -> Vec<(Arc<Sandbox<R::Netns>>, State)> {
        let table = self.table();
        let of = |state| table.in_state(state).map(move |sandbox| (Arc::new(sandbox.clone()), state));
        of(State::Enrolled).chain(of(State::Leaving)).collect()
    }
}

impl<N> Sandbox<N> {
    /// Whether the runtime's path still names this netns.
    fn is_at_its_path(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|found| NetnsId { dev: found.dev(), ino: found.ino() } == self.id)
    }
}

/// A process that lives in the netns.
pub(super) fn inhabitant(proc: &Path, netns: NetnsId) -> io::Result<Option<u32>> {
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process that ended meanwhile lives nowhere.
        let found = fs::metadata(entry.path().join("ns/net"));
        if found.is_ok_and(|found| NetnsId { dev: found.dev(), ino: found.ino() } == netns) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}
