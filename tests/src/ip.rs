//! Topology by iproute2 scripts.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use crate::address::Family;

/// Runs the lines of `script` in the netns of that name, or in the calling thread's. Panics with
/// ip's words.
pub(crate) fn batch(netns: Option<&str>, script: &str) {
    run(Command::new("ip"), netns, script);
}

/// [`batch`] of `rule` and `route`, whose lines have no family of their own.
pub(crate) fn batch_of(family: Family, netns: Option<&str>, script: &str) {
    let mut command = Command::new("ip");
    command.arg(if family == Family::V4 { "-4" } else { "-6" });
    run(command, netns, script);
}

fn run(mut command: Command, netns: Option<&str>, script: &str) {
    if let Some(name) = netns {
        command.args(["-n", name]);
    }
    let command =
        command.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut ip = command.spawn().expect("iproute2's `ip` must be installed");
    let script: String = script.lines().map(|line| format!("{}\n", line.trim())).collect();
    let written = ip.stdin.take().map(|mut stdin| stdin.write_all(script.as_bytes()));
    written.transpose().expect("script to ip");
    let output = ip.wait_with_output().expect("wait for ip");
    assert!(
        output.status.success(),
        "ip -batch in netns {} failed: {}{}of the script\n{script}",
        netns.unwrap_or("of the test"),
        String::from_utf8_lossy(&output.stderr),
        String::from_utf8_lossy(&output.stdout),
    );
}
