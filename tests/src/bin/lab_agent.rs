//! The lab's agent as a process of its own, for tests that kill it.

use clap::Parser as _;
use culvert_tests::agent_process::{self, Options};

fn main() -> anyhow::Result<()> {
    agent_process::serve(&Options::parse())
}
