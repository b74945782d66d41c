//! Clients that connect again and again while something is done to their pod.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{client::Dial, journal::DEADLINE};

/// Between two attempts of one client.
const PACE: Duration = Duration::from_millis(1);
/// How long a client that has connected waits for an echo. Without it a slow machine's ztunnel would still be
/// working off connections long after the clients have ended.
const ECHO: Duration = Duration::from_secs(2);

/// How the attempts ended.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    /// Connected.
    pub connected: usize,
    /// Failed, by what the kernel said (errno; 0: nothing in time).
    pub failed: BTreeMap<i32, usize>,
}

impl Attempts {
    /// All of them.
    pub fn total(&self) -> usize {
        self.connected + self.failed.values().sum::<usize>()
    }

    fn count(&mut self, outcome: Result<(), &io::Error>) {
        match outcome {
            Ok(()) => self.connected += 1,
            Err(error) => *self.failed.entry(error.raw_os_error().unwrap_or_default()).or_default() += 1,
        }
    }
}

/// Connects as each of `dials` says, over and over on a thread each, from before `abuse` begins until
/// after it has ended. A client that has connected waits for an echo, then closes with a RST.
pub fn while_connecting(dials: &[Dial<'_>], abuse: impl FnOnce()) -> Attempts {
    let (stop, begun) = (AtomicBool::new(false), AtomicUsize::new(0));
    let attempts = Mutex::new(Attempts::default());
    thread::scope(|scope| {
        for dial in dials {
            scope.spawn(|| {
                let mut own = Attempts::default();
                dial.host().run(|| {
                    while !stop.load(Ordering::SeqCst) {
                        match dial.connect_here() {
                            Ok(mut connection) => {
                                own.count(Ok(()));
                                connection.wait_for_echo(ECHO);
                                connection.reset();
                            }
                            Err(error) => own.count(Err(&error)),
                        }
                        if own.total() == 1 {
                            begun.fetch_add(1, Ordering::SeqCst);
                        }
                        thread::sleep(PACE);
                    }
                });
                let mut attempts = attempts.lock().expect("no client panicked");
                attempts.connected += own.connected;
                for (errno, count) in own.failed {
                    *attempts.failed.entry(errno).or_default() += count;
                }
            });
        }
        let deadline = Instant::now() + DEADLINE;
        while begun.load(Ordering::SeqCst) < dials.len() && Instant::now() < deadline {
            thread::yield_now();
        }
        // Also when it panics, or the clients would never end.
        let _stop = Stop(&stop);
        abuse();
    });
    attempts.into_inner().expect("no client panicked")
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
