//! What happened so far, and waiting for what has yet to happen.

use std::{
    fmt::Debug,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// No wait of the lab is longer.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// A list that grows, shared between those who write and those who wait.
#[derive(Debug)]
pub struct Journal<T>(Arc<(Mutex<Vec<T>>, Condvar)>);

impl<T> Default for Journal<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Clone for Journal<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: Clone + Debug> Journal<T> {
    /// Appends.
    pub fn push(&self, entry: T) {
        let (entries, grown) = &*self.0;
        entries.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
        grown.notify_all();
    }

    /// Everything until now.
    pub fn all(&self) -> Vec<T> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets everything until now.
    pub fn clear(&self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// How many until now.
    pub fn len(&self) -> usize {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether nothing has happened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first entry that fits, old or new. Panics with `what` after [`DEADLINE`].
    pub fn wait_for(&self, what: &str, fits: impl Fn(&T) -> bool) -> T {
        self.wait_until(what, |entries| entries.iter().find(|entry| fits(entry)).cloned())
    }

    /// Waits until `look` finds something in the whole list. Panics with `what` after [`DEADLINE`].
    pub fn wait_until<R>(&self, what: &str, look: impl Fn(&[T]) -> Option<R>) -> R {
        match self.wait_within(DEADLINE, look) {
            Some(found) => found,
            None => panic!("waited {DEADLINE:?} in vain for {what}; happened: {:#?}", self.all()),
        }
    }

    /// Waits until `look` finds something or the time is over.
    pub fn wait_within<R>(&self, limit: Duration, look: impl Fn(&[T]) -> Option<R>) -> Option<R> {
        let (entries, grown) = &*self.0;
        let deadline = Instant::now() + limit;
        let mut entries = entries.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(found) = look(&entries) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            (entries, _) = grown.wait_timeout(entries, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
