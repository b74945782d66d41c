//! The rustc that builds `core` for the kernel: it needs nightly features and the library's sources.

use std::env;
use std::env::consts::ARCH;
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use super::version::{self, RustcVersion};
use crate::exec;

/// Debian's compiler, from the package rustc-web.
const SYSTEM: &str = "/usr/bin/rustc";

#[derive(Debug)]
pub(crate) struct Compiler {
    pub(crate) rustc: PathBuf,
    pub(crate) cargo: PathBuf,
    origin: &'static str,
    version: RustcVersion,
}

impl Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RustcVersion { release, llvm } = &self.version;
        write!(f, "rustc {release} with LLVM {llvm} ({}, {})", self.origin, self.rustc.display())
    }
}

/// The first that can do it, given the LLVM of bpf-linker.
pub(super) fn find(linker_llvm: Option<u32>) -> anyhow::Result<Compiler> {
    let current_cargo = env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
    let with_current_cargo = |origin, rustc| examine(origin, rustc, current_cargo.clone(), linker_llvm);

    if let Some(rustc) = env::var_os("EBPF_RUSTC") {
        return with_current_cargo("EBPF_RUSTC", rustc.into())
            .context("the rustc named by the variable EBPF_RUSTC: unset it, or name one with rust-src");
    }
    let current = || with_current_cargo("the current toolchain", "rustc".into()).and_then(require_nightly);
    let nightly = || {
        let rustc = rustup_nightly()?;
        // A cargo of the same day knows how to build its library.
        let cargo = rustc.with_file_name("cargo");
        examine("rustup's nightly", rustc, cargo, linker_llvm)
    };
    let system = || with_current_cargo("the system's", SYSTEM.into());

    let candidates: [(&str, &dyn Fn() -> anyhow::Result<Compiler>); 3] =
        [("current toolchain", &current), ("rustup's nightly", &nightly), (SYSTEM, &system)];
    let mut refused = Vec::new();
    for (name, candidate) in candidates {
        match candidate() {
            Ok(compiler) => return Ok(compiler),
            Err(error) => refused.push(format!("\n    {name}: {error:#}")),
        }
    }
    bail!(
        "a rustc with nightly features and rust-src: rustup toolchain install nightly --component rust-src, \
         or on Debian apt-get install rustc-web rust-web-src, or name one in EBPF_RUSTC{}",
        refused.concat()
    )
}

fn examine(
    origin: &'static str,
    rustc: PathBuf,
    cargo: PathBuf,
    linker_llvm: Option<u32>,
) -> anyhow::Result<Compiler> {
    let output = exec::query(Command::new(&rustc).arg("-vV"))?;
    let version =
        version::rustc(&output).with_context(|| format!("unreadable version of {}", rustc.display()))?;
    if !sysroot(&rustc)?.join("lib/rustlib/src/rust/library").is_dir() {
        bail!("{} has no rust-src", version.release);
    }
    if let Some(linker) = linker_llvm.filter(|linker| *linker < version.llvm) {
        bail!("{} writes LLVM {} bitcode, bpf-linker reads up to {linker}", version.release, version.llvm);
    }
    Ok(Compiler { rustc, cargo, origin, version })
}

fn require_nightly(compiler: Compiler) -> anyhow::Result<Compiler> {
    if !compiler.version.is_nightly() {
        bail!("{} is not a nightly", compiler.version.release);
    }
    Ok(compiler)
}

fn rustup_nightly() -> anyhow::Result<PathBuf> {
    let mut which = Command::new("rustup");
    which.args(["which", "--toolchain", "nightly", "rustc"]).env("RUSTUP_AUTO_INSTALL", "0");
    let rustc = exec::query(&mut which).ok().context("not installed")?;
    Ok(PathBuf::from(rustc.trim()))
}

fn sysroot(rustc: &Path) -> anyhow::Result<PathBuf> {
    Ok(PathBuf::from(exec::query(Command::new(rustc).args(["--print", "sysroot"]))?.trim()))
}

/// A program of rustup's component llvm-tools.
pub(super) fn llvm_tool(name: &str) -> Option<PathBuf> {
    let compilers = [Some(PathBuf::from("rustc")), rustup_nightly().ok()];
    let host = format!("{ARCH}-unknown-linux-gnu");
    compilers
        .into_iter()
        .flatten()
        .filter_map(|rustc| sysroot(&rustc).ok())
        .map(|sysroot| sysroot.join("lib/rustlib").join(&host).join("bin").join(name))
        .find(|tool| tool.is_file())
}
