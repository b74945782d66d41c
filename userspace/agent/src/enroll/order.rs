//! One operation on a pod at a time, pods in parallel.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

/// Turns by key. A key that nobody waits for takes no memory.
#[derive(Debug)]
pub(super) struct Order<K> {
    turns: Arc<Mutex<HashMap<K, Arc<Turn<()>>>>>,
}

/// The turn of one caller, until dropped.
#[derive(Debug)]
pub(super) struct Guard<K: Eq + Hash> {
    turns: Arc<Mutex<HashMap<K, Arc<Turn<()>>>>>,
    key: K,
    held: Option<OwnedMutexGuard<()>>,
}

impl<K> Default for Order<K> {
    fn default() -> Self {
        Self { turns: Arc::default() }
    }
}

impl<K: Eq + Hash + Clone> Order<K> {
    /// Waits for the others that came before. Cancel safe.
    pub(super) async fn enter(&self, key: &K) -> Guard<K> {
        let turn = Arc::clone(lock(&self.turns).entry(key.clone()).or_default());
        // Made before waiting, so that a dropped wait cleans up as well.
        let mut guard = Guard { turns: Arc::clone(&self.turns), key: key.clone(), held: None };
        guard.held = Some(turn.lock_owned().await);
        guard
    }
}

impl<K: Eq + Hash> Drop for Guard<K> {
    fn drop(&mut self) {
        let mut turns = lock(&self.turns);
        drop(self.held.take());
        // Handles are given out under this lock only.
        if turns.get(&self.key).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            turns.remove(&self.key);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_millis(10);

    #[tokio::test(start_paused = true)]
    async fn the_same_key_waits_and_another_does_not() {
        let order = Order::default();
        let first = order.enter(&1).await;
        assert!(timeout(SOON, order.enter(&1)).await.is_err());
        assert!(timeout(SOON, order.enter(&2)).await.is_ok());
        drop(first);
        assert!(timeout(SOON, order.enter(&1)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn keys_that_nobody_holds_are_forgotten() {
        let order = Order::default();
        let first = order.enter(&1).await;
        assert!(timeout(SOON, order.enter(&1)).await.is_err());
        assert_eq!(lock(&order.turns).len(), 1);
        drop(first);
        assert_eq!(lock(&order.turns).len(), 0);
    }
}
