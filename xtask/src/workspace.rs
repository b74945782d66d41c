//! Where this clone is, and cargo acting on it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    pub(crate) fn locate() -> anyhow::Result<Self> {
        let manifest = env::var_os("CARGO_MANIFEST_DIR")
            .context("CARGO_MANIFEST_DIR is not set: start xtask through `cargo xtask`")?;
        let root = Path::new(&manifest).parent().context("xtask has no directory above it")?;
        Ok(Self { root: root.to_path_buf() })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.join(relative)
    }

    pub(crate) fn target(&self) -> PathBuf {
        self.path("target")
    }

    /// The cargo that runs xtask.
    pub(crate) fn cargo(&self) -> Command {
        self.command(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")))
    }

    /// A program acting on this clone only: in its root, and building into its `target`.
    pub(crate) fn command(&self, program: impl Into<OsString>) -> Command {
        let mut command = Command::new(program.into());
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", self.target());
        command
    }
}
