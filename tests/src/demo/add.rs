//! How a pod gets into the mesh: a chain of CNI plugins, run as a container runtime runs it, with the agent
//! as users start it. One pod is taken in, and one is refused.

use std::{
    fs,
    io::{self, Write},
    panic::AssertUnwindSafe,
    path::Path,
    process::Output,
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::{table::WIDTH, without_panic};
use crate::{
    chain::{Chain, Plugins},
    host::Host,
    journal::DEADLINE,
    lab::Lab,
    node_agent::NodeAgent,
    ztunnel::{Behaviour, Ztunnel},
};

/// Seconds that an ADD may take.
const PATIENCE: u64 = 3;
/// Names that the real ztunnel's configuration has.
const TAKEN: (&str, &str) = ("pod-40", "uid-of-pod-40");
const REFUSED: (&str, &str) = ("pod-41", "uid-of-pod-41");

/// Rows of the table of times: a name, the steps of the plugin's account in it, and what it is.
const ROWS: [(&str, &[&str], &str); 6] = [
    ("prepare", &["prepare"], "reads its environment, configuration, previous result"),
    ("connect", &["connect"], "to the agent's socket"),
    (
        "attach",
        &["membership", "turn", "netns", "register", "attach", "record"],
        "the agent: membership, netns, maps, routing, program, record",
    ),
    ("ztunnel", &["ztunnel"], "opens its sockets in the pod and acknowledges"),
    ("self-test", &["self-test"], "a connection of the pod arrives at ztunnel's socket"),
    ("reply", &["reply"], "the rest of request and answer"),
];

/// The process: prints to stdout.
pub(super) fn show(out: &mut dyn Write) -> anyhow::Result<()> {
    without_panic(AssertUnwindSafe(|| {
        let lab = Lab::bare();
        let agent = lab.node_agent().patience(PATIENCE).start();
        // Level debug is the plugin's for its times.
        agent.ask("admin.sock", "PUT", "/log-level", "info,culvert_cni=debug").context("log level")?;
        let ztunnel = lab.start_ztunnel(Behaviour::default());
        let chain = Chain::new(&lab, Plugins::Debian);
        chain.set("timeoutSeconds", PATIENCE);
        let times = lab.directory().join("times");
        chain.time(&["bridge", "culvert-cni"]);
        let scene = Scene { times: &times, lab: &lab, agent: &agent, ztunnel: &ztunnel, chain: &chain };
        scene.take_in(out)?;
        scene.refuse(out)
    }))?
}

struct Scene<'a> {
    lab: &'a Lab,
    agent: &'a NodeAgent<'a>,
    ztunnel: &'a Ztunnel,
    chain: &'a Chain,
    /// What the plugins took.
    times: &'a Path,
}

impl Scene<'_> {
    fn take_in(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        writeln!(
            out,
            "A pod enters the mesh: cnitool runs the plugins bridge and culvert-cni, as a runtime does"
        )?;
        let pod = self.lab.empty("entering");
        let result = self
            .cnitool("add", &pod, TAKEN)
            .map_err(|error| anyhow::anyhow!("cnitool add failed: {error}"))?;
        let result: Value = serde_json::from_str(&result).context("result of the chain")?;
        let addresses = result["ips"].as_array().into_iter().flatten();
        let addresses: Vec<_> = addresses.filter_map(|ip| ip["address"].as_str()).collect();
        let noted = fs::read_to_string(self.times).context("times of the plugins")?;
        self.times(&noted, out)?;
        ensure!(self.agent.dump().len() == 1, "the agent does not know the pod");
        writeln!(out, "  pod default/{} with {} is in the mesh", TAKEN.0, addresses.join(", "))?;
        self.first_connection(&pod, out)
    }

    fn cnitool(&self, verb: &str, pod: &Host, named: (&str, &str)) -> Result<String, String> {
        let mut command = self.chain.cnitool(verb, &pod.netns_path(), named);
        printed(command.env("LAB_TIMES", self.times).output())
    }

    fn times(&self, noted: &str, out: &mut dyn Write) -> anyhow::Result<()> {
        let of_plugin = |name: &str| {
            let line = noted.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" ADD "));
            let micros = line.and_then(|micros| micros.parse::<f64>().ok());
            micros.map(|micros| micros / 1e3).with_context(|| format!("{name} did not run"))
        };
        let (bridge, ours) = (of_plugin("bridge")?, of_plugin("culvert-cni")?);
        let steps = self.steps()?;
        let total = steps.iter().find(|(name, _)| name == "total").context("no total")?.1;
        row(out, "  bridge", bridge, "gives the pod its interface and addresses")?;
        row(out, "  culvert-cni", ours, "of these:")?;
        row(out, "    exec", (ours - total).max(0.0), "start and end of its process")?;
        for (name, parts, tells) in ROWS {
            let own = steps.iter().filter(|(step, _)| parts.contains(&step.as_str()));
            row(out, &format!("    {name}"), own.map(|(_, time)| time).sum(), tells)?;
        }
        Ok(())
    }

    /// The plugin's own account, which it logs by the agent: steps and milliseconds.
    fn steps(&self) -> anyhow::Result<Vec<(String, f64)>> {
        const ACCOUNT: &str = "the agent's answer: enrolled; ";
        let line = self
            .agent
            .log()
            .wait_within(DEADLINE, |log| log.iter().find(|line| line.contains(ACCOUNT)).cloned());
        let line = line.context("the plugin's account is not in the agent's log")?;
        let (_, account) = line.split_once(ACCOUNT).unwrap_or_default();
        let steps = account.split(", ").map(|step| {
            let mut words = step.split(' ');
            let (name, time) = words.next().zip(words.next())?;
            Some((name.to_owned(), time.parse().ok()?))
        });
        steps.collect::<Option<_>>().with_context(|| format!("cannot read {account:?}"))
    }

    fn first_connection(&self, pod: &Host, out: &mut dyn Write) -> anyhow::Result<()> {
        let plain = self.lab.pod("plain");
        let server = plain.serve("[::]:80");
        let wire = self.lab.wire();
        let mut connection = pod.connect((plain.v4(), 80)).context("the pod's first connection")?;
        let answer = connection.try_say(b"hello").context("the pod's first words")?;
        let client = connection.local_addr();
        ensure!(answer == b"hello", "the server answered {answer:?}");
        let accepted = self.ztunnel.wait_for_accepted(15001, 1);
        ensure!(accepted[0].peer == client, "ztunnel took {} for the client, not {client}", accepted[0].peer);
        let seen = server.next_accepted().peer.ip();
        ensure!(seen == client.ip(), "the server saw {seen}, not {}", client.ip());
        let clear = wire.stop().only(|frame| frame.is_syn() && frame.source == client);
        ensure!(clear.is_empty(), "its SYN left the pod: {clear:?}");
        writeln!(
            out,
            "  its first connection, to plain:80: taken by 15001, the server saw {seen}, no SYN of its own on a wire"
        )?;
        Ok(())
    }

    fn refuse(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        writeln!(
            out,
            "\nztunnel is killed, and a pod is to enter within {PATIENCE} s. The runtime, and so the pod's event, is told:"
        )?;
        self.ztunnel.kill();
        let pod = self.lab.empty("refused");
        let (in_kernel, in_pod) = (self.lab.kernel_footprint(), pod.footprint());
        let Err(error) = self.cnitool("add", &pod, REFUSED) else {
            bail!("an ADD without a ztunnel succeeded")
        };
        // Before it come cnitool's own usage and flags.
        let error = error.lines().last().unwrap_or_default();
        for part in ["ztunnel does not serve the pod", REFUSED.0, "What to do: "] {
            ensure!(error.contains(part), "{part:?} is not in the message: {error}");
        }
        for line in wrapped(error, WIDTH - 2) {
            writeln!(out, "  {line}")?;
        }
        // As a runtime does after a failed ADD.
        self.cnitool("del", &pod, REFUSED).map_err(|error| anyhow::anyhow!("cnitool del failed: {error}"))?;
        ensure!(self.agent.dump().len() == 1, "the agent still knows the refused pod");
        ensure!(self.agent.records().len() == 1, "the refused pod has a record");
        ensure!(self.chain.addresses_in_use().len() == 2, "the refused pod's addresses are not free again");
        in_kernel.expect_same(&self.lab.kernel_footprint());
        in_pod.expect_same(&pod.footprint());
        writeln!(out, "  nothing of it is left: no record, no pin, no map entry, no rule, no address")?;
        Ok(())
    }
}

fn row(out: &mut dyn Write, name: &str, milliseconds: f64, tells: &str) -> io::Result<()> {
    writeln!(out, "{name:<16}{milliseconds:>8.2} ms   {tells}")
}

/// Standard output, or what was said instead.
fn printed(output: io::Result<Output>) -> Result<String, String> {
    let output = output.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Lines of whole words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_wrapped_at_words_and_keeps_them() {
        let lines = wrapped("pod default/web: step failed, a-word-that-is-long", 12);
        assert_eq!(lines, ["pod", "default/web:", "step failed,", "a-word-that-is-long"]);
    }
}
