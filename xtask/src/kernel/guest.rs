//! What the guest is told to run.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::Context as _;

use crate::exec::quote;
use crate::workspace::Workspace;

/// Variables that the guest's command gets from this environment.
const VARIABLES: [&str; 4] = ["PATH", "HOME", "CI", "CARGO_TERM_COLOR"];
const PREFIXES: [&str; 3] = ["RUST_", "CULVERT_", "ZTUNNEL_"];

/// A directory for one boot, removed with this value.
pub(super) struct RunDirectory(PathBuf);

impl RunDirectory {
    pub(super) fn create(workspace: &Workspace) -> anyhow::Result<Self> {
        let path = workspace.path("target/kernels").join(format!("run-{}", process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("kernel: {} stays behind: {error}", self.0.display());
        }
    }
}

/// A bash script: environment, directory, command.
pub(super) fn script(directory: &Path, command: &[OsString]) -> String {
    let passes = |name: &OsStr| {
        let name = name.to_string_lossy();
        VARIABLES.contains(&&*name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let exports = env::vars_os()
        .filter(|(name, _)| passes(name))
        .map(|(name, value)| format!("export {}={}\n", name.display(), quote(&value)));
    let words: Vec<String> = command.iter().map(|word| quote(word)).collect();
    format!(
        "{}cd {} || exit\nexec {}\n",
        exports.collect::<String>(),
        quote(directory.as_os_str()),
        words.join(" ")
    )
}
