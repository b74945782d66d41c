//! The container runtime: Debian's packages unpacked into target/tools/runtime. Nothing of them is installed,
//! configured or started, so a Docker or containerd of the machine stays as it is.

use std::env::consts::ARCH;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use super::apt;
use crate::workspace::Workspace;
use crate::{as_root, exec, programs};

const PACKAGES: [&str; 3] = ["containerd", "runc", "containernetworking-plugins"];
/// What is needed of them.
const FILES: [&str; 5] = [
    "usr/bin/containerd",
    "usr/bin/ctr",
    "usr/bin/containerd-shim-runc-v2",
    "usr/sbin/runc",
    "usr/lib/cni/bridge",
];

pub(super) fn is_unpacked(workspace: &Workspace) -> bool {
    let directory = programs::tools(workspace).join("runtime");
    FILES.iter().all(|file| directory.join(file).exists())
}

/// runc's only library beside the C library.
pub(super) fn has_libseccomp(_workspace: &Workspace) -> bool {
    let of_debian = format!("/usr/lib/{ARCH}-linux-gnu");
    let mut directories = ["/usr/lib64", "/usr/lib", &of_debian].into_iter().map(Path::new);
    directories.any(|directory| directory.join("libseccomp.so.2").exists())
}

pub(super) fn unpack(workspace: &Workspace) -> anyhow::Result<()> {
    let directory = programs::tools(workspace).join("runtime");
    let downloads = directory.join("packages");
    fs::create_dir_all(&downloads).with_context(|| format!("cannot create {}", downloads.display()))?;
    if as_root::is_root()? {
        apt::update()?;
    }
    apt::download(&PACKAGES, &downloads)?;
    let packages =
        fs::read_dir(&downloads).with_context(|| format!("cannot read {}", downloads.display()))?;
    for package in packages {
        let package = package.context("a downloaded package")?.path();
        exec::run_quietly(Command::new("dpkg").arg("-x").arg(package).arg(&directory))?;
    }
    fs::remove_dir_all(&downloads).with_context(|| format!("cannot remove {}", downloads.display()))
}
