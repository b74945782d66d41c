//! Keeps the scope file: which pods may start while no agent answers (`lifecycle.md` §3).

use std::{collections::BTreeSet, fs, path::PathBuf};

use culvert_cni::scope::Scope;

use crate::readiness::Readiness;

const REASON: &str = "scope file";

/// The file, by its path.
#[derive(Clone, Debug)]
pub struct ScopeFile {
    path: PathBuf,
}

impl ScopeFile {
    /// Writes nothing yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// We are not ready before it has been brought in step.
    pub fn expect(&self, readiness: &Readiness) {
        readiness.report(REASON, "not compared with the mesh yet");
    }

    /// Writes the file if it says something else; whether it is right now. What cannot be written is a
    /// reason not to be ready: the plugin would go by an older scope.
    pub async fn update(&self, namespaces: BTreeSet<String>, readiness: &Readiness) -> bool {
        let path = self.path.clone();
        let written = tokio::task::spawn_blocking(move || {
            if Scope::read(&path).is_ok_and(|scope| scope.namespaces == namespaces) {
                return Ok(());
            }
            let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
            Scope::new(namespaces, boot.map(|boot| boot.trim().to_owned())).write(&path)
        });
        match written.await {
            Ok(Ok(())) => {
                readiness.clear(REASON);
                true
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "the scope file is out of date");
                readiness.report(REASON, error.to_string());
                false
            }
            Err(error) => {
                tracing::error!(%error, "writing the scope file panicked");
                readiness.report(REASON, error.to_string());
                false
            }
        }
    }
}
