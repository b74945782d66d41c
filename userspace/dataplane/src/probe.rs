//! What a node must offer, tried rather than read off version numbers: distributions backport.
//!
//! Each check that fails says what is missing and what to do. Nothing stays behind.

mod environment;
mod kernel;

use std::fmt;

pub use environment::find_cgroup2;

use crate::Config;

/// One thing the node must offer.
#[derive(Debug)]
pub struct Check {
    /// What was tried.
    pub name: &'static str,
    /// What is wrong, and the remedy; `None` if nothing is.
    pub failure: Option<Failure>,
}

/// Why a check failed.
#[derive(Debug)]
pub struct Failure {
    /// What was found.
    pub reason: String,
    /// What to do.
    pub remedy: &'static str,
}

/// All checks, in the order in which they build on each other.
#[derive(Debug)]
pub struct Report {
    /// The checks.
    pub checks: Vec<Check>,
}

/// Checks a node. Needs root, loads and unloads programs, and makes one short-lived netns.
pub fn run(config: &Config) -> Report {
    let mut checks = environment::checks(config);
    // Without these the kernel's answer would only repeat what is known already.
    let ready = checks.iter().all(|check| check.failure.is_none());
    if ready {
        checks.extend(kernel::checks(config));
    }
    Report { checks }
}

impl Report {
    /// Whether the node offers everything.
    pub fn is_ready(&self) -> bool {
        self.checks.iter().all(|check| check.failure.is_none())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            match &check.failure {
                None => writeln!(f, "ok      {}", check.name)?,
                Some(Failure { reason, remedy }) => {
                    writeln!(f, "FAILED  {}\n        found: {reason}\n        do:    {remedy}", check.name)?;
                }
            }
        }
        Ok(())
    }
}

impl Check {
    fn new(name: &'static str, result: Result<(), String>, remedy: &'static str) -> Self {
        Self { name, failure: result.err().map(|reason| Failure { reason, remedy }) }
    }
}
