//! The benchmark: the same traffic without capture, with Istio's iptables rules, and with Culvert.
//!
//! Each variant has a lab of its own in a process of its own (a worker), so that no variant pays for
//! another's programs or rules. The workers live as long as the benchmark and measure in turns: direct,
//! iptables, Culvert, direct, … A ratio is taken within one turn, Culvert divided by iptables; what is
//! reported is the median over the turns, with the least and the greatest.
//!
//! ```text
//!  client pod ── ztunnel ═══ HBONE ═══ ztunnel ── server pod      one node, one ztunnel, IPv4
//!  1 KiB there and 1 KiB back; client and server are one thread each
//! ```

mod add;
mod conditions;
mod connections;
mod cpu;
mod host_connect;
mod interrupt;
mod iptables;
mod kernel_memory;
mod load;
mod measure;
mod placement;
mod plan;
mod pods;
mod report;
mod requests;
mod stream;
mod subject;
mod table;
mod worker;

use std::{fs, path::PathBuf, time::Instant};

use anyhow::Context as _;

use conditions::Conditions;
use interrupt::Interrupt;
use plan::Plan;
use report::Report;
use worker::{Worker, Workers};

/// The command line.
#[derive(Debug, clap::Parser)]
#[command(about = "Measures the redirection against Istio's iptables rules and against none")]
pub struct Options {
    /// Write conditions and rows to this file too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fewer and shorter runs: within 3 minutes
    #[arg(long)]
    quick: bool,
    /// Only the steps that yield a row whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Turns to take, in place of the plan's
    #[arg(long, value_name = "N")]
    runs: Option<usize>,
    /// TCP congestion control in the pods, in place of the machine's; one that the machine allows
    #[arg(long, value_name = "NAME")]
    congestion_control: Option<String>,
    #[command(flatten)]
    worker: worker::Role,
    #[command(subcommand)]
    other: Option<Other>,
}

/// What else can be measured.
#[derive(Debug, clap::Subcommand)]
enum Other {
    /// The ADD path, from the start of the CNI plugin to its exit
    Add(add::Options),
}

/// Measures everything and prints the table; or serves as one of its workers.
pub fn run(options: &Options) -> anyhow::Result<()> {
    if let Some(Other::Add(options)) = &options.other {
        return add::run(options);
    }
    if let Some(role) = options.worker.role() {
        return worker::serve(role, options.congestion_control.as_deref());
    }
    let interrupt = Interrupt::watch()?;
    let plan = Plan::new(options.quick, options.runs, options.only.as_deref());
    let mut conditions = Conditions::read(&plan, options.congestion_control.as_deref());
    conditions.print();
    let mut report = Report::new(&plan);
    let measured = measure_all(&plan, &mut report, &interrupt, options.congestion_control.as_deref());
    if interrupt.happened() {
        anyhow::bail!("interrupted; everything that was started has ended");
    }
    measured?;
    conditions.finish();
    let rows = report.rows();
    table::print(&rows, conditions.is_real());
    if let Some(path) = &options.json {
        let json = serde_json::json!({ "conditions": conditions, "rows": rows });
        let text = serde_json::to_string_pretty(&json)? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The steps with traffic in turns, then pods in bulk, which leave much for the kernel to clean up.
fn measure_all(
    plan: &Plan,
    report: &mut Report,
    interrupt: &Interrupt,
    congestion_control: Option<&str>,
) -> anyhow::Result<()> {
    let started = Instant::now();
    for (steps, runs) in plan.parts() {
        let mut workers = Workers::new(interrupt, congestion_control);
        for run in 1..=runs {
            for step in steps {
                for (column, role) in step.roles() {
                    progress(started, run, runs, step.name(), role);
                    let worker: &mut Worker = workers.get(role)?;
                    let metrics =
                        worker.ask(step.measure()).with_context(|| format!("{role:?}: {}", step.name()))?;
                    report.add(step, column, &metrics);
                }
            }
        }
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "a long step shows progress")]
fn progress(started: Instant, run: usize, runs: usize, step: &str, role: worker::Of) {
    eprintln!("{:4} s  run {run}/{runs}  {step:<18} {role}", started.elapsed().as_secs());
}
