//! Stages the objects that `cargo xtask build-ebpf` left in target/ebpf.
//!
//! Without them the crate still builds, and loading fails with an error that names the command.
//! `EBPF_OBJECTS` names another directory, `EBPF_OBJECTS_REQUIRED` makes their absence a build error.

use std::{env, fs, io, path::PathBuf};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-env-changed=EBPF_OBJECTS");
    println!("cargo::rerun-if-env-changed=EBPF_OBJECTS_REQUIRED");
    let manifest_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let objects =
        env::var_os("EBPF_OBJECTS").map_or_else(|| manifest_dir.join("../../target/ebpf"), PathBuf::from);
    let required = env::var_os("EBPF_OBJECTS_REQUIRED").is_some();
    for name in ["pod.o", "node.o"] {
        let from = objects.join(name);
        println!("cargo::rerun-if-changed={}", from.display());
        let object = fs::read(&from).unwrap_or_default();
        if object.is_empty() {
            let level = if required { "error" } else { "warning" };
            println!("cargo::{level}={} is missing: run `cargo xtask build-ebpf`", from.display());
        }
        fs::write(out_dir.join(name), object)?;
    }
    Ok(())
}
