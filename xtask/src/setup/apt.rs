//! Debian's packages.

use std::path::Path;
use std::process::Command;

use crate::exec;

pub(super) fn is_usable() -> bool {
    Path::new("/etc/debian_version").exists() && Path::new("/usr/bin/apt-get").exists()
}

pub(super) fn has(package: &str) -> bool {
    let status = exec::query(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]));
    status.is_ok_and(|status| status == "installed")
}

pub(super) fn update() -> anyhow::Result<()> {
    exec::run_quietly(apt_get().args(["-qq", "update"]))
}

/// The packages' files, without what they depend on.
pub(super) fn download(packages: &[&str], directory: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("apt-get");
    // The user `_apt` may not be able to write into this clone.
    command.args(["-qq", "-o", "APT::Sandbox::User=root", "download"]).args(packages);
    exec::run_quietly(command.current_dir(directory))
}

pub(super) fn install(packages: &[&str]) -> anyhow::Result<()> {
    update()?;
    exec::run_quietly(apt_get().args(["-qq", "-y", "--no-install-recommends", "install"]).args(packages))
}

fn apt_get() -> Command {
    // Another clone may be installing at this moment: apt waits for dpkg's lock, but not for that of its lists.
    let mut command = Command::new("flock");
    command.args("/run/lock/culvert-apt apt-get -o DPkg::Lock::Timeout=600".split(' '));
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}
