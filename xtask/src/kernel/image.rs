//! A kernel and its modules, unpacked into target/kernels and kept there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use anyhow::{Context as _, ensure};

use super::{Version, archive};
use crate::workspace::Workspace;
use crate::{exec, programs};

/// An unpacked kernel package.
pub(super) struct Image {
    /// As `uname -r` says.
    pub(super) release: String,
    pub(super) tree: PathBuf,
}

impl Image {
    /// The one unpacked before, or the newest of the version that Debian has.
    pub(super) fn get(workspace: &Workspace, version: Version) -> anyhow::Result<Self> {
        let directory = workspace.path("target/kernels").join(version.name());
        if !directory.exists() {
            // Complete or absent: renamed when it is done.
            let unfinished = directory.with_file_name(format!("{}-new-{}", version.name(), process::id()));
            unpack(workspace, version, &unfinished)?;
            fs::rename(&unfinished, &directory)
                .with_context(|| format!("cannot put {} into place", directory.display()))?;
        }
        let release = release(&directory).with_context(|| {
            format!("{} is not usable: remove it and run this again", directory.display())
        })?;
        Ok(Self { release, tree: directory })
    }

    pub(super) fn kernel(&self) -> PathBuf {
        self.tree.join("boot").join(format!("vmlinuz-{}", self.release))
    }

    pub(super) fn modules(&self) -> PathBuf {
        self.tree.join("lib/modules").join(&self.release)
    }
}

fn unpack(workspace: &Workspace, version: Version, tree: &Path) -> anyhow::Result<()> {
    let downloads = tree.join("apt");
    let package = archive::download(version, &downloads)?;
    exec::run_quietly(Command::new("dpkg").arg("-x").args([&package, tree]))?;
    fs::remove_dir_all(&downloads).with_context(|| format!("cannot remove {}", downloads.display()))?;

    let depmod =
        programs::find(workspace, "depmod").context("depmod is missing: run `cargo xtask setup --vm`")?;
    exec::run_quietly(Command::new(depmod).arg("-b").arg(tree).arg(release(tree)?))
}

fn release(tree: &Path) -> anyhow::Result<String> {
    let modules = tree.join("lib/modules");
    let entries = fs::read_dir(&modules).with_context(|| format!("cannot read {}", modules.display()))?;
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let release = names.next().with_context(|| format!("{} is empty", modules.display()))?;
    ensure!(names.next().is_none(), "{} holds more than one kernel", modules.display());
    Ok(release)
}
