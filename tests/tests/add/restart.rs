//! The agent ends, is killed, is replaced: enrolled pods stay in the mesh, half-enrolled ones do not exist.

use std::{fs, thread, time::Duration};

use culvert_tests::{Behaviour, Lab, Pod, Ztunnel, eventually, while_connecting};
use nix::sys::signal::Signal;
use std::os::unix::process::ExitStatusExt as _;

/// Multiplier of Knuth's MMIX generator.
const LCG: u64 = 6_364_136_223_846_793_005;
/// A storm of ADDs takes about as long.
const STORM: Duration = Duration::from_millis(150);
const PODS: usize = 8;
const LOST: &str =
    "the culvert agent is not there; … is in the scope of the mesh, so the pod may not start alone";

fn expect_captured(pod: &Pod, server: &Pod, ztunnel: &Ztunnel) {
    ztunnel.forget();
    let mut connection = pod.connect((server.v4(), 80)).unwrap();
    assert_eq!(connection.say(b"hello"), b"hello");
    assert_eq!(ztunnel.wait_for_accepted(15001, 1)[0].peer, connection.local_addr());
}

#[test]
fn a_pod_whose_pins_somebody_removed_is_captured_again_by_the_next_agent_and_a_living_ztunnel() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let (pod, server) = (lab.pod("pod"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    agent.add(&pod);
    agent.kill();
    fs::remove_dir_all(lab.config().bpffs.join("culvert")).unwrap();
    let agent = lab.start_node_agent();
    // ztunnel has served it all the time, by sockets that the new maps do not know.
    eventually("ztunnel to listen anew", || {
        ztunnel.forget();
        pod.connect((server.v4(), 80)).ok()?.try_say(b"hello").ok()?;
        (ztunnel.saw().accepted_on(15001).len() == 1).then_some(())
    });
    expect_captured(&pod, &server, &ztunnel);
    agent.runtime(&pod).check().succeeds();
    // What its sysctls were before it was enrolled is lost with the pins.
    agent.del(&pod);
    assert!(agent.dump().is_empty());
}

#[test]
fn a_killed_agent_s_pods_stay_captured_and_the_next_one_serves_them_from_records_and_pins() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let (first, second, server) = (lab.pod("first"), lab.pod("second"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    let before = [&first, &second].map(|pod| pod.footprint());
    agent.add(&first);
    agent.add(&second);
    let enrolled = first.footprint();
    let dump = agent.dump();
    agent.kill();
    expect_captured(&first, &server, &ztunnel);
    let agent = lab.start_node_agent();
    assert_eq!(agent.dump(), dump);
    enrolled.expect_same(&first.footprint());
    for pod in [&first, &second] {
        expect_captured(pod, &server, &ztunnel);
        agent.runtime(pod).check().succeeds();
    }
    ztunnel.kill();
    ztunnel.forget();
    ztunnel.restart();
    let mut served = ztunnel.added();
    served.retain(|uid| uid.starts_with("uid-of-"));
    served.sort();
    assert_eq!(served, ["uid-of-first", "uid-of-second"]);
    expect_captured(&first, &server, &ztunnel);
    agent.add(&first);
    for (pod, before) in [&first, &second].into_iter().zip(&before) {
        agent.del(pod);
        agent.expect_no_trace(pod, before);
    }
}

#[test]
fn an_agent_that_is_asked_to_end_leaves_pods_captured_and_no_socket() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let (pod, server) = (lab.pod("pod"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    agent.add(&pod);
    let enrolled = pod.footprint();
    agent.terminate();
    assert!(agent.wait_for_exit().success());
    expect_captured(&pod, &server, &ztunnel);
    enrolled.expect_same(&pod.footprint());
    let left = fs::read_dir(agent.run_directory()).unwrap().flatten();
    let mut left: Vec<_> = left.map(|entry| entry.file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["lock", "pods"]);
    assert!(!lab.directory().join("zds.sock").exists());
}

#[test]
fn an_agent_that_is_asked_to_end_finishes_the_adds_under_way() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    let add = agent.runtime(&pod).begin("ADD");
    agent.wait_for_log("waiting for one");
    agent.terminate();
    agent.wait_for_log("enrolled pods stay captured");
    let _ztunnel = lab.start_stand_in(Behaviour::default());
    add.end().succeeds();
    assert!(agent.wait_for_exit().success());
}

#[test]
fn a_pod_that_vanished_while_no_agent_ran_is_forgotten_by_the_next_one() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let (vanishes, stays) = (lab.pod("vanishes"), lab.pod("stays"));
    agent.add(&vanishes);
    agent.add(&stays);
    agent.kill();
    let cookie = vanishes.cookie();
    vanishes.delete();
    ztunnel.kill();
    let agent = lab.start_node_agent();
    let uids: Vec<_> = agent.dump().iter().map(|pod| pod["pod"]["uid"].clone()).collect();
    assert_eq!(uids, ["uid-of-stays"]);
    assert!(!agent.records().contains(&format!("{cookie}.json")));
    assert!(!lab.config().bpffs.join(format!("culvert/v1/pods/{cookie}")).exists());
}

#[test]
fn an_agent_is_upgraded_under_traffic_without_a_failed_connection() {
    let lab = Lab::bare();
    let old = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let (client, server, later) = (lab.pod("client"), lab.pod("server"), lab.pod("later"));
    let _echo = server.serve("[::]:80");
    old.add(&client);
    old.add(&server);
    let mut open = client.connect((server.v4(), 80)).unwrap();
    let dials = [client.to((server.v4(), 80)), client.to((server.v6(), 80))];
    let mut new = None;
    let attempts = while_connecting(&dials, || {
        let agent = lab.node_agent().beside_another().start();
        agent.add(&later);
        old.terminate();
        assert!(old.wait_for_exit().success());
        new = Some(agent);
    });
    assert!(attempts.failed.is_empty() && attempts.connected > 20, "{attempts:?}");
    assert_eq!(open.say(b"still there"), b"still there");
    let new = new.unwrap();
    assert_eq!(new.dump().len(), 3);
    assert_eq!(new.page("/readyz").unwrap().status, 200);
}

#[test]
fn a_new_agent_that_ends_gives_the_node_back_to_the_old_one() {
    let lab = Lab::bare();
    let old = lab.start_node_agent();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let (pod, later, server) = (lab.pod("pod"), lab.pod("later"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    old.add(&pod);
    let new = lab.node_agent().beside_another().start();
    assert_ne!(old.page("/readyz").unwrap().status, 200);
    new.kill();
    old.wait_until_ready();
    old.add(&later);
    for pod in [&pod, &later] {
        expect_captured(pod, &server, &ztunnel);
    }
    assert_eq!(old.dump().len(), 2);
}

/// Killed in the middle of storms: a pod whose ADD succeeded is enrolled, one whose ADD failed is gone after
/// the runtime's DEL, and all of them can be added again.
fn killed_in_storms(rounds: std::ops::Range<u64>) {
    let lab = Lab::bare();
    let mut agent = lab.start_node_agent();
    // After an agent: the lab has a ZDS server of its own, whose place the agent takes.
    let _ztunnel = lab.start_stand_in(Behaviour::default());
    let pods: Vec<_> = (0..PODS).map(|number| lab.pod(&format!("p{number}"))).collect();
    let before: Vec<_> = pods.iter().map(|pod| pod.footprint()).collect();
    let all: Vec<_> = pods.iter().collect();
    for round in rounds {
        let adds: Vec<_> = pods.iter().map(|pod| agent.runtime(pod).begin("ADD")).collect();
        let part = (round.wrapping_add(1).wrapping_mul(LCG) >> 33) as u32 % 1000;
        thread::sleep(STORM * part / 1000);
        agent.kill();
        assert_eq!(agent.wait_for_exit().signal(), Some(Signal::SIGKILL as i32));
        let ended: Vec<_> = adds.into_iter().map(|add| add.end()).collect();
        drop(agent);
        agent = lab.start_node_agent();
        for (pod, ended) in pods.iter().zip(&ended) {
            if ended.status.success() {
                agent.runtime(pod).check().succeeds();
                assert!(!agent.traces_of(pod).is_empty(), "round {round}: {} is not enrolled", pod.name());
            } else {
                ended.fails(11, LOST);
            }
            agent.del(pod);
        }
        for (pod, before) in pods.iter().zip(&before) {
            agent.expect_no_trace(pod, before);
        }
        assert_eq!(agent.traces_of_all(&all), [""; 0]);
        assert_eq!((agent.dump().len(), agent.records().len()), (0, 0), "round {round}");
    }
    for pod in &pods {
        agent.add(pod);
    }
}

#[test]
fn an_agent_killed_at_fifteen_moments_of_an_add_storm_leaves_no_half_enrolled_pod() {
    killed_in_storms(0..15);
}

#[test]
fn an_agent_killed_at_fifteen_more_moments_leaves_no_half_enrolled_pod() {
    killed_in_storms(15..30);
}
