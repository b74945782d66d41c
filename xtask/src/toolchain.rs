//! What compiles for the kernel: a rustc with nightly features, bpf-linker, llvm-strip.

mod compiler;
mod linker;
mod strip;
mod version;

use std::fmt::{self, Display};
use std::path::PathBuf;

use anyhow::bail;

use crate::workspace::Workspace;
use compiler::Compiler;

pub(crate) struct Toolchain {
    pub(crate) compiler: Compiler,
    pub(crate) linker: PathBuf,
    pub(crate) strip: PathBuf,
}

impl Toolchain {
    /// Everything, or one error that lists all that is missing.
    pub(crate) fn find(workspace: &Workspace) -> anyhow::Result<Self> {
        let linker = linker::find(workspace);
        let llvm = linker.as_ref().ok().and_then(|linker| linker.llvm);
        let compiler = compiler::find(llvm);
        let strip = strip::find(workspace);
        match (compiler, linker, strip) {
            (Ok(compiler), Ok(linker), Ok(strip)) => Ok(Self { compiler, linker: linker.program, strip }),
            (compiler, linker, strip) => {
                let missing = [compiler.err(), linker.err(), strip.err()].into_iter().flatten();
                let missing: Vec<String> = missing.map(|one| format!("\n  - {one:#}")).collect();
                bail!(
                    "the eBPF programs cannot be compiled on this machine. Missing:{}\n\
                     `cargo xtask setup` installs all of it on Debian and Ubuntu as root",
                    missing.concat()
                )
            }
        }
    }
}

impl Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.compiler, self.linker.display())
    }
}

pub(crate) fn has_compiler(workspace: &Workspace) -> bool {
    let llvm = linker::find(workspace).ok().and_then(|linker| linker.llvm);
    compiler::find(llvm).is_ok()
}

pub(crate) fn has_linker(workspace: &Workspace) -> bool {
    linker::find(workspace).is_ok()
}

pub(crate) fn has_strip(workspace: &Workspace) -> bool {
    strip::find(workspace).is_ok()
}
