//! `cargo xtask lint`: formatting, clippy, file lengths.

use std::fs;

use anyhow::{Context as _, bail};

use crate::exec;
use crate::workspace::Workspace;

/// A file longer than this holds more than one idea.
const MOST_LINES: usize = 400;

pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    // -l: names in place of diffs.
    exec::run(workspace.cargo().args("fmt --all --check -- -l".split(' ')))
        .context("these files are not formatted: run `cargo fmt --all`")?;
    exec::run(workspace.cargo().args("clippy --workspace --all-targets --locked -- -D warnings".split(' ')))?;
    file_lengths(workspace)
}

fn file_lengths(workspace: &Workspace) -> anyhow::Result<()> {
    let mut git = workspace.command("git");
    let files = exec::query(git.args(["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"]))?;
    let mut too_long = Vec::new();
    // A file deleted but not yet committed is still listed.
    for file in files.lines().filter(|file| workspace.path(file).exists()) {
        let text = fs::read_to_string(workspace.path(file)).with_context(|| format!("cannot read {file}"))?;
        let lines = text.lines().count();
        if lines > MOST_LINES {
            too_long.push(format!("{file} has {lines} lines"));
        }
    }
    if !too_long.is_empty() {
        bail!("{}: at most {MOST_LINES} are allowed, split by idea", too_long.join(", "));
    }
    eprintln!("lint: {} Rust files, none above {MOST_LINES} lines", files.lines().count());
    Ok(())
}
