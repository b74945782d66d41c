//! `cargo xtask demo`: two pods on this machine, redirected and shown.

use std::ffi::OsString;

use crate::lab;
use crate::workspace::Workspace;

pub(crate) fn run(workspace: &Workspace, arguments: &[OsString]) -> anyhow::Result<()> {
    lab::become_program(workspace, "demo", arguments)
}
