//! `cargo xtask build-plugin`: the CNI plugin as it is shipped, one static file.

use std::env::consts::ARCH;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;

use crate::exec;
use crate::workspace::Workspace;

/// Builds it and prints its size.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    // Without --target the flag would be that of build scripts and procedural macros too, which cannot be static.
    let target = format!("{ARCH}-unknown-linux-gnu");
    let mut cargo = workspace.cargo();
    cargo.args("build --locked --profile plugin --package culvert-cni --target".split(' ')).arg(&target);
    exec::run(cargo.env("RUSTFLAGS", "-Ctarget-feature=+crt-static"))?;
    let plugin = workspace.target().join(&target).join("plugin/culvert-cni");
    let size = fs::metadata(&plugin).with_context(|| format!("cannot read {}", plugin.display()))?.len();
    println!("target/{target}/plugin/culvert-cni: {:.2} MiB, static", size as f64 / f64::from(1 << 20));
    Ok(plugin)
}
