//! A process that behaves like ztunnel towards the pods it is handed, for tests and the demo.

use clap::Parser as _;
use culvert_tests::stand_in::{self, Options};

fn main() -> anyhow::Result<()> {
    stand_in::run(Options::parse())
}
