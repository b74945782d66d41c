//! A ztunnel process: the stand-in, or the real one.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use nix::{sys::signal::Signal, unistd::Pid};

use crate::{
    agent::{Agent, Note},
    event::Event,
    host::Host,
    journal::{DEADLINE, Journal},
    process::{self, Process},
    real,
    saw::{Accepted, Saw},
};

/// The real one loads certificates and configuration first.
const START: Duration = Duration::from_secs(20);
/// How long the agent may take to notice an end.
const NOTICE: Duration = Duration::from_secs(1);

/// How a ztunnel is to behave. The real one knows only `tunnel`, `services`,
/// `v4_only` and `no_transparent`.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// Addresses reached through their port 15008.
    pub tunnel: Vec<IpAddr>,
    /// Addresses of services, and the pod's address and port each leads to.
    pub services: Vec<(SocketAddr, SocketAddr)>,
    /// Listens on 0.0.0.0 only.
    pub v4_only: bool,
    /// Does not set IP_TRANSPARENT.
    pub no_transparent: bool,
    /// Waits before every ack.
    pub ack_delay: Duration,
    /// Never acks.
    pub silent: bool,
    /// Is silent, slow or garbled only after this many requests: the introduction and the end of an empty
    /// snapshot are two.
    pub sane_for: u32,
    /// Refuses these pods with these texts.
    pub nack: Vec<(String, String)>,
    /// Says nothing to these pods.
    pub ignore: Vec<String>,
    /// Ends at the Nth request, the introduction being the first.
    pub die_after: Option<u32>,
    /// Answers with what is no message.
    pub garbage: bool,
    /// Tells nothing of connections: for measurements.
    pub quiet: bool,
    /// Threads that serve connections; 0: as many as ztunnel has.
    pub threads: usize,
}

impl Behaviour {
    /// Whether it can be expected to finish its snapshot.
    fn is_sane(&self) -> bool {
        self.sane_for >= 2 || !self.silent && !self.garbage && self.die_after.is_none()
    }

    fn arguments(&self) -> Vec<String> {
        let switches = [
            (self.v4_only, "--v4-only"),
            (self.no_transparent, "--no-transparent"),
            (self.silent, "--silent"),
            (self.garbage, "--garbage"),
            (self.quiet, "--quiet"),
        ];
        let switches = switches.iter().filter(|(set, _)| *set).map(|(_, name)| (*name).to_owned());
        let mut arguments: Vec<_> = switches.collect();
        arguments.push(format!("--ack-delay={}", self.ack_delay.as_millis()));
        arguments.push(format!("--sane-for={}", self.sane_for));
        arguments.extend(self.ignore.iter().map(|pod| format!("--ignore={pod}")));
        arguments.extend(self.tunnel.iter().map(|ip| format!("--tunnel={ip}")));
        arguments.extend(self.nack.iter().map(|(pod, text)| format!("--nack={pod}={text}")));
        arguments.extend(self.services.iter().map(|(vip, endpoint)| format!("--service={vip}={endpoint}")));
        arguments.extend(self.die_after.map(|count| format!("--die-after={count}")));
        if self.threads > 0 {
            arguments.push(format!("--threads={}", self.threads));
        }
        arguments
    }
}

/// A ztunnel in a netns of its own. Dropping it kills the process.
#[derive(Debug)]
pub struct Ztunnel {
    host: Host,
    behaviour: Behaviour,
    /// Of the real one.
    binary: Option<PathBuf>,
    socket: PathBuf,
    directory: PathBuf,
    agent: Arc<Agent>,
    events: Journal<Event>,
    process: Mutex<Process>,
}

impl Ztunnel {
    pub(crate) fn start(
        host: Host,
        behaviour: Behaviour,
        binary: Option<PathBuf>,
        socket: &Path,
        directory: &Path,
        agent: &Arc<Agent>,
    ) -> Self {
        let events = Journal::default();
        let process = start(&host, command(binary.as_deref(), &behaviour, socket, directory), &events);
        let ztunnel = Self {
            host,
            behaviour,
            binary,
            socket: socket.to_owned(),
            directory: directory.to_owned(),
            agent: Arc::clone(agent),
            events,
            process: Mutex::new(process),
        };
        ztunnel.wait_until_ready(0);
        ztunnel
    }

    /// Whether it is the real ztunnel: [`Behaviour`] and the events of connections are limited then.
    pub fn is_real(&self) -> bool {
        self.binary.is_some()
    }

    /// Process id.
    pub fn pid(&self) -> Pid {
        self.process().pid
    }

    /// Everything it has told until now. The stand-in is asked to tell all it knows; the real one's log
    /// may be behind, so use the waiting methods where a test must run with both.
    pub fn saw(&self) -> Saw {
        self.flush();
        Saw::new(self.events.all())
    }

    /// Uids of the pods that it has begun to serve, in order. Only the stand-in tells.
    pub fn added(&self) -> Vec<String> {
        self.saw().events().iter().filter_map(Event::added).map(str::to_owned).collect()
    }

    /// Forgets everything it has told until now.
    pub fn forget(&self) {
        self.flush();
        self.events.clear();
    }

    /// Waits for an event, past ones since [`forget`](Self::forget) included. Panics with `what` after
    /// [`DEADLINE`].
    pub fn wait_for(&self, what: &str, fits: impl Fn(&Event) -> bool) -> Event {
        self.events.wait_for(what, fits)
    }

    /// Waits until it has accepted this many connections on a listener (since [`forget`](Self::forget)),
    /// and returns them.
    pub fn wait_for_accepted(&self, listener: u16, count: usize) -> Vec<Accepted> {
        self.events.wait_until(&format!("{count} connections to {listener}"), |events| {
            let accepted = Saw::new(events.to_vec()).accepted_on(listener);
            (accepted.len() >= count).then_some(accepted)
        })
    }

    /// SIGKILL. Returns when it is gone and the agent has noticed.
    pub fn kill(&self) {
        let before = self.agent.notes().all();
        self.process().kill();
        // It may be connected to an agent in a process of its own.
        if connections(&before) > ends(&before) {
            self.agent.notes().wait_within(NOTICE, |notes| (ends(notes) > ends(&before)).then_some(()));
        }
    }

    /// SIGTERM. Returns at once: listeners close now, connections within 5 s.
    pub fn terminate(&self) {
        self.process().signal(Signal::SIGTERM);
    }

    /// Waits for the end of the process.
    pub fn wait_for_exit(&self, limit: Duration) -> ExitStatus {
        self.process().wait(limit).unwrap_or_else(|| panic!("ztunnel is still alive after {limit:?}"))
    }

    /// Starts it again after its end, and waits until it serves every pod.
    pub fn restart(&self) {
        assert!(self.process().status().is_some(), "ztunnel still runs");
        let before = self.snapshots();
        let command = command(self.binary.as_deref(), &self.behaviour, &self.socket, &self.directory);
        let process = start(&self.host, command, &self.events);
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = process;
        self.wait_until_ready(before);
    }

    /// Waits for the end of a snapshot, of the stand-in for one after the first `before`.
    fn wait_until_ready(&self, before: usize) {
        if !self.behaviour.is_sane() {
            return;
        }
        let (process, deadline) = (self.process(), Instant::now() + START);
        let ready = || if self.is_real() { real::is_ready(&self.host) } else { self.snapshots() > before };
        while !ready() {
            let ended = process.wait(Duration::from_millis(2));
            assert!(ended.is_none(), "ztunnel ended: {ended:?}");
            assert!(Instant::now() < deadline, "ztunnel is not ready: {:#?}", self.agent.notes().all());
        }
    }

    fn flush(&self) {
        let process = self.process();
        if self.is_real() || process.status().is_some() {
            return;
        }
        let flushed = |events: &[Event]| events.iter().filter(|event| **event == Event::Flushed).count();
        let before = flushed(&self.events.all());
        process.signal(Signal::SIGUSR1);
        let answer = self.events.wait_within(DEADLINE, |events| (flushed(events) > before).then_some(()));
        assert!(answer.is_some() || process.status().is_some(), "the stand-in does not answer");
    }

    fn process(&self) -> Process {
        self.process.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn snapshots(&self) -> usize {
        self.events.all().iter().filter(|event| **event == Event::Ready).count()
    }
}

impl Drop for Ztunnel {
    fn drop(&mut self) {
        self.process().kill();
    }
}

/// A line of its output.
#[expect(clippy::print_stderr, reason = "what ztunnel says belongs to the test's output")]
fn hear(line: &str, events: &Journal<Event>) {
    match serde_json::from_str(line).ok().or_else(|| real::event(line)) {
        Some(event) => events.push(event),
        None if line.starts_with(real::CHATTER) => {}
        None => eprintln!("ztunnel: {line}"),
    }
}

fn start(host: &Host, command: Command, events: &Journal<Event>) -> Process {
    let events = events.clone();
    Process::start(host, command, move |line| hear(&line, &events)).0
}

fn command(binary: Option<&Path>, behaviour: &Behaviour, socket: &Path, directory: &Path) -> Command {
    if let Some(binary) = binary {
        return real::command(binary, behaviour, socket, directory);
    }
    let mut command = Command::new(process::program("stand_in"));
    command.arg("--socket").arg(socket).args(behaviour.arguments());
    command
}

fn connections(notes: &[Note]) -> usize {
    let begun = |note: &&Note| matches!(note, Note::Connected(_) | Note::Rejected { .. });
    notes.iter().filter(begun).count()
}

fn ends(notes: &[Note]) -> usize {
    notes.iter().filter(|note| matches!(note, Note::Disconnected(_) | Note::Rejected { .. })).count()
}
