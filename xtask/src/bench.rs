//! `cargo xtask bench`: the redirection measured against iptables.

use std::ffi::OsString;

use crate::lab;
use crate::workspace::Workspace;

pub(crate) fn run(workspace: &Workspace, arguments: &[OsString]) -> anyhow::Result<()> {
    lab::become_program(workspace, "bench", arguments)
}
