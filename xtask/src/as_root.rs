//! Programs that need root: through sudo when we are not.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use crate::exec;

pub(crate) fn is_root() -> anyhow::Result<bool> {
    let id = exec::query(Command::new("id").arg("-u")).context("cannot tell whether this is root")?;
    Ok(id.trim() == "0")
}

/// The program as root, with this environment.
pub(crate) fn command(program: &Path) -> anyhow::Result<Command> {
    if is_root()? {
        return Ok(Command::new(program));
    }
    // sudo -E replaces PATH where sudoers sets secure_path.
    let mut path = OsString::from("PATH=");
    path.push(env::var_os("PATH").unwrap_or_default());
    let mut command = Command::new("sudo");
    command.args(["-E", "env"]).arg(path).arg(program);
    Ok(command)
}
