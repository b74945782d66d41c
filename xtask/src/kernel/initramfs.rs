//! What the guest starts with: busybox and the modules that reach the root file system.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

use super::image::Image;
use crate::workspace::Workspace;
use crate::{exec, programs};

/// Those before the root file system is there; the others come from it.
const MODULES: [&str; 4] = ["virtio_pci", "9pnet_virtio", "9p", "overlay"];
const INIT: &str = include_str!("init.sh");
const GUEST: &str = include_str!("guest.sh");

/// Packs an initramfs into `directory` whose guest ends with running `script`.
pub(super) fn pack(
    workspace: &Workspace,
    image: &Image,
    directory: &Path,
    script: &str,
) -> anyhow::Result<PathBuf> {
    let root = directory.join("initramfs");
    let archive = directory.join("initramfs.cpio");
    fill(workspace, image, &root, script).with_context(|| format!("cannot fill {}", root.display()))?;

    let file = File::create(&archive).with_context(|| format!("cannot create {}", archive.display()))?;
    let pack = format!("find . | {} -o -H newc --quiet", exec::quote(find(workspace, "cpio")?.as_os_str()));
    let mut cpio = Command::new("sh");
    let status =
        cpio.args(["-c", &pack]).current_dir(&root).stdout(file).status().context("cannot start sh")?;
    if !status.success() {
        bail!("`{pack}` in {} failed: {status}", root.display());
    }
    Ok(archive)
}

fn fill(workspace: &Workspace, image: &Image, root: &Path, script: &str) -> anyhow::Result<()> {
    fs::create_dir_all(root.join("bin"))?;
    fs::create_dir_all(root.join("modules"))?;
    fs::copy(find(workspace, "busybox")?, root.join("bin/busybox"))?;
    for (file, text) in [("init", INIT), ("guest", GUEST), ("command", script)] {
        fs::write(root.join(file), text)?;
    }
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755))?;
    fs::write(root.join("host-modules"), image.modules().as_os_str().as_encoded_bytes())?;
    for (index, module) in modules(workspace, image)?.iter().enumerate() {
        // init loads them in the order of their names.
        copy_module(module, &root.join("modules").join(format!("{index:02}.ko")))?;
    }
    Ok(())
}

/// The files to load, each after those it depends on.
fn modules(workspace: &Workspace, image: &Image) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for module in MODULES {
        let mut modprobe = Command::new(find(workspace, "modprobe")?);
        modprobe.arg("-d").arg(&image.tree).args(["-S", &image.release, "--show-depends", module]);
        // "insmod FILE", or "builtin NAME"
        let lines = exec::query(&mut modprobe)?;
        for file in lines.lines().filter_map(|line| line.strip_prefix("insmod ")) {
            let file = PathBuf::from(file.trim());
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    Ok(files)
}

fn copy_module(from: &Path, to: &Path) -> anyhow::Result<()> {
    if from.extension().is_some_and(|extension| extension == "xz") {
        let file = File::create(to)?;
        let status = Command::new("xz").arg("-dc").arg(from).stdout(Stdio::from(file)).status();
        if !status.context("cannot start xz")?.success() {
            bail!("`xz -dc {}` failed", from.display());
        }
    } else {
        fs::copy(from, to)?;
    }
    Ok(())
}

fn find(workspace: &Workspace, program: &str) -> anyhow::Result<PathBuf> {
    programs::find(workspace, program)
        .with_context(|| format!("{program} is missing: run `cargo xtask setup --vm`"))
}
