//! `cargo xtask build-ebpf`: the kernel crate compiled and stripped into target/ebpf.

use std::env::consts::ARCH;
use std::path::Path;
use std::process::Command;
use std::{env, fs, iter};

use anyhow::{Context as _, bail};

use crate::exec;
use crate::toolchain::Toolchain;
use crate::workspace::Workspace;

const TARGET: &str = "bpfel-unknown-none";
const OBJECTS: [&str; 2] = ["pod", "node"];

pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    let toolchain = Toolchain::find(workspace)?;
    eprintln!("build-ebpf: {toolchain}");
    compile(workspace, &toolchain)?;
    let built = workspace.path("target/ebpf-build").join(TARGET).join("release");
    for name in OBJECTS {
        stage(workspace, &toolchain.strip, name, &built.join(name))?;
    }
    Ok(())
}

fn compile(workspace: &Workspace, toolchain: &Toolchain) -> anyhow::Result<()> {
    if !matches!(ARCH, "x86_64" | "aarch64") {
        bail!("the eBPF programs read registers of x86_64 and aarch64 only, this machine is {ARCH}");
    }
    let architecture = format!("--cfg=bpf_target_arch=\"{ARCH}\"");
    // The BTF names source files: without this clone's place in it, equal sources make equal objects.
    let remap = format!("--remap-path-prefix={}=.", workspace.root().display());
    let flags = [&architecture, "-Cdebuginfo=2", "-Clink-arg=--btf", &remap].join("\u{1f}");
    let mut cargo = workspace.command(&toolchain.compiler.cargo);
    // A target directory of its own: two compilers in one evict each other's results.
    cargo
        .args("build --locked --release --package culvert-ebpf --bins".split(' '))
        .args("-Z build-std=core --target-dir target/ebpf-build --target".split(' '))
        .arg(TARGET)
        .env("RUSTC", &toolchain.compiler.rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags);
    // rustc looks for its linker in PATH.
    let linker = toolchain.linker.parent().context("bpf-linker has no directory")?;
    let path = env::var_os("PATH").unwrap_or_default();
    if !env::split_paths(&path).any(|directory| directory == linker) {
        cargo.env("PATH", env::join_paths(iter::once(linker.to_path_buf()).chain(env::split_paths(&path)))?);
    }
    exec::run(&mut cargo)
}

/// Strips the debug information (not the BTF), and leaves an object that is the same untouched: a new
/// time stamp would rebuild the crates that embed it.
fn stage(workspace: &Workspace, strip: &Path, name: &str, built: &Path) -> anyhow::Result<()> {
    let directory = workspace.path("target/ebpf");
    fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let object = directory.join(name).with_extension("o");
    let stripped = directory.join(name).with_extension("stripped");
    exec::query(Command::new(strip).args(["-g", "-o"]).args([&stripped, built]))?;

    let new = fs::read(&stripped).with_context(|| format!("cannot read {}", stripped.display()))?;
    let is_same = fs::read(&object).is_ok_and(|old| old == new);
    if is_same { fs::remove_file(&stripped) } else { fs::rename(&stripped, &object) }
        .with_context(|| format!("cannot put {} into place", object.display()))?;

    let size = fs::metadata(built).with_context(|| format!("cannot read {}", built.display()))?.len();
    let note = if is_same { ", unchanged" } else { "" };
    println!("target/ebpf/{name}.o: {} bytes ({size} with debug information){note}", new.len());
    Ok(())
}
