//! `bench add`: a pod on its way into the mesh, from the start of the plugin to its exit.
//!
//! The plugin as it is shipped (static, profile `plugin`), the agent as users start it
//! (`culvert-agent --standalone`), and a stand-in for ztunnel that opens its sockets and acks at once, on
//! one node with real pods.
//!
//! ```text
//!  runtime ──exec──► culvert-cni ──cni.sock──► culvert-agent ──ZDS──► stand-in
//!          ◄─exit──             ◄──answer────  netns, programs ◄─ack──
//! ```

mod conditions;
mod node;
mod process;
mod steps;

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context as _, ensure};

use super::{
    cpu::{self, Cpu},
    measure::{median, percentile},
    report::Row,
    table,
};
use crate::lab::Lab;
use conditions::Conditions;
use node::Node;

/// Pods that start alone, and then 330 at once: as many as a large node has, on a small one.
const ALONE: usize = 170;
const AT_ONCE: usize = 330;
const ENROLLED: usize = ALONE + AT_ONCE;
/// ADD and DEL in turn.
const CYCLES: usize = 1000;

/// The command line.
#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Write conditions and rows to this file too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fewer repetitions: within 3 minutes
    #[arg(long)]
    quick: bool,
    /// The plugin to run [default: what `cargo xtask build-plugin` makes]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
}

/// Measures everything and prints the table.
pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let plugin = options.plugin.clone().map_or_else(shipped_plugin, Ok)?;
    let size = fs::metadata(&plugin).with_context(|| format!("no {}", plugin.display()))?.len();
    let mut conditions = Conditions::read(options.quick);
    conditions.print();
    let mut rows = vec![row("plugin_mib", "MiB", size as f64 / process::MIB)];
    let (begun, busy) = (Instant::now(), cpu::busy());
    let measured = measure(&plugin, options.quick, &mut rows);
    conditions.finish(begun.elapsed(), cpu::busy() - busy);
    table::print(&rows, false);
    measured?;
    if let Some(path) = &options.json {
        let json = serde_json::json!({ "conditions": conditions, "rows": rows });
        let text = serde_json::to_string_pretty(&json)? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// This program is in `target/release`.
fn shipped_plugin() -> anyhow::Result<PathBuf> {
    let this = env::current_exe()?;
    let target = this.ancestors().nth(2).context("the target directory")?;
    Ok(target.join(format!("{}-unknown-linux-gnu/plugin/culvert-cni", env::consts::ARCH)))
}

/// Rows that were measured before a failure are there after it.
fn measure(plugin: &Path, quick: bool, rows: &mut Vec<Row>) -> anyhow::Result<()> {
    let lab = Lab::bare();
    let mut node = Node::start(&lab, plugin, ENROLLED)?;
    let (alone, at_once) = node.pods().split_at(ALONE);

    progress("cycles of ADD and DEL");
    for pod in &alone[..10] {
        node.add(pod)?;
        node.del(pod)?;
    }
    let before = node.settled_descriptors();
    let (mut adds, mut dels) = (Vec::new(), Vec::new());
    for pod in alone.iter().cycle().take(CYCLES) {
        adds.push(node.add(pod)?);
        dels.push(node.del(pod)?);
    }
    let grown = node.settled_descriptors() - before;
    rows.extend(percentiles("add", &mut adds));
    rows.extend(percentiles("del", &mut dels));
    rows.push(row("fds_after_1000_cycles", "more", grown));

    progress("pods outside the mesh");
    let passes = if quick { 200 } else { CYCLES };
    let outside = alone.iter().cycle().take(passes).map(|pod| node.add_outside(pod));
    let mut outside = outside.collect::<anyhow::Result<Vec<_>>>()?;
    rows.extend(percentiles("add_non_mesh", &mut outside));

    progress("steps");
    rows.extend(steps::measure(&node, alone, if quick { 100 } else { 500 }, median(&adds))?);

    progress("330 at once");
    for pod in alone {
        node.add(pod)?;
    }
    let cpu = Cpu::of(&lab.config().cgroup);
    let (begun, used) = (Instant::now(), cpu.time());
    let (mut together, lost) = node.add_at_once(at_once);
    let (all, used) = (begun.elapsed(), cpu.time() - used);
    rows.extend(percentiles("add_330", &mut together));
    rows.push(row("add_330_until_last_ms", "ms", all.as_secs_f64() * 1e3));
    rows.push(row("add_330_cpu_ms", "ms each", used.as_secs_f64() * 1e3 / AT_ONCE as f64));
    rows.push(row("add_330_lost", "pods", lost as f64));
    ensure!(node.enrolled() + lost == ENROLLED, "{} pods are enrolled", node.enrolled());

    progress("memory");
    rows.push(row("plugin_rss_mib", "MiB", node.plugin_rss(&alone[0])?));
    rows.push(row("agent_rss_500_mib", "MiB", node.settled_rss()));
    rows.push(row("agent_fds_500", "descriptors", node.settled_descriptors()));

    progress("restarts");
    let mut restarts = Vec::new();
    for _ in 0..if quick { 3 } else { 10 } {
        restarts.push(node.restart()?.as_secs_f64() * 1e3);
        ensure!(node.enrolled() + lost == ENROLLED, "{} pods after a restart", node.enrolled());
    }
    rows.push(row("restart_500_ms", "ms", median(&restarts)));
    rows.push(row("agent_rss_restarted_mib", "MiB", node.settled_rss()));
    Ok(())
}

fn row(name: &'static str, unit: &'static str, value: f64) -> Row {
    Row::of_culvert(name, unit, value)
}

fn percentiles(of: &'static str, times: &mut [f64]) -> [Row; 2] {
    let names = match of {
        "add" => ["add_p50_ms", "add_p99_ms"],
        "del" => ["del_p50_ms", "del_p99_ms"],
        "add_330" => ["add_330_p50_ms", "add_330_p99_ms"],
        _ => ["add_non_mesh_p50_ms", "add_non_mesh_p99_ms"],
    };
    times.sort_by(f64::total_cmp);
    [row(names[0], "ms", percentile(times, 0.5)), row(names[1], "ms", percentile(times, 0.99))]
}

#[expect(clippy::print_stderr, reason = "a long benchmark shows progress")]
fn progress(part: &str) {
    eprintln!("{part}");
}
