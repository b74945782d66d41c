//! Workloads that a ztunnel has met with silence.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::WorkloadUid;

/// How often the ack for an add was missed, by workload. Each miss has closed a connection, so this is kept
/// across connections: what a ztunnel gets stuck on is tried after everything else, and ever more rarely.
#[derive(Clone, Debug, Default)]
pub(crate) struct Suspects(Arc<Mutex<HashMap<WorkloadUid, u32>>>);

impl Suspects {
    pub(crate) fn missed(&self, uid: &WorkloadUid) {
        let mut misses = self.lock();
        let count = misses.entry(uid.clone()).or_default();
        *count = count.saturating_add(1);
    }

    /// `None` for one that was always answered.
    pub(crate) fn misses(&self, uid: &WorkloadUid) -> Option<u32> {
        self.lock().get(uid).copied()
    }

    /// It was answered, or is gone.
    pub(crate) fn clear(&self, uid: &WorkloadUid) {
        self.lock().remove(uid);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<WorkloadUid, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
