//! The project's own commands: `cargo xtask VERB`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool talks to its terminal")]
#![forbid(unsafe_code)]

mod as_root;
mod bench;
mod build_ebpf;
mod build_plugin;
mod demo;
mod exec;
mod kernel;
mod lab;
mod lint;
mod nextest;
mod programs;
mod setup;
mod test;
mod toolchain;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::workspace::Workspace;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, tests and shows Culvert")]
enum Verb {
    /// Install what the other verbs need (Debian and Ubuntu as root; elsewhere says what to install)
    Setup(setup::Args),
    /// Compile the eBPF programs into target/ebpf
    BuildEbpf,
    /// Build the CNI plugin as it is shipped, static, and print its size
    BuildPlugin,
    /// Run every test: the host's without root, then real traffic in network namespaces
    Test(test::Args),
    /// Redirect two pods' traffic on this machine, show it, and clean up
    #[command(disable_help_flag = true)]
    Demo {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Measure the redirection against iptables, or the ADD path (`bench add`)
    #[command(disable_help_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Check formatting, clippy and file lengths
    Lint,
    /// Run the network namespace tests, or any command, under another kernel (qemu, no KVM)
    Kernel(kernel::Args),
}

fn main() -> ExitCode {
    let verb = Verb::parse();
    match run(verb) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::locate()?;
    match verb {
        Verb::Setup(args) => setup::run(&workspace, &args)?,
        Verb::BuildEbpf => build_ebpf::run(&workspace)?,
        Verb::BuildPlugin => build_plugin::run(&workspace).map(drop)?,
        Verb::Test(args) => test::run(&workspace, &args)?,
        Verb::Demo { arguments } => demo::run(&workspace, &arguments)?,
        Verb::Bench { arguments } => bench::run(&workspace, &arguments)?,
        Verb::Lint => lint::run(&workspace)?,
        Verb::Kernel(args) => return kernel::run(&workspace, &args),
    }
    Ok(ExitCode::SUCCESS)
}
