//! Pods that run already: the way in and out that no runtime asks for.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Add, Enrollment, Failure, NetnsId, Redirect, Sandbox, Step, Ztunnel, steps::Progress, table::State,
};
use crate::discover::{self, Found, Unfound, Wanted};

impl<R: Redirect, Z: Ztunnel> Enrollment<R, Z> {
    /// Takes a pod out of the mesh that is known not to belong to it any more, while it runs: captured
    /// connections go on until they close. Dropping the call does not stop it.
    pub async fn withdraw(self: &Arc<Self>, uid: &str) {
        let (this, uid) = (Arc::clone(self), uid.to_owned());
        let withdrawn = self.tasks.spawn(async move {
            let _turn = this.order.enter(&uid).await;
            for sandbox in this.sandboxes(&uid) {
                this.take_out(&sandbox).await;
                tracing::info!(pod = %sandbox.pod, uid, netns = sandbox.cookie, "pod no longer belongs to the mesh");
            }
            this.metrics.set_sandboxes(this.count(State::Enrolled), this.count(State::Leaving));
        });
        if let Err(error) = withdrawn.await {
            tracing::error!(%error, "the withdrawal of a pod panicked");
        }
    }

    /// Looks for the netns of running pods, all at once. `host` is the host's netns.
    pub async fn discover(
        self: &Arc<Self>,
        host: Option<NetnsId>,
        wanted: Vec<Wanted>,
    ) -> Result<BTreeMap<String, Result<Found, Unfound>>, Failure> {
        let this = Arc::clone(self);
        let scan = move || discover::scan(&*this.redirect, &this.paths, host, &wanted);
        match tokio::task::spawn_blocking(scan).await {
            Ok(scanned) => scanned.map_err(|error| Failure::Discovery(Arc::new(error))),
            Err(_panic) => Err(Failure::Panicked { step: Step::Netns }),
        }
    }

    /// As [`add`](Self::add), of a pod whose processes run. What the runtime has removed is not taken in
    /// again: its last processes may still be there, and its description.
    pub async fn add_running(self: &Arc<Self>, add: Add, deadline: Instant) -> Result<(), Failure> {
        let (this, path) = (Arc::clone(self), self.paths.of_netns(&add.netns));
        let opened = tokio::task::spawn_blocking(move || Some(R::cookie(&this.redirect.open(&path).ok()?)));
        let cookie = opened.await.ok().flatten();
        if cookie.is_some_and(|cookie| self.table().is_removed(cookie)) {
            return Err(Failure::Removed);
        }
        self.add(add, deadline).await.map(drop)
    }

    /// Brings what is known of an enrolled pod up to date: addresses come to those that it has. Without an
    /// effect if it is not enrolled. Dropping the call does not stop it.
    pub async fn update(
        self: &Arc<Self>,
        uid: &str,
        addresses: BTreeSet<IpAddr>,
        bypass_inbound: bool,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (this, uid) = (Arc::clone(self), uid.to_owned());
        let updated = self.tasks.spawn(async move {
            let progress = Progress::new(deadline, CancellationToken::new());
            let _turn = progress.wait(Step::Turn, this.order.enter(&uid)).await?;
            let Some(mut sandbox) = this.table().current(&uid).cloned() else {
                return Ok(());
            };
            sandbox.addresses.extend(addresses);
            sandbox.bypass_inbound = bypass_inbound;
            this.steps(&Arc::new(sandbox.clone()), true, &progress).await?;
            tracing::info!(pod = %sandbox.pod, uid, "pod brought up to date");
            this.table().enroll(sandbox);
            Ok(())
        });
        updated.await.unwrap_or(Err(Failure::Panicked { step: Step::Turn }))
    }

    /// Whether the runtime is just starting the pod.
    pub fn is_starting(&self, uid: &str) -> bool {
        self.table().is_pending(uid)
    }

    /// Whether no process is left in any sandbox of the pod.
    pub async fn has_no_process(self: &Arc<Self>, uid: &str) -> bool {
        for sandbox in self.sandboxes(uid) {
            if !self.is_deserted(&sandbox).await {
                return false;
            }
        }
        true
    }

    fn sandboxes(&self, uid: &str) -> Vec<Arc<Sandbox<R::Netns>>> {
        let table = self.table();
        let own = table.in_state(State::Enrolled).filter(|sandbox| sandbox.pod.uid == uid);
        own.map(|sandbox| Arc::new(sandbox.clone())).collect()
    }
}
