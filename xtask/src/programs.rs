//! Finding programs: this clone's own tools first, then PATH, then cargo's.

use std::env;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::workspace::Workspace;

/// Where `setup` puts what it builds.
pub(crate) fn tools(workspace: &Workspace) -> PathBuf {
    workspace.path("target/tools")
}

pub(crate) fn find(workspace: &Workspace, name: &str) -> Option<PathBuf> {
    let tools = tools(workspace);
    let path = env::var_os("PATH").unwrap_or_default();
    let cargo_home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home.or_else(|| Some(env::home_dir()?.join(".cargo")));
    [tools.join("bin"), tools.join("nextest/bin")]
        .into_iter()
        .chain(env::split_paths(&path))
        // Debian's PATH for users lacks it.
        .chain([PathBuf::from("/usr/sbin")])
        .chain(cargo_home.map(|home| home.join("bin")))
        .map(|directory| directory.join(name))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}
