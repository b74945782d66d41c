//! `cargo xtask test`: the tests without root, then those with real traffic.

use crate::nextest::{self, BuiltTests};
use crate::workspace::Workspace;
use crate::{as_root, build_ebpf, build_plugin, exec, setup};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only tests whose name contains this, or those of the file tests/tests/NAME.rs
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
    /// Only the tests that need neither root nor an eBPF toolchain
    #[arg(long)]
    host_only: bool,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let filter = args.filter.as_deref();
    if args.host_only {
        setup::ensure(workspace, &[setup::NEXTEST])?;
        return nextest::run_host_tests(workspace, filter, false);
    }
    setup::ensure(workspace, &[setup::BUILD, setup::LAB, setup::RUNTIME, setup::NEXTEST])?;
    build_ebpf::run(workspace)?;
    build_plugin::run(workspace)?;
    nextest::run_host_tests(workspace, filter, true)?;

    let tests = BuiltTests::build(workspace)?;
    let mut netns = as_root::command(tests.program())?;
    netns.args(tests.arguments("netns", filter)).current_dir(workspace.root());
    exec::run(&mut netns)
}
