//! Waiting for what announces itself to nobody.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::journal::DEADLINE;

const POLL: Duration = Duration::from_millis(5);

/// Looks again and again until there is something. Panics with `what` after [`DEADLINE`].
pub fn eventually<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    within(DEADLINE, what, look)
}

/// [`eventually`] with a time limit of its own, for what has to wait behind other work.
pub fn within<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {limit:?} in vain for {what}");
        thread::sleep(POLL);
    }
}
