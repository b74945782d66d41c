//! An agent that can be killed: dataplane and ZDS server in a process of their own.
//!
//! It is told what to do by lines on stdin and answers each with a line on stdout.

use std::{
    fmt,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{ChildStdin, Command},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use culvert_dataplane::Config;
use nix::unistd::Pid;
use tokio::runtime::Runtime;

use crate::{
    agent::Agent,
    host::Host,
    journal::{DEADLINE, Journal},
    lab::start_dataplane,
    pod::{self, Pod},
    process::{self, Process},
    topology,
};

const OK: &str = "ok";
/// Loading programs takes its time on a busy machine.
const START: Duration = Duration::from_secs(20);
/// Between looks at whether it still lives.
const GLANCE: Duration = Duration::from_millis(50);

/// A running agent. Dropping it kills the process.
#[derive(Debug)]
pub struct AgentProcess {
    process: Process,
    stdin: Mutex<ChildStdin>,
    answers: Journal<String>,
}

impl AgentProcess {
    pub(crate) fn start(node: &Host, config: &Config, socket: &Path, resume: &[&Pod]) -> Self {
        let mut command = Command::new(process::program("lab_agent"));
        command.arg("--socket").arg(socket);
        command.arg("--bpffs").arg(&config.bpffs).arg("--cgroup").arg(&config.cgroup);
        command.arg("--host-netns").arg(&config.host_netns);
        if config.big_tcp {
            command.arg("--big-tcp");
        }
        command.args(resume.iter().map(|pod| format!("--resume={}", name(pod))));
        let answers = Journal::default();
        let (process, stdin) = Process::start(node, command, {
            let answers = answers.clone();
            move |line| answers.push(line)
        });
        let agent = Self { process, stdin: Mutex::new(stdin), answers };
        agent.expect_answer(1, "start");
        agent
    }

    /// Process id.
    pub fn pid(&self) -> Pid {
        self.process.pid
    }

    /// All steps of [`Pod::capture`]. Panics on failure.
    pub fn capture(&self, pod: &Pod) {
        self.tell(&format!("capture {}", name(pod)));
    }

    /// All steps of [`Pod::release`]. Panics on failure.
    pub fn release(&self, pod: &Pod) {
        self.tell(&format!("release {}", name(pod)));
    }

    /// SIGKILL.
    pub fn kill(self) {
        self.process.kill();
    }

    /// SIGTERM, and waits for the end.
    pub fn terminate(self) {
        self.process.signal(nix::sys::signal::Signal::SIGTERM);
        assert!(self.process.wait(DEADLINE).is_some(), "the agent does not end");
    }

    fn tell(&self, line: &str) {
        let answered = self.answers.len();
        let mut stdin = self.stdin.lock().expect("a whole command");
        writeln!(stdin, "{line}").expect("the agent listens");
        self.expect_answer(answered + 1, line);
    }

    fn expect_answer(&self, number: usize, to: &str) {
        let deadline = Instant::now() + START;
        let answer = loop {
            let answer = self.answers.wait_within(GLANCE, |answers| answers.get(number - 1).cloned());
            if let Some(answer) = answer {
                break answer;
            }
            assert!(self.process.status().is_none(), "the agent ended at {to}: {:?}", self.process.status());
            assert!(Instant::now() < deadline, "no answer to {to} within {START:?}");
        };
        assert_eq!(answer, OK, "{to}");
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        self.process.kill();
    }
}

fn name(pod: &Pod) -> String {
    format!("{}={}", pod.name(), pod.number())
}

/// The command line.
#[derive(Debug, clap::Parser)]
pub struct Options {
    /// ZDS socket to serve
    #[arg(long)]
    socket: PathBuf,
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
    #[arg(long)]
    big_tcp: bool,
    /// Pods that an earlier agent captured
    #[arg(long, value_name = "NAME=NUMBER")]
    resume: Vec<String>,
}

/// The process: until stdin ends.
pub fn serve(options: &Options) -> anyhow::Result<()> {
    let config = Config {
        bpffs: options.bpffs.clone(),
        cgroup: options.cgroup.clone(),
        host_netns: options.host_netns.clone(),
        proc: "/proc".into(),
        big_tcp: options.big_tcp,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let dataplane = start_dataplane(&config);
    let mut workloads = Vec::new();
    for named in &options.resume {
        let (host, number) = find(named, &runtime)?;
        let addresses = [host.v4().into(), host.v6().into()];
        dataplane.resume(host.netns(), &addresses)?;
        workloads.push(pod::workload(&host, number));
    }
    let agent = Agent::start(&options.socket, Some(dataplane), workloads, runtime.handle());
    answer(OK)?;
    for line in io::stdin().lines() {
        let line = line?;
        let (verb, named) = line.split_once(' ').context("a verb and a pod")?;
        let (host, number) = find(named, &runtime)?;
        let pod = Pod::new(host, number, Arc::clone(&agent));
        match verb {
            "capture" => say(pod.capture(culvert_dataplane::Options::default()))?,
            "release" => say(pod.release())?,
            _ => bail!("unknown verb {verb}"),
        }
    }
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

fn find(named: &str, runtime: &Runtime) -> anyhow::Result<(Host, u16)> {
    let (name, number) = named.split_once('=').context("NAME=NUMBER")?;
    let number = number.parse()?;
    Ok((Host::open(name, topology::pod_addresses(number), runtime.handle().clone()), number))
}

fn say<T>(outcome: Result<T, impl fmt::Display>) -> io::Result<()> {
    match outcome {
        Ok(_) => answer(OK),
        Err(error) => answer(&error.to_string()),
    }
}

fn answer(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
