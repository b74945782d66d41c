//! The dataplane's probe as a process of its own, for tests that take something from it.

use std::{path::PathBuf, process::ExitCode};

use caps::{CapSet, Capability};
use clap::Parser;
use culvert_dataplane::{Config, probe};

/// Prints the report; fails unless everything is there
#[derive(Debug, Parser)]
struct Options {
    /// As in the dataplane's configuration
    #[arg(long)]
    bpffs: PathBuf,
    /// As in the dataplane's configuration
    #[arg(long)]
    cgroup: PathBuf,
    /// As in the dataplane's configuration
    #[arg(long)]
    host_netns: PathBuf,
    /// As in the dataplane's configuration
    #[arg(long, default_value = "/proc")]
    proc: PathBuf,
    /// Capabilities to do without, for example CAP_BPF
    #[arg(long)]
    without: Vec<Capability>,
}

#[expect(clippy::print_stdout, reason = "it is what this program is for")]
fn main() -> anyhow::Result<ExitCode> {
    let Options { bpffs, cgroup, host_netns, proc, without } = Options::parse();
    for capability in without {
        caps::drop(None, CapSet::Effective, capability)?;
    }
    let report = probe::run(&Config { bpffs, cgroup, host_netns, proc, ..Config::default() });
    print!("{report}");
    Ok(if report.is_ready() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
