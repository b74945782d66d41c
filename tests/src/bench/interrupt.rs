//! Ctrl-C: the workers are told to end, and are waited for.

use std::{
    process::ChildStdin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};

/// A worker ends when its stdin does.
pub(super) type Stdin = Arc<Mutex<Option<ChildStdin>>>;

/// Waits for SIGINT and SIGTERM.
pub(super) struct Interrupt {
    happened: Arc<AtomicBool>,
    workers: Arc<Mutex<Vec<Stdin>>>,
}

impl Interrupt {
    /// To be called before any other thread is started: they inherit the blocked signals.
    pub(super) fn watch() -> anyhow::Result<Self> {
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
        signals.thread_block().context("cannot block signals")?;
        let watch = Self { happened: Arc::default(), workers: Arc::default() };
        let (happened, workers) = (Arc::clone(&watch.happened), Arc::clone(&watch.workers));
        thread::spawn(move || {
            if signals.wait().is_err() {
                return;
            }
            happened.store(true, Ordering::Relaxed);
            for stdin in workers.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                close(&stdin);
            }
            // The second one ends this process at once.
            signals.thread_unblock().ok();
            loop {
                thread::park();
            }
        });
        Ok(watch)
    }

    pub(super) fn happened(&self) -> bool {
        self.happened.load(Ordering::Relaxed)
    }

    /// Another worker to be told.
    pub(super) fn add(&self, stdin: &Stdin) {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(stdin));
    }
}

pub(super) fn close(stdin: &Stdin) {
    stdin.lock().unwrap_or_else(PoisonError::into_inner).take();
}
