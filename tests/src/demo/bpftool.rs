//! The same state as an operator sees it: `bpftool` on what is pinned.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};

use super::{scene::Scene, table::WIDTH};

const DIRECTORY: &str = "/sys/fs/bpf/culvert/v1";
/// Adds up what the CPUs have counted.
const SUM: &str = "awk '/_.*: [1-9]/ {n[$1] += $2} END {for (i in n) print i, n[i]}' | sort";

/// A command and what it tells.
struct Look {
    command: String,
    tells: &'static str,
}

/// Runs the commands and shows what they print.
pub(super) fn show(scene: &Scene, out: &mut dyn Write) -> anyhow::Result<()> {
    for look in looks(scene) {
        writeln!(out, "\n{}\n$ {}", look.tells, look.command)?;
        let printed = run(&look.command)?;
        ensure!(!printed.trim().is_empty(), "`{}` printed nothing", look.command);
        for line in printed.lines() {
            let line = line.trim_end();
            writeln!(out, "{}", line.get(..WIDTH).unwrap_or(line))?;
        }
    }
    Ok(())
}

fn looks(scene: &Scene) -> [Look; 3] {
    // As bpftool wants it: its bytes in the machine's order.
    let key: Vec<_> = scene.blue.cookie().to_ne_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    [
        Look {
            tells: "Is it attached? Six programs on the cgroup, one in each captured pod's netns:",
            command: format!("bpftool -f link show | grep -B2 {DIRECTORY}"),
        },
        Look {
            tells: "Are the pods active? State 2 is; 4 is the netns in which ztunnel introduced itself:",
            command: format!(
                "bpftool map dump pinned {DIRECTORY}/maps/PODS | grep -E 'key|state|flags' | paste - - -"
            ),
        },
        Look {
            tells: "What became of blue's connections? Its counters, all CPUs together, without zeros:",
            command: format!(
                "bpftool map lookup pinned {DIRECTORY}/maps/COUNTERS key hex {} |\n    {SUM}",
                key.join(" ")
            ),
        },
    ]
}

/// Standard output of a shell command in the mount namespace of the lab.
fn run(command: &str) -> anyhow::Result<String> {
    let output = Command::new("sh")
        .args(["-c", command])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run sh")?;
    ensure!(output.status.success(), "`{command}` failed: {}", output.status);
    String::from_utf8(output.stdout).with_context(|| format!("output of `{command}`"))
}
