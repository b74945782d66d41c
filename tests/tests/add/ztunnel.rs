//! What ztunnel does, or fails to do, while a pod enters the mesh.

use std::time::Duration;

use culvert_tests::{Behaviour, Lab, NodeAgent, Pod, Ztunnel};

/// Faults begin with the first pod: the introduction and the end of the snapshot come before.
const BEFORE_PODS: u32 = 2;

/// A lab's ADD fails, leaves nothing, and succeeds as soon as ztunnel is well.
fn fails_and_then_succeeds(lab: &Lab, agent: &NodeAgent<'_>, ill: Option<Ztunnel>, code: u32, message: &str) {
    let pod = lab.pod("pod");
    let before = pod.footprint();
    agent.runtime(&pod).add().fails(code, message);
    // Whoever it was has to be gone, or it would serve the pod when it recovers.
    drop(ill);
    agent.expect_no_trace(&pod, &before);
    assert!(agent.dump().is_empty());
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    agent.add(&pod);
    expect_captured(lab, &pod, &ztunnel);
}

fn expect_captured(lab: &Lab, pod: &Pod, ztunnel: &Ztunnel) {
    let server = lab.pod("server");
    let _echo = server.serve("[::]:80");
    ztunnel.forget();
    let mut connection = pod.connect((server.v4(), 80)).unwrap();
    assert_eq!(connection.say(b"hello"), b"hello");
    assert_eq!(ztunnel.wait_for_accepted(15001, 1)[0].peer, connection.local_addr());
}

#[test]
fn an_add_without_a_ztunnel_waits_and_succeeds_when_one_comes() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    let mut add = agent.runtime(&pod).begin("ADD");
    agent.wait_for_log("waiting for one");
    assert!(add.is_running());
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    add.end().succeeds();
    expect_captured(&lab, &pod, &ztunnel);
}

#[test]
fn an_add_without_a_ztunnel_fails_at_its_deadline() {
    let lab = Lab::bare();
    let agent = lab.node_agent().patience(4).start();
    fails_and_then_succeeds(&lab, &agent, None, 11, "waited … s for a ztunnel to connect");
}

#[test]
fn a_ztunnel_that_dies_between_add_and_ack_fails_the_add_at_its_deadline() {
    let lab = Lab::bare();
    let agent = lab.node_agent().patience(4).start();
    let dies = Behaviour { die_after: Some(3), sane_for: BEFORE_PODS, ..Behaviour::default() };
    let ztunnel = lab.start_stand_in(dies);
    let message = "connection … to ztunnel was lost before its answer";
    fails_and_then_succeeds(&lab, &agent, Some(ztunnel), 11, message);
}

#[test]
fn an_add_outlives_the_ztunnel_it_began_with() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let dies = Behaviour { die_after: Some(3), sane_for: BEFORE_PODS, ..Behaviour::default() };
    let ztunnel = lab.start_stand_in(dies);
    let pod = lab.pod("pod");
    let add = agent.runtime(&pod).begin("ADD");
    ztunnel.wait_for_exit(Duration::from_secs(5));
    let next = lab.start_ztunnel(Behaviour::default());
    add.end().succeeds();
    expect_captured(&lab, &pod, &next);
}

#[test]
fn a_silent_ztunnel_fails_the_add_at_its_deadline() {
    let lab = Lab::bare();
    let agent = lab.node_agent().patience(4).start();
    let ztunnel =
        lab.start_stand_in(Behaviour { silent: true, sane_for: BEFORE_PODS, ..Behaviour::default() });
    let message = "ztunnel on connection … did not answer in time";
    fails_and_then_succeeds(&lab, &agent, Some(ztunnel), 104, message);
}

#[test]
fn a_ztunnel_that_refuses_fails_the_add_at_once_with_its_own_words() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let nack = vec![("uid-of-pod".to_owned(), "no such file".to_owned())];
    let ztunnel = lab.start_stand_in(Behaviour { nack, ..Behaviour::default() });
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let before = pod.footprint();
    let refused = agent.runtime(&pod).add();
    refused.fails(102, "ztunnel on connection … refused: …").at_once();
    assert!(refused.stdout.contains("no such file"), "{refused:?}");
    agent.expect_no_trace(&pod, &before);
    agent.add(&other);
    ztunnel.kill();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    agent.add(&pod);
    expect_captured(&lab, &pod, &ztunnel);
}

#[test]
fn a_ztunnel_that_sends_garbage_is_hung_up_on() {
    let lab = Lab::bare();
    let agent = lab.node_agent().patience(4).start();
    let ztunnel =
        lab.start_stand_in(Behaviour { garbage: true, sane_for: BEFORE_PODS, ..Behaviour::default() });
    let message = "connection … to ztunnel was lost before its answer";
    fails_and_then_succeeds(&lab, &agent, Some(ztunnel), 11, message);
    agent.wait_for_log("message can not be decoded");
}

#[test]
fn a_slow_ztunnel_is_waited_for() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let slow = Duration::from_millis(1500);
    let ztunnel =
        lab.start_stand_in(Behaviour { ack_delay: slow, sane_for: BEFORE_PODS, ..Behaviour::default() });
    let pod = lab.pod("pod");
    let added = agent.runtime(&pod).add();
    assert!(added.succeeds().took >= slow);
    expect_captured(&lab, &pod, &ztunnel);
}

#[test]
fn when_the_newer_of_two_ztunnels_dies_the_older_serves_what_it_had() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let older = lab.start_ztunnel(Behaviour::default());
    let (first, second) = (lab.pod("first"), lab.pod("second"));
    agent.add(&first);
    let newer = lab.start_ztunnel(Behaviour::default());
    agent.add(&second);
    newer.kill();
    agent.wait_for_log("took over");
    for pod in [&first, &second] {
        older.forget();
        let server = lab.pod(&format!("server-of-{}", pod.name()));
        let _echo = server.serve("[::]:80");
        assert_eq!(pod.connect((server.v4(), 80)).unwrap().say(b"hello"), b"hello");
        assert_eq!(older.wait_for_accepted(15001, 1).len(), 1);
    }
    let third = lab.pod("third");
    agent.add(&third);
    expect_captured(&lab, &third, &older);
}

#[test]
fn a_ztunnel_that_restarts_gets_exactly_the_living_pods() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let pods = ["stays", "goes", "goes-meanwhile", "stays-too"].map(|name| lab.pod(name));
    let [stays, goes, goes_meanwhile, stays_too] = &pods;
    for pod in &pods {
        agent.add(pod);
    }
    agent.del(goes);
    ztunnel.kill();
    agent.del(goes_meanwhile);
    ztunnel.forget();
    ztunnel.restart();
    let mut served = ztunnel.added();
    // The introduction is a workload of the agent's own.
    served.retain(|uid| uid.starts_with("uid-of-"));
    served.sort();
    assert_eq!(served, ["uid-of-stays", "uid-of-stays-too"]);
    expect_captured(&lab, stays, &ztunnel);
    ztunnel.forget();
    let server = lab.pod("another");
    let _echo = server.serve("[::]:80");
    assert_eq!(stays_too.connect((server.v4(), 80)).unwrap().say(b"hello"), b"hello");
    assert_eq!(ztunnel.wait_for_accepted(15001, 1).len(), 1);
}
