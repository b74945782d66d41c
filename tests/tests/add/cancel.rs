//! The runtime gives up on an ADD: its plugin is killed, at every step.

use std::{thread, time::Duration};

use culvert_tests::{Behaviour, Lab, Runtime};

/// Multiplier of Knuth's MMIX generator.
const LCG: u64 = 6_364_136_223_846_793_005;
/// A whole ADD takes about as long.
const ADD: Duration = Duration::from_millis(60);
const ROUNDS: u64 = 40;

/// The moment of a round, spread evenly and without order.
fn moment(round: u64) -> Duration {
    let part = (round.wrapping_add(1).wrapping_mul(LCG) >> 33) as u32 % 1000;
    ADD * part / 1000
}

#[test]
fn an_add_that_is_killed_while_it_waits_for_ztunnel_leaves_nothing() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    let before = pod.footprint();
    let add = agent.runtime(&pod).begin("ADD");
    agent.wait_for_log("waiting for one");
    assert!(!agent.traces_of(&pod).is_empty());
    add.kill();
    agent.expect_no_trace(&pod, &before);
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    agent.add(&pod);
}

#[test]
fn an_add_that_is_killed_while_ztunnel_takes_the_pod_in_leaves_nothing() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour {
        ack_delay: Duration::from_secs(1),
        sane_for: 2,
        ..Behaviour::default()
    });
    let pod = lab.pod("pod");
    let before = pod.footprint();
    let add = agent.runtime(&pod).begin("ADD");
    ztunnel.wait_for("the pod", |event| format!("{event:?}").contains("uid-of-pod"));
    add.kill();
    agent.expect_no_trace(&pod, &before);
    agent.add(&pod);
}

#[test]
fn an_add_that_is_killed_while_it_waits_for_its_turn_leaves_nothing() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let (first, second) = (lab.pod("first"), lab.pod("second"));
    let before = second.footprint();
    let runtime = |pod, container| agent.runtime(pod).uid("one-uid").container(container);
    let waits = runtime(&first, "first").begin("ADD");
    agent.wait_for_log("waiting for one");
    let killed = runtime(&second, "second").begin("ADD");
    thread::sleep(ADD);
    killed.kill();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    waits.end().succeeds();
    agent.expect_no_trace(&second, &before);
    drop(ztunnel);
    assert_eq!(agent.dump().len(), 1);
}

#[test]
fn an_add_that_waits_for_its_turn_until_its_deadline_says_so() {
    let lab = Lab::bare();
    let agent = lab.node_agent().patience(3).start();
    let (first, second) = (lab.pod("first"), lab.pod("second"));
    let before = second.footprint();
    let runtime = |pod, container| agent.runtime(pod).uid("one-uid").container(container);
    let long = runtime(&first, "first").begin("ADD");
    agent.wait_for_log("waiting for one");
    let late = runtime(&second, "second").patience(1).begin("ADD");
    long.end();
    late.end().fails(104, "the culvert agent did not answer in time; …");
    agent.expect_no_trace(&second, &before);
}

/// Killed at forty moments: what is left is a whole enrollment or none, and the runtime's DEL ends it.
#[test]
fn an_add_that_is_killed_at_any_moment_is_whole_or_nothing() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_stand_in(Behaviour {
        ack_delay: Duration::from_millis(5),
        sane_for: 2,
        ..Behaviour::default()
    });
    let pod = lab.pod("pod");
    let before = pod.footprint();
    for round in 0..ROUNDS {
        let runtime: Runtime = agent.runtime(&pod);
        let add = runtime.begin("ADD");
        thread::sleep(moment(round));
        add.kill();
        runtime.del().succeeds();
        agent.expect_no_trace(&pod, &before);
        assert!(agent.dump().is_empty(), "round {round}");
    }
    agent.add(&pod);
}
