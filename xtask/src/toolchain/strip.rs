//! llvm-strip: drops an object's debug information, keeps its BTF.

use std::path::PathBuf;

use anyhow::Context as _;

use crate::programs;
use crate::workspace::Workspace;

/// Debian's name, the usual name.
const NAMES: [&str; 2] = ["llvm-strip-22", "llvm-strip"];

pub(super) fn find(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    NAMES
        .iter()
        .find_map(|name| programs::find(workspace, name))
        .or_else(|| super::compiler::llvm_tool("llvm-strip"))
        .context(
            "llvm-strip: apt-get install llvm-22, or rustup component add llvm-tools --toolchain nightly",
        )
}
