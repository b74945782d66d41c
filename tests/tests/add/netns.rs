//! Which network namespace an ADD means: by every path a runtime may give, and no other.

use std::process::{Child, Command};

use culvert_tests::{Behaviour, Lab, NodeAgent, Pod, Ztunnel};

struct Node<'a> {
    lab: &'a Lab,
    agent: NodeAgent<'a>,
    ztunnel: Ztunnel,
}

impl<'a> Node<'a> {
    fn start(lab: &'a Lab) -> Self {
        let agent = lab.start_node_agent();
        Self { lab, agent, ztunnel: lab.start_ztunnel(Behaviour::default()) }
    }

    /// Brought in by this path, the pod is captured, and leaves again.
    fn enters_by(&self, pod: &Pod, path: &str) {
        let before = pod.footprint();
        let runtime = self.agent.runtime(pod).netns(path);
        runtime.add().succeeds();
        let server = self.lab.pod("server");
        let _echo = server.serve("[::]:80");
        assert_eq!(pod.connect((server.v4(), 80)).unwrap().say(b"hello"), b"hello");
        assert_eq!(self.ztunnel.wait_for_accepted(15001, 1).len(), 1);
        runtime.del().succeeds();
        self.agent.expect_no_trace(pod, &before);
    }
}

fn shell(script: &str) {
    assert!(Command::new("sh").args(["-ec", script]).status().unwrap().success(), "{script}");
}

/// Killed with the test.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn a_netns_by_its_name() {
    let lab = Lab::bare();
    let node = Node::start(&lab);
    node.enters_by(&lab.pod("pod"), "/var/run/netns/pod");
}

#[test]
fn a_netns_by_a_process_that_lives_in_it() {
    let lab = Lab::bare();
    let node = Node::start(&lab);
    let pod = lab.pod("pod");
    let sleeper = Sleeper(pod.command("sleep").arg("60").spawn().unwrap());
    // nsenter has to have become sleep.
    let own = std::fs::read_link("/proc/self/ns/net").unwrap();
    let path = format!("/proc/{}/ns/net", sleeper.0.id());
    culvert_tests::eventually("nsenter", || (std::fs::read_link(&path).unwrap() != own).then_some(()));
    node.enters_by(&pod, &path);
}

#[test]
fn a_netns_of_docker() {
    let lab = Lab::bare();
    // Without a trace in the machine's own /run.
    let aside = lab.directory().join("netns").display().to_string();
    shell(&format!(
        "mkdir {aside}
         mount --rbind /run/netns {aside}
         mount -t tmpfs tmpfs /run
         mkdir -p /run/netns /run/docker/netns
         mount --rbind {aside} /run/netns"
    ));
    let node = Node::start(&lab);
    let pod = lab.pod("pod");
    shell("touch /run/docker/netns/0123; mount --bind /run/netns/pod /run/docker/netns/0123");
    node.enters_by(&pod, "/var/run/docker/netns/0123");
}

#[test]
fn the_netns_of_the_host_is_refused_and_untouched() {
    let lab = Lab::bare();
    let Node { agent, .. } = &Node::start(&lab);
    let pod = lab.pod("pod");
    let (in_kernel, on_host) = (lab.kernel_footprint(), lab.node().footprint());
    let refused = agent.runtime(&pod).netns("/var/run/netns/node").add();
    refused.fails(100, "… is the network namespace of the host").at_once();
    on_host.expect_same(&lab.node().footprint());
    in_kernel.expect_same(&lab.kernel_footprint());
    assert!(agent.records().is_empty() && agent.dump().is_empty());
}

#[test]
fn a_path_that_names_another_netns_for_the_agent_is_refused() {
    let lab = Lab::bare();
    let Node { agent, .. } = &Node::start(&lab);
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let before = [&pod, &other].map(|pod| pod.footprint());
    let runtime = agent.runtime(&pod);
    let astray = runtime.clone().after("mount --bind /run/netns/other /run/netns/pod");
    astray.add().fails(100, "… is network namespace … for the agent, but … for the runtime").at_once();
    for (pod, before) in [&pod, &other].into_iter().zip(&before) {
        agent.expect_no_trace(pod, before);
    }
    runtime.add().succeeds();
}

#[test]
fn a_path_that_names_no_netns_is_refused_at_once() {
    let lab = Lab::bare();
    let Node { agent, .. } = &Node::start(&lab);
    let pod = lab.pod("pod");
    let fifo = lab.directory().join("fifo");
    shell(&format!("mkfifo {}", fifo.display()));
    for path in ["/var/run/netns/nobody", "/proc/self/ns/uts", "/etc/passwd", "/", fifo.to_str().unwrap()] {
        let refused = agent.runtime(&pod).netns(path).add();
        refused.fails(100, "cannot open the pod's network namespace; …").at_once();
    }
    assert!(agent.records().is_empty() && agent.dump().is_empty());
    agent.add(&pod);
}

#[test]
fn a_netns_of_another_user_namespace_is_captured() {
    let lab = Lab::bare();
    let node = Node::start(&lab);
    let pod = lab.pod_of_user_namespace("pod");
    node.enters_by(&pod, "/var/run/netns/pod");
}
