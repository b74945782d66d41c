//! A pod that enters the mesh as a container runtime brings it there: the plugin, the agent, ztunnel.

use culvert_tests::{Behaviour, Family, Lab};
use serde_json::json;

/// The second pod of a lab; ztunnel has to know before it starts.
fn tunnel_to_the_second_pod() -> Behaviour {
    let tunnel = ["10.244.0.3", "fd00:244::3"].map(|address| address.parse().unwrap());
    Behaviour { tunnel: tunnel.into(), ..Behaviour::default() }
}

#[test]
fn a_pod_that_is_added_is_captured_from_its_first_packet() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_ztunnel(tunnel_to_the_second_pod());
    let (client, server) = (lab.pod("client"), lab.pod("server"));
    let wire = lab.wire();
    agent.add(&server);
    let echo = server.serve("[::]:80");
    agent.add(&client);
    // Its entrypoint, at once.
    for family in Family::BOTH {
        assert_eq!(client.connect(server.at(family, 80)).unwrap().say(b"first words"), b"first words");
        assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
    }
    let frames = wire.stop();
    for family in Family::BOTH {
        assert!(frames.syns_to(server.at(family, 80)).is_empty(), "{frames:?}");
        assert!(!frames.syns_to(server.at(family, 15008)).is_empty(), "{frames:?}");
    }
    let foreign = frames.only(|frame| frame.is_syn() && frame.destination.port() != 15008);
    assert!(foreign.is_empty(), "the self-test and ztunnel stay in the pod: {foreign:?}");
    assert_eq!(ztunnel.wait_for_accepted(15001, 2).len(), 2);
}

#[test]
fn a_hundred_pods_in_a_row_are_each_captured_before_their_first_packet() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let server = lab.pod("server");
    let _echo = server.serve("[::]:80");
    for number in 0..100 {
        let pod = lab.pod(&format!("p{number}"));
        agent.add(&pod);
        let connection = pod.connect((server.v4(), 80)).unwrap();
        let accepted = ztunnel.wait_for_accepted(15001, 1);
        assert_eq!(accepted[0].peer, connection.local_addr());
        ztunnel.forget();
        drop(connection);
        agent.del(&pod);
        pod.delete();
    }
}

#[test]
fn pods_outside_the_mesh_pass_quickly_and_untouched() {
    let lab = Lab::bare();
    let of_mesh = |name: &str, more: serde_json::Value| {
        let mut pod = json!({ "namespace": "default", "name": name });
        pod.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        pod
    };
    let agent = lab
        .node_agent()
        .pod(of_mesh("host", json!({ "hostNetwork": true })))
        .pod(of_mesh("sidecar", json!({ "annotations": { "sidecar.istio.io/status": "{}" } })))
        .pod(of_mesh("opted-out", json!({ "labels": { "istio.io/dataplane-mode": "none" } })))
        .start();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    let (in_kernel, in_pod) = (lab.kernel_footprint(), pod.footprint());
    for (namespace, name) in [
        ("plain", "web"),
        ("nowhere", "web"),
        ("kube-system", "coredns"),
        ("culvert-system", "culvert-node-x7k2p"),
        ("default", "host"),
        ("default", "sidecar"),
        ("default", "opted-out"),
    ] {
        agent.runtime(&pod).as_pod(namespace, name).add().succeeds().at_once();
        in_pod.expect_same(&pod.footprint());
        in_kernel.expect_same(&lab.kernel_footprint());
        assert!(agent.dump().is_empty());
        agent.runtime(&pod).as_pod(namespace, name).del().succeeds().at_once();
    }
    let server = lab.pod("server");
    let _echo = server.serve("[::]:80");
    assert_eq!(pod.connect((server.v4(), 80)).unwrap().say(b"in clear"), b"in clear");
    assert_eq!(ztunnel.saw().accepted(), []);
}

#[test]
fn the_same_add_twice_is_one_enrollment() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let pod = lab.pod("pod");
    let before = pod.footprint();
    agent.add(&pod);
    let traces = agent.traces_of(&pod);
    agent.add(&pod);
    assert_eq!(agent.traces_of(&pod), traces);
    assert_eq!(agent.dump().len(), 1);
    let adds = ztunnel.added();
    assert_eq!(adds.iter().filter(|uid| *uid == "uid-of-pod").count(), 1, "{adds:?}");
    agent.del(&pod);
    agent.expect_no_trace(&pod, &before);
}

#[test]
fn a_del_ends_capture_and_leaves_nothing_and_can_be_repeated() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let (pod, server) = (lab.pod("pod"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    let before = pod.footprint();
    agent.add(&pod);
    assert_eq!(pod.connect((server.v4(), 80)).unwrap().say(b"captured"), b"captured");
    assert_eq!(ztunnel.wait_for_accepted(15001, 1).len(), 1);
    agent.del(&pod);
    agent.expect_no_trace(&pod, &before);
    assert_eq!(pod.connect((server.v4(), 80)).unwrap().say(b"in clear"), b"in clear");
    assert_eq!(ztunnel.saw().accepted_on(15001).len(), 1);
    agent.del(&pod);
    agent.runtime(&pod).container("nobody-s").del().succeeds().at_once();
    // Containerd's, when the sandbox is gone already.
    agent.runtime(&pod).netns("").del().succeeds().at_once();
    agent.add(&pod);
    assert_eq!(pod.connect((server.v4(), 80)).unwrap().say(b"again"), b"again");
    assert_eq!(ztunnel.wait_for_accepted(15001, 2).len(), 2);
}

#[test]
fn a_del_of_an_unknown_container_touches_nobody() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    agent.add(&pod);
    let traces = agent.traces_of(&pod);
    agent.runtime(&pod).container("another").del().succeeds();
    agent.runtime(&pod).key("name", "another-network").del().succeeds();
    agent.runtime(&pod).ifname("net1").del().succeeds();
    assert_eq!(agent.traces_of(&pod), traces);
    assert_eq!(agent.dump().len(), 1);
}

#[test]
fn a_del_before_its_add_has_finished_ends_it() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    let before = pod.footprint();
    let add = agent.runtime(&pod).begin("ADD");
    agent.wait_for_log("waiting for one");
    agent.del(&pod);
    let ended = add.end();
    ended.fails(11, "cancelled by the runtime in step …");
    agent.expect_no_trace(&pod, &before);
    assert!(agent.dump().is_empty());
}

#[test]
fn a_late_del_of_the_old_sandbox_leaves_the_new_one_of_the_same_pod_alone() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let (old, new, server) = (lab.pod("old"), lab.pod("new"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    let before = old.footprint();
    let runtime =
        |pod, container| agent.runtime(pod).as_pod("default", "pod-2").uid("one-uid").container(container);
    runtime(&old, "first").add().succeeds();
    runtime(&new, "second").add().succeeds();
    assert_eq!(agent.dump().len(), 2);
    let talks = |count| {
        assert_eq!(new.connect((server.v4(), 80)).unwrap().say(b"hello"), b"hello");
        assert_eq!(ztunnel.wait_for_accepted(15001, count).len(), count);
    };
    talks(1);
    runtime(&old, "first").del().succeeds();
    agent.expect_no_trace(&old, &before);
    talks(2);
    runtime(&old, "first").del().succeeds();
    talks(3);
    assert_eq!(agent.dump().len(), 1);
}
