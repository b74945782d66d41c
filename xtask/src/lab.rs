//! The programs of culvert-tests that run in the lab: the demo and the benchmark.

use std::ffi::OsString;

use crate::workspace::Workspace;
use crate::{as_root, build_ebpf, build_plugin, exec, setup};

/// Builds the program and becomes it, as root.
pub(crate) fn become_program(
    workspace: &Workspace,
    name: &str,
    arguments: &[OsString],
) -> anyhow::Result<()> {
    setup::ensure(workspace, &[setup::BUILD, setup::LAB, setup::RUNTIME])?;
    build_ebpf::run(workspace)?;
    build_plugin::run(workspace)?;
    let mut build = workspace.cargo();
    build.args("build --locked --release --package culvert-tests --package culvert-agent --bins".split(' '));
    exec::run(build.env("EBPF_OBJECTS_REQUIRED", "1"))?;
    let program = workspace.target().join("release").join(name);
    Err(exec::replace(as_root::command(&program)?.args(arguments)))
}
