//! Files and sockets of the agent that are not as they should be.

use std::{fs, os::unix::net::UnixListener, path::Path, process::Command};

use culvert_tests::{Behaviour, Lab, NodeAgent, Pod};

fn shell(script: &str) {
    assert!(Command::new("sh").args(["-ec", script]).status().unwrap().success(), "{script}");
}

/// While a shell script's damage lasts an ADD fails and leaves nothing; then it succeeds.
fn fails_while_damaged(damage: impl Fn(&Path) -> [String; 2]) {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let (enrolled, pod) = (lab.pod("enrolled"), lab.pod("pod"));
    let before = [&enrolled, &pod].map(|pod| pod.footprint());
    agent.add(&enrolled);
    let [damage, repair] = damage(&agent.run_directory());
    shell(&damage);
    agent.runtime(&pod).add().fails(11, "cannot record the pod; …").at_once();
    agent.expect_no_trace(&pod, &before[1]);
    agent.runtime(&enrolled).check().succeeds();
    shell(&repair);
    agent.add(&pod);
    for (pod, before) in [&enrolled, &pod].into_iter().zip(&before) {
        agent.del(pod);
        agent.expect_no_trace(pod, before);
    }
}

#[test]
fn a_read_only_run_directory_fails_adds_until_it_is_writable() {
    fails_while_damaged(|run| {
        let run = run.display();
        [format!("mount --bind {run} {run}; mount -o remount,bind,ro {run}"), format!("umount {run}")]
    });
}

#[test]
fn a_full_run_directory_fails_adds_until_there_is_room() {
    fails_while_damaged(|run| {
        let pods = run.join("pods").display().to_string();
        // One inode: that of the directory.
        [format!("mount -t tmpfs -o nr_inodes=1 tmpfs {pods}"), format!("umount {pods}")]
    });
}

#[test]
fn a_directory_of_records_that_was_removed_is_made_again() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    fs::remove_dir_all(agent.run_directory().join("pods")).unwrap();
    agent.add(&pod);
    assert_eq!(agent.records(), [format!("{}.json", pod.cookie())]);
}

#[test]
fn a_record_of_a_failed_removal_does_not_bring_a_pod_back() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    let before = pod.footprint();
    agent.add(&pod);
    let run = agent.run_directory().display().to_string();
    shell(&format!("mount --bind {run} {run}; mount -o remount,bind,ro {run}"));
    agent.del(&pod);
    agent.wait_for_log("cannot record that a pod leaves");
    shell(&format!("umount {run}"));
    agent.expect_no_trace(&pod, &before);
    agent.kill();
    let agent = lab.start_node_agent();
    assert!(agent.dump().is_empty());
    agent.expect_no_trace(&pod, &before);
}

/// Without an agent that answers: pods of the scope fail, the others pass, exempt ones always.
fn expect_closed_for_the_scope(agent: &NodeAgent<'_>, pod: &Pod, message: &str) {
    agent.runtime(pod).add().fails(11, message).at_once();
    agent.runtime(pod).as_pod("plain", "web").add().succeeds().at_once();
    agent.runtime(pod).as_pod("kube-system", "coredns").add().succeeds().at_once();
    agent.runtime(pod).as_pod("culvert-system", "culvert-node-x7k2p").add().succeeds().at_once();
    agent.runtime(pod).del().succeeds().at_once();
    agent.runtime(pod).status().succeeds().at_once();
    agent.runtime(pod).check().succeeds().at_once();
}

const IN_SCOPE: &str =
    "the culvert agent is not there; … is in the scope of the mesh, so the pod may not start alone";

#[test]
fn while_the_agent_is_down_pods_of_the_scope_fail_and_others_pass_at_once() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    let before = pod.footprint();
    agent.kill();
    expect_closed_for_the_scope(&agent, &pod, IN_SCOPE);
    before.expect_same(&pod.footprint());
    let agent = lab.start_node_agent();
    agent.add(&pod);
}

#[test]
fn without_a_scope_file_nobody_but_the_exempt_starts_while_the_agent_is_down() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    agent.kill();
    for (damage, message) in [
        (None, "scope file … does not exist, so no pod may start alone…"),
        (Some(""), "scope file … is damaged: …, so no pod may start alone…"),
        (Some("{\"version\":1,\"namesp"), "scope file … is damaged: …, so no pod may start alone…"),
    ] {
        match damage {
            None => fs::remove_file(agent.scope_file()).unwrap(),
            Some(content) => fs::write(agent.scope_file(), content).unwrap(),
        }
        for (namespace, name) in [("default", "pod-2"), ("plain", "web")] {
            agent.runtime(&pod).as_pod(namespace, name).add().fails(11, message).at_once();
        }
        agent.runtime(&pod).as_pod("kube-system", "coredns").add().succeeds().at_once();
        agent.runtime(&pod).as_pod("culvert-system", "culvert-node-x7k2p").add().succeeds().at_once();
    }
    // The next agent repairs it before it is ready.
    let agent = lab.start_node_agent();
    agent.kill();
    expect_closed_for_the_scope(&agent, &pod, IN_SCOPE);
}

#[test]
fn a_scope_file_from_before_a_reboot_counts() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    agent.kill();
    // A reboot clears the run directory.
    fs::remove_dir_all(agent.run_directory()).unwrap();
    let old =
        r#"{"version":1,"namespaces":["default"],"writtenAt":"2020-01-01T00:00:00Z","bootID":"another"}"#;
    fs::write(agent.scope_file(), old).unwrap();
    expect_closed_for_the_scope(&agent, &pod, IN_SCOPE);
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    agent.add(&pod);
}

#[test]
fn a_scope_file_that_cannot_be_written_keeps_the_agent_from_being_ready() {
    let lab = Lab::bare();
    fs::create_dir_all(lab.directory().join("lib/scope.json/in-the-way")).unwrap();
    let agent = lab.node_agent().launch();
    agent.wait_for_log("the scope file is out of date");
    let page = agent.page("/readyz").unwrap();
    assert!(page.status == 503 && page.body.contains("scope file"), "{page:?}");
    // It serves nevertheless.
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    agent.add(&lab.pod("pod"));
    fs::remove_dir_all(lab.directory().join("lib/scope.json")).unwrap();
    agent.wait_until_ready();
}

/// The agent's own socket is replaced: it says so, and its successor takes the place back.
fn is_noticed_and_replaced(put: impl FnOnce(&Path)) {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    let socket = agent.run_directory().join("cni.sock");
    fs::remove_file(&socket).unwrap();
    put(&socket);
    expect_closed_for_the_scope(&agent, &pod, IN_SCOPE);
    agent.wait_for_log("another process has bound over a socket or removed it");
    let page = agent.page("/readyz").unwrap();
    assert!(page.status == 503 && page.body.contains("restart this agent"), "{page:?}");
    agent.kill();
    let agent = lab.start_node_agent();
    agent.add(&pod);
}

#[test]
fn a_regular_file_in_the_socket_s_place_is_noticed_and_replaced() {
    is_noticed_and_replaced(|socket| fs::write(socket, "").unwrap());
}

#[test]
fn a_dead_socket_in_the_socket_s_place_is_noticed_and_replaced() {
    is_noticed_and_replaced(|socket| drop(UnixListener::bind(socket).unwrap()));
}

#[test]
fn a_removed_socket_is_noticed_and_replaced() {
    is_noticed_and_replaced(|_| {});
}

#[test]
fn a_stranger_s_socket_that_hangs_up_is_no_agent() {
    is_noticed_and_replaced(|socket| {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || listener.incoming().for_each(drop));
    });
}

#[test]
fn an_agent_that_accepts_and_never_answers_holds_up_pods_of_the_scope_only() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    agent.freeze();
    let message = "the culvert agent did not answer in time; …";
    agent.runtime(&pod).patience(2).add().fails(104, message);
    agent.runtime(&pod).as_pod("plain", "web").add().succeeds().at_once();
    agent.runtime(&pod).as_pod("kube-system", "coredns").add().succeeds().at_once();
    for verb in [agent.runtime(&pod).del(), agent.runtime(&pod).check(), agent.runtime(&pod).status()] {
        verb.succeeds().at_once();
    }
}

#[test]
fn something_else_than_an_agent_that_answers_decides_nothing() {
    use std::io::{Read as _, Write as _};
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    agent.kill();
    let socket = agent.run_directory().join("cni.sock");
    fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    // As Istio's agent does for a pod that it cannot add.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            let answer = "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 6\r\n\r\nfailed";
            stream.write_all(answer.as_bytes()).ok();
        }
    });
    agent.runtime(&pod).add().fails(11, "something else than the culvert agent answered; …").at_once();
    agent.runtime(&pod).as_pod("plain", "web").add().succeeds().at_once();
}
