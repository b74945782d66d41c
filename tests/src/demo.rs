//! The demo: one lab, every leg that traffic of a captured pod can take, and what became of it.
//!
//! ```text
//! demo ──► scene (lab, pods, servers) ◄── leg (who connects to whom, what is expected)
//!              │ observed                      │ expected
//!              └────────────► judge ◄──────────┘
//!                               └──► table ──► stdout
//! ```
//!
//! Then [`add`]: how a pod gets there.

mod add;
mod bpftool;
mod judge;
mod leg;
mod scene;
mod table;

use std::{
    env, fs,
    io::{self, IsTerminal as _, Write},
    panic::{self, AssertUnwindSafe},
    process::{Command, ExitCode, Stdio},
    sync::{Mutex, PoisonError},
    time::Instant,
};

use anyhow::{Context as _, anyhow, bail};
use culvert_dataplane::{Config, probe};

use crate::address::Family;
use leg::Leg;
use scene::Scene;
use table::Table;

/// What the lab said when it panicked.
static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// Argument that asks for the second part.
const ADD: &str = "add";
/// Lines of it that are worth a reader's time: a verifier's log can have thousands.
const LINES: usize = 20;

/// The process: prints to stdout, says on stderr why it failed.
pub fn run() -> ExitCode {
    // The lab panics where a test would fail. Here that becomes a message and an exit code.
    panic::set_hook(Box::new(|panic| {
        let text = panic.payload_as_str().unwrap_or("the lab failed").to_owned();
        SAID.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }));
    let part = if env::args().nth(1).as_deref() == Some(ADD) { add::show } else { show };
    match part(&mut io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // When stderr is closed nobody is left to be told.
            writeln!(io::stderr(), "demo: {error:#}").unwrap_or_default();
            ExitCode::FAILURE
        }
    }
}

fn show(out: &mut dyn Write) -> anyhow::Result<()> {
    let begin = Instant::now();
    writeln!(
        out,
        "Culvert: two captured pods beside one that is not, real traffic, and what became of it\n"
    )?;
    let scene = without_panic(Scene::start).map_err(|error| {
        let config = Config { host_netns: "/proc/self/ns/net".into(), ..Config::default() };
        anyhow!("the lab does not start: {error:#}\n\nWhat this machine offers:\n{}", probe::run(&config))
    })?;
    head(&scene, begin, out)?;
    without_panic(AssertUnwindSafe(|| play(&scene, out)))??;
    drop(scene);
    enter(out)?;
    writeln!(out, "\nEverything as expected, in {:.1} s.", begin.elapsed().as_secs_f32())?;
    Ok(())
}

/// The second part, as a process: one has one lab.
fn enter(out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out)?;
    out.flush()?;
    let mut part = Command::new(env::current_exe().context("path of this program")?);
    // What the agent logs is of interest only when something failed.
    let ended = part.arg(ADD).stdout(Stdio::inherit()).output().context("cannot start the second part")?;
    if !ended.status.success() {
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        let told: Vec<_> = said.lines().filter(|line| !line.contains("  INFO ")).collect();
        let last = told.get(told.len().saturating_sub(LINES)..).unwrap_or_default();
        bail!("{}", last.join("\n").replacen("demo: ", "", 1));
    }
    Ok(())
}

fn head(scene: &Scene, begin: Instant, out: &mut dyn Write) -> anyhow::Result<()> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let ztunnel = match scene.ztunnel_is_real() {
        true => "the real one, from ZTUNNEL_BIN",
        false => {
            "a stand-in with the same sockets, without TLS (ZTUNNEL_BIN=/path/to/ztunnel for the real one)"
        }
    };
    writeln!(out, "kernel   {}", kernel.trim())?;
    writeln!(out, "ztunnel  {ztunnel}")?;
    for (pod, captured) in [(&scene.blue, true), (&scene.green, true), (&scene.plain, false)] {
        let state = if captured { "captured" } else { "not captured" };
        let (name, v4, v6) = (pod.name(), pod.v4(), pod.v6());
        writeln!(out, "{name:<8} pod, {state:<12}  {v4}  {v6}  netns cookie {}", pod.cookie())?;
    }
    writeln!(out, "ready in {:.1} s\n", begin.elapsed().as_secs_f32())?;
    Ok(())
}

fn play(scene: &Scene, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut failed = 0;
    let mut table = Table::start(out, io::stdout().is_terminal())?;
    failed += traffic(scene, &leg::SERVING, &mut table)?;
    scene.lab.ztunnel().kill();
    failed += traffic(scene, &leg::WITHOUT_ZTUNNEL, &mut table)?;
    scene.lab.ztunnel().restart();
    failed += traffic(scene, &leg::RESTARTED, &mut table)?;
    bpftool::show(scene, out)?;
    scene.release()?;
    if failed > 0 {
        bail!("{failed} connections were not as expected, see FAILED above");
    }
    Ok(())
}

/// Returns how many connections were not as expected.
fn traffic(scene: &Scene, legs: &[Leg], table: &mut Table<'_>) -> io::Result<usize> {
    let mut failed = 0;
    for leg in legs {
        table.title(leg.title)?;
        for family in Family::BOTH {
            let observed = scene.perform(leg, family);
            let wrong = judge::judge(&scene.expectation(leg, family), &observed);
            table.row(&table::row(&leg.action.describe(), family, &observed), &wrong)?;
            failed += usize::from(!wrong.is_empty());
        }
    }
    Ok(failed)
}

/// What the lab says when it panics, as an error.
fn without_panic<T>(work: impl FnOnce() -> T + panic::UnwindSafe) -> anyhow::Result<T> {
    panic::catch_unwind(work).map_err(|_payload| {
        let said = SAID.lock().unwrap_or_else(PoisonError::into_inner).join("\n");
        let mut lines: Vec<_> = said.lines().take(LINES).collect();
        if said.lines().nth(LINES).is_some() {
            lines.push("…");
        }
        anyhow!("{}", lines.join("\n"))
    })
}
