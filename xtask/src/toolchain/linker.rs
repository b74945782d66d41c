//! bpf-linker, and the LLVM it was built with.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::version;
use crate::exec;
use crate::programs;
use crate::workspace::Workspace;

pub(super) struct Linker {
    pub(super) program: PathBuf,
    /// `None` when it does not say.
    pub(super) llvm: Option<u32>,
}

pub(super) fn find(workspace: &Workspace) -> anyhow::Result<Linker> {
    let program = programs::find(workspace, "bpf-linker").context(
        "bpf-linker: on Debian apt-get install llvm-22-dev libpolly-22-dev libzstd-dev g++, then \
         LLVM_PREFIX=/usr/lib/llvm-22 cargo install bpf-linker --locked --no-default-features --features llvm-22",
    )?;
    let mut version = Command::new(&program);
    version.args(["--llvm-args=--version", "-o", "/dev/null", "/dev/null"]);
    let output = exec::query(&mut version)
        .with_context(|| format!("{} does not start: install it again", program.display()));
    Ok(Linker { llvm: version::linker_llvm(&output?), program })
}
