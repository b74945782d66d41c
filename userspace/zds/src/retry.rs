//! When to offer a refused workload again.

use std::{collections::HashMap, future, time::Duration};

use tokio::time::{Instant, sleep_until};

use crate::WorkloadUid;

/// Pauses that double from `initial` to `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// First pause.
    pub initial: Duration,
    /// Longest pause.
    pub max: Duration,
}

impl Backoff {
    /// The pause after `failures` failures, counted from 1.
    pub(crate) fn pause(self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.initial.saturating_mul(factor).min(self.max)
    }
}

/// Refused workloads of one connection. Tried until acked, deleted or the connection ends.
#[derive(Debug)]
pub(crate) struct Retries {
    backoff: Backoff,
    refused: HashMap<WorkloadUid, Refusals>,
}

#[derive(Debug)]
struct Refusals {
    count: u32,
    due: Instant,
}

impl Retries {
    pub(crate) fn new(backoff: Backoff) -> Self {
        Self { backoff, refused: HashMap::new() }
    }

    /// Counts a refusal; returns how many there were and the pause before the next try.
    pub(crate) fn refuse(&mut self, uid: &WorkloadUid) -> (u32, Duration) {
        let now = Instant::now();
        let refusals = self.refused.entry(uid.clone()).or_insert(Refusals { count: 0, due: now });
        refusals.count = refusals.count.saturating_add(1);
        let pause = self.backoff.pause(refusals.count);
        refusals.due = now + pause;
        (refusals.count, pause)
    }

    /// Counts what happened on earlier connections, and tries again after the pause of so many failures.
    pub(crate) fn postpone(&mut self, uid: &WorkloadUid, failures: u32) {
        let due = Instant::now() + self.backoff.pause(failures);
        self.refused.insert(uid.clone(), Refusals { count: failures, due });
    }

    /// Nothing is to be retried for `uid` any more; returns how often it had been refused.
    pub(crate) fn settle(&mut self, uid: &WorkloadUid) -> Option<u32> {
        self.refused.remove(uid).map(|refusals| refusals.count)
    }

    /// Waits for the next workload whose pause is over. Cancel safe.
    pub(crate) async fn due(&self) -> WorkloadUid {
        match self.refused.iter().min_by_key(|(_, refusals)| refusals.due) {
            Some((uid, refusals)) => {
                sleep_until(refusals.due).await;
                uid.clone()
            }
            None => future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff { initial: Duration::from_secs(1), max: Duration::from_secs(30) };

    #[test]
    fn pauses_double_up_to_the_longest() {
        let seconds: Vec<_> = [1, 2, 3, 5, 6, 33, u32::MAX].map(|n| BACKOFF.pause(n).as_secs()).into();
        assert_eq!(seconds, [1, 2, 4, 16, 30, 30, 30]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_workload_refused_least_often_is_due_first() {
        let mut retries = Retries::new(BACKOFF);
        retries.refuse(&"a".into());
        retries.refuse(&"a".into());
        retries.refuse(&"b".into());
        assert_eq!(retries.due().await, "b".into());
        assert_eq!(retries.settle(&"b".into()), Some(1));
        assert_eq!(retries.due().await, "a".into());
        assert_eq!(retries.settle(&"a".into()), Some(2));
        assert_eq!(retries.settle(&"a".into()), None);
    }
}
