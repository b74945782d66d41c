//! The node: agent, stand-in, pods, and a container runtime that takes the time.

use std::{
    path::{Path, PathBuf},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

use super::{process, steps};
use crate::{
    cni::Runtime,
    lab::Lab,
    node_agent::{NodeAgent, Start},
    pod::Pod,
    ztunnel::{Behaviour, Ztunnel},
};

/// A namespace that no selector matches.
const OUTSIDE: &str = "plain";
/// Between looks at what should come to rest.
const SETTLE: Duration = Duration::from_millis(500);
/// For it to do so.
const REST: Duration = Duration::from_secs(15);
const RESTART: Duration = Duration::from_secs(60);
/// Between looks whether it serves.
const GLANCE: Duration = Duration::from_millis(1);

/// Fields end in this order.
pub(super) struct Node<'a> {
    agent: NodeAgent<'a>,
    _ztunnel: Ztunnel,
    pods: Vec<Pod>,
    plugin: PathBuf,
    lab: &'a Lab,
}

impl<'a> Node<'a> {
    pub(super) fn start(lab: &'a Lab, plugin: &Path, pods: usize) -> anyhow::Result<Self> {
        let agent = start(lab).start();
        let ztunnel = lab.start_stand_in(Behaviour { quiet: true, ..Behaviour::default() });
        let pods = (0..pods).map(|number| lab.pod(&format!("p{number}"))).collect();
        let plugin = plugin.canonicalize().context("the plugin")?;
        Ok(Self { agent, _ztunnel: ztunnel, pods, plugin, lab })
    }

    pub(super) fn pods(&self) -> &[Pod] {
        &self.pods
    }

    fn runtime(&self, pod: &Pod) -> Runtime {
        self.agent.runtime(pod).program(&self.plugin)
    }

    /// Milliseconds from the start of the plugin to its exit.
    pub(super) fn add(&self, pod: &Pod) -> anyhow::Result<f64> {
        run(&self.runtime(pod), "ADD")
    }

    pub(super) fn del(&self, pod: &Pod) -> anyhow::Result<f64> {
        run(&self.runtime(pod), "DEL")
    }

    /// The ADD of a pod that is none of the mesh.
    pub(super) fn add_outside(&self, pod: &Pod) -> anyhow::Result<f64> {
        run(&self.runtime(pod).as_pod(OUTSIDE, pod.name()), "ADD")
    }

    /// The plugin's line about the steps of an ADD.
    pub(super) fn add_telling_steps(&self, pod: &Pod) -> anyhow::Result<String> {
        let log = self.agent.log();
        log.clear();
        self.runtime(pod).key("logLevel", "debug").add().succeeds();
        let line =
            log.wait_within(REST, |lines| lines.iter().find(|line| line.contains(steps::LINE)).cloned());
        line.context("the plugin tells nothing of its steps")
    }

    /// Starts all at once; each one's time, and how many failed.
    pub(super) fn add_at_once(&self, pods: &[Pod]) -> (Vec<f64>, usize) {
        let begin = Barrier::new(pods.len());
        let times: Vec<_> = thread::scope(|scope| {
            let threads = pods.iter().map(|pod| {
                let (runtime, begin) = (self.runtime(pod), &begin);
                scope.spawn(move || {
                    begin.wait();
                    run(&runtime, "ADD")
                })
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().expect("a runtime's thread")).collect()
        });
        let lost = times.iter().filter(|time| time.is_err()).count();
        (times.into_iter().flatten().collect(), lost)
    }

    /// How many pods the agent knows.
    pub(super) fn enrolled(&self) -> usize {
        self.agent.dump().len()
    }

    /// Peak of a plugin that waits for its answer.
    pub(super) fn plugin_rss(&self, pod: &Pod) -> anyhow::Result<f64> {
        self.agent.freeze();
        let running = self.runtime(pod).begin("ADD");
        thread::sleep(SETTLE);
        let peak = process::peak(running.pid());
        self.agent.thaw();
        running.end();
        Ok(peak)
    }

    pub(super) fn settled_descriptors(&self) -> f64 {
        settled(|| process::descriptors(self.agent.pid()))
    }

    pub(super) fn settled_rss(&self) -> f64 {
        settled(|| process::rss(self.agent.pid()))
    }

    /// Ends the agent and starts another: from its exec until it answers for the node.
    pub(super) fn restart(&mut self) -> anyhow::Result<Duration> {
        self.agent.terminate();
        ensure!(self.agent.wait_for_exit().success(), "the agent did not end well");
        let begun = Instant::now();
        self.agent = start(self.lab).launch();
        while !self.agent.serves() {
            let log = self.agent.log();
            ensure!(begun.elapsed() < RESTART, "the agent does not serve again: {:#?}", log.all());
            thread::sleep(GLANCE);
        }
        Ok(begun.elapsed())
    }
}

/// As in production, but for the lines of the plugin that tell of steps; it sends them when asked to.
fn start(lab: &Lab) -> Start<'_> {
    lab.node_agent().log("info,culvert_cni=debug").quiet()
}

fn run(runtime: &Runtime, verb: &str) -> anyhow::Result<f64> {
    let ended = runtime.begin(verb).end();
    ensure!(ended.status.success(), "{verb}: {}{}", ended.stdout, ended.stderr);
    Ok(ended.took.as_secs_f64() * 1e3)
}

/// Once it is the same at two looks.
fn settled(look: impl Fn() -> f64) -> f64 {
    let begun = Instant::now();
    let mut last = look();
    loop {
        thread::sleep(SETTLE);
        let now = look();
        if now == last || begun.elapsed() > REST {
            return now;
        }
        last = now;
    }
}
