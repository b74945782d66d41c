//! Why the agent is not ready, if it is not.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Reasons by the part that has one. Parts report and clear their own. An absent ztunnel is none:
/// ztunnel's own start may wait for ours (field report 76).
#[derive(Debug, Default)]
pub struct Readiness(Mutex<BTreeMap<&'static str, String>>);

impl Readiness {
    /// Not ready until it is cleared.
    pub fn report(&self, part: &'static str, reason: impl Into<String>) {
        self.lock().insert(part, reason.into());
    }

    /// The part has no reason any more.
    pub fn clear(&self, part: &'static str) {
        self.lock().remove(part);
    }

    /// `part: reason`, none if ready.
    pub fn reasons(&self) -> Vec<String> {
        self.lock().iter().map(|(part, reason)| format!("{part}: {reason}")).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
