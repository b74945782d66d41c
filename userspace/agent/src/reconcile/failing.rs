//! A pod that could not be brought in line, and when it is tried again.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use tokio::time::Instant;

use crate::{enroll::Step, membership::Described};

const FASTEST: Duration = Duration::from_millis(250);
const SLOWEST: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct Failing {
    backoff: ExponentialBackoff,
    again: Instant,
    failures: u32,
    reason: &'static str,
    /// As it was when it was tried.
    described: Option<Described>,
}

impl Default for Failing {
    fn default() -> Self {
        let backoff = ExponentialBuilder::new()
            .with_min_delay(FASTEST)
            .with_max_delay(SLOWEST)
            .with_jitter()
            .without_max_times();
        Self { backoff: backoff.build(), again: Instant::now(), failures: 0, reason: "", described: None }
    }
}

impl Failing {
    /// Failed (again); whether for another reason than before.
    pub(super) fn failed(&mut self, reason: &'static str, described: Option<Described>) -> bool {
        let is_new = self.reason != reason;
        self.again = Instant::now() + self.backoff.next().unwrap_or(SLOWEST);
        self.failures += 1;
        self.reason = reason;
        self.described = described;
        is_new
    }

    /// Whether it is time, or the pod is not what it was.
    pub(super) fn is_due(&self, now: &Described) -> bool {
        self.again <= Instant::now() || self.described.as_ref() != Some(now)
    }

    /// Those that wait for a ztunnel need wait no longer.
    pub(super) fn ztunnel_changed(&mut self) {
        if self.reason == Step::Ztunnel.name() {
            self.again = Instant::now();
        }
    }

    pub(super) fn again(&self) -> Instant {
        self.again
    }

    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// The step that failed.
    pub(super) fn reason(&self) -> &'static str {
        self.reason
    }
}
