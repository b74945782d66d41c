//! The processes that measure: one for each lab, told what to do by lines of JSON.

use std::{
    collections::BTreeMap,
    env, fmt,
    io::{self, BufRead as _, BufReader, Lines, Write as _},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

use anyhow::Context as _;
use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};

use super::{
    interrupt::{self, Interrupt, Stdin},
    measure::{Measure, Metrics},
    subject::Subject,
};

/// How traffic comes to ztunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(super) enum Variant {
    /// Not at all.
    Direct,
    /// Istio's rules.
    Iptables,
    /// Ours.
    Culvert,
    /// Ours, packets on `lo` as large as usual.
    CulvertWithoutBigTcp,
}

/// Which lab a worker has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Of {
    pub(super) variant: Variant,
    /// For pods in bulk: no ztunnel, no traffic.
    pub(super) bulk: bool,
}

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.variant.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

/// The part of the command line by which the benchmark starts its workers.
#[derive(Debug, clap::Args)]
pub(super) struct Role {
    /// Serve measurements of this variant
    #[arg(long, hide = true)]
    worker: Option<Variant>,
    /// A lab for pods in bulk
    #[arg(long, hide = true)]
    bulk: bool,
}

impl Role {
    pub(super) fn role(&self) -> Option<Of> {
        self.worker.map(|variant| Of { variant, bulk: self.bulk })
    }
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Metrics(Metrics),
    Failed(String),
}

/// A running worker. Dropping it ends and awaits it.
pub(super) struct Worker {
    child: Child,
    stdin: Stdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    fn start(of: Of, interrupt: &Interrupt, congestion_control: Option<&str>) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        // Ctrl-C goes to the benchmark alone, which then ends its workers one by one.
        command.arg(format!("--worker={of}")).process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.args(congestion_control.map(|name| format!("--congestion-control={name}")));
        if of.bulk {
            command.arg("--bulk");
        }
        let mut child = command.spawn().context("cannot start a worker")?;
        let stdout = child.stdout.take().context("a pipe")?;
        let stdin: Stdin = Arc::new(Mutex::new(child.stdin.take()));
        interrupt.add(&stdin);
        Ok(Self { child, stdin, answers: BufReader::new(stdout).lines() })
    }

    pub(super) fn ask(&mut self, measure: &Measure) -> anyhow::Result<Metrics> {
        if let Some(stdin) = self.stdin.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            writeln!(stdin, "{}", serde_json::to_string(measure)?)?;
        }
        let answer = self.answers.next().context("the worker ended")??;
        match serde_json::from_str(&answer).with_context(|| format!("the worker says {answer:?}"))? {
            Answer::Metrics(metrics) => Ok(metrics),
            Answer::Failed(reason) => anyhow::bail!(reason),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        interrupt::close(&self.stdin);
        self.child.wait().ok();
    }
}

/// The workers of one part of the plan, started when they are first needed.
pub(super) struct Workers<'a> {
    interrupt: &'a Interrupt,
    congestion_control: Option<&'a str>,
    running: BTreeMap<Of, Worker>,
}

impl<'a> Workers<'a> {
    pub(super) fn new(interrupt: &'a Interrupt, congestion_control: Option<&'a str>) -> Self {
        Self { interrupt, congestion_control, running: BTreeMap::new() }
    }

    pub(super) fn get(&mut self, of: Of) -> anyhow::Result<&mut Worker> {
        use std::collections::btree_map::Entry;
        anyhow::ensure!(!self.interrupt.happened(), "interrupted");
        Ok(match self.running.entry(of) {
            Entry::Occupied(running) => running.into_mut(),
            Entry::Vacant(place) => place.insert(Worker::start(of, self.interrupt, self.congestion_control)?),
        })
    }
}

/// The process of a worker: until stdin ends, which also ends what takes long.
pub(super) fn serve(of: Of, congestion_control: Option<&str>) -> anyhow::Result<()> {
    let ended = Arc::new(AtomicBool::new(false));
    let (lines, to_do) = mpsc::channel();
    thread::spawn({
        let ended = Arc::clone(&ended);
        move || {
            for line in io::stdin().lines().map_while(Result::ok) {
                if lines.send(line).is_err() {
                    break;
                }
            }
            ended.store(true, Ordering::Relaxed);
        }
    });
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(io::stderr).init();
    let subject = Subject::start(of, congestion_control)?;
    for line in to_do {
        let measure = serde_json::from_str(&line)?;
        let answer = match subject.measure(&measure, &ended) {
            Ok(metrics) => Answer::Metrics(metrics),
            Err(error) => Answer::Failed(format!("{error:#}")),
        };
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}
