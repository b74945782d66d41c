//! Measures the redirection against Istio's iptables rules and against none.

use clap::Parser as _;
use culvert_tests::bench::{self, Options};

fn main() -> anyhow::Result<()> {
    bench::run(&Options::parse())
}
