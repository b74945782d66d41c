//! Pods as kubelet makes them: containerd's CRI, the bridge plugin, ours, the agent.

use std::net::{Ipv4Addr, SocketAddr};

use culvert_tests::{Behaviour, Chain, Containerd, Event, Lab, NodeAgent, Plugins, Pod, PodSpec, Ztunnel};

/// In a row.
const PODS: usize = 20;

fn containerd(lab: &Lab) -> Containerd<'_> {
    Containerd::start(lab, Chain::new(lab, Plugins::Debian))
}

/// Reaches the lab's first pod by a tunnel: a SYN to any other port of it did not go through ztunnel.
fn tunnel_to_the_first_pod() -> Behaviour {
    Behaviour { tunnel: vec![Ipv4Addr::new(10, 244, 0, 2).into()], ..Behaviour::default() }
}

/// The lab's first pod, in the mesh, and where it serves.
fn server(lab: &Lab, agent: &NodeAgent<'_>) -> (Pod, SocketAddr) {
    let server = lab.pod("server");
    agent.add(&server);
    let address = (server.v4(), 80).into();
    (server, address)
}

/// Waits until ztunnel has been told that a pod is gone.
fn deleted(ztunnel: &Ztunnel, uid: &str) {
    ztunnel.wait_for(uid, |event| matches!(event, Event::Deleted { pod } if pod == uid));
}

#[test]
fn pods_of_containerd_are_captured_from_their_first_packet() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(tunnel_to_the_first_pod());
    let (server, address) = server(&lab, &agent);
    let echo = server.serve("[::]:80");
    let node = containerd(&lab);
    let wire = lab.wire();
    for number in 0..PODS {
        let sandbox = node.sandbox(&PodSpec::new(&format!("web-{number}")));
        let own = sandbox.addresses();
        assert_eq!(own.len(), 2, "{own:?}");
        // Its first act is to connect.
        let container = sandbox.run("main", &[&address.to_string()]);
        container.wait_for("connected");
        let peer = echo.next_accepted().peer.ip();
        assert!(own.contains(&peer), "the server saw {peer}, not one of {own:?}");
        sandbox.remove().unwrap();
    }
    let frames = wire.stop();
    assert!(frames.syns_to(address).is_empty(), "in clear: {frames:?}");
    assert!(frames.syns_to((address.ip(), 15008)).iter().count() >= PODS);
    let foreign = frames.only(|frame| frame.is_syn() && frame.destination.port() != 15008);
    assert!(foreign.is_empty(), "{foreign:?}");
    assert_eq!(ztunnel.saw().accepted_on(15001).len(), PODS);
    // The server is what remains.
    assert_eq!(agent.dump().len(), 1);
    assert_eq!(node.netns(), [""; 0]);
    assert_eq!(node.chain().addresses_in_use(), [""; 0]);
}

#[test]
fn pods_of_the_host_network_and_of_excluded_namespaces_are_untouched() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let node = containerd(&lab);
    let server = lab.pod("server");
    let echo = server.serve("[::]:80");
    let address: SocketAddr = (server.v4(), 80).into();
    let before = lab.kernel_footprint();

    let host = node.sandbox(&PodSpec::new("host").host_network());
    host.run("main", &[&address.to_string()]).wait_for("connected");
    assert_eq!(echo.next_accepted().peer.ip(), lab.node().v4());

    for namespace in ["kube-system", "plain"] {
        let wire = lab.wire();
        let pod = node.sandbox(&PodSpec::new("pod").namespace(namespace));
        let own = pod.addresses();
        pod.run("main", &[&address.to_string()]).wait_for("connected");
        assert!(own.contains(&echo.next_accepted().peer.ip()));
        let sent = wire.stop().syns_to(address);
        assert!(sent.iter().all(|frame| own.contains(&frame.source.ip())) && !sent.is_empty(), "{sent:?}");
        pod.remove().unwrap();
    }
    host.remove().unwrap();
    assert_eq!(ztunnel.saw().accepted(), []);
    assert!(agent.dump().is_empty());
    before.expect_same(&lab.kernel_footprint());
}

#[test]
fn a_refused_add_is_told_to_kubelet_and_leaves_nothing_and_its_retry_succeeds() {
    let lab = Lab::bare();
    let agent = lab.node_agent().patience(3).start();
    let node = containerd(&lab);
    node.chain().set("timeoutSeconds", 3);
    let before = lab.kernel_footprint();
    let pod = PodSpec::new("web");
    let error = node.run_sandbox(&pod).map(|sandbox| sandbox.status()).unwrap_err();
    for part in [
        r#"plugin type="culvert-cni" failed (add)"#,
        "ztunnel does not serve the pod",
        "pod default/web (uid uid-of-web, container ",
        "for a ztunnel to connect",
        "What to do: ",
    ] {
        assert!(error.contains(part), "{part} is not in {error}");
    }
    assert!(agent.dump().is_empty() && agent.records().is_empty());
    assert_eq!(node.netns(), [""; 0]);
    assert_eq!(node.chain().addresses_in_use(), [""; 0]);
    before.expect_same(&lab.kernel_footprint());

    let ztunnel = lab.start_stand_in(Behaviour::default());
    let server = lab.pod("server");
    let _echo = server.serve("[::]:80");
    let sandbox = node.sandbox(&pod.attempt(1));
    sandbox.run("main", &[&format!("{}:80", server.v4())]).wait_for("connected");
    assert_eq!(ztunnel.wait_for_accepted(15001, 1).len(), 1);
}

#[test]
fn stopping_a_sandbox_takes_it_out_and_removing_it_repeats_the_del() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let node = containerd(&lab);
    let before = lab.kernel_footprint();
    let sandbox = node.sandbox(&PodSpec::new("web"));
    assert!(ztunnel.added().contains(&"uid-of-web".to_owned()));
    assert_eq!(agent.records().len(), 1);
    sandbox.stop().unwrap();
    deleted(&ztunnel, "uid-of-web");
    assert!(agent.dump().is_empty() && agent.records().is_empty());
    sandbox.stop().unwrap();
    sandbox.remove().unwrap();
    assert_eq!(node.netns(), [""; 0]);
    assert_eq!(node.chain().addresses_in_use(), [""; 0]);
    before.expect_same(&lab.kernel_footprint());
}

#[test]
fn a_sandbox_is_removed_while_the_agent_is_away_and_the_next_agent_forgets_it() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let node = containerd(&lab);
    let (gone, stays) = (node.sandbox(&PodSpec::new("gone")), node.sandbox(&PodSpec::new("stays")));
    agent.kill();
    gone.stop().unwrap();
    gone.remove().unwrap();
    assert_eq!(node.netns().len(), 1);
    // Nobody is there to take it in.
    let error = node.run_sandbox(&PodSpec::new("new")).map(|sandbox| sandbox.status()).unwrap_err();
    assert!(error.contains("the culvert agent is not there"), "{error}");

    let agent = lab.start_node_agent();
    assert_eq!(agent.dump().len(), 1);
    deleted(&ztunnel, "uid-of-gone");
    let new = node.sandbox(&PodSpec::new("new").attempt(1));
    for sandbox in [stays, new] {
        sandbox.remove().unwrap();
    }
    assert!(agent.dump().is_empty() && agent.records().is_empty());
    let pins = std::fs::read_dir(lab.config().bpffs.join("culvert/v1/pods")).unwrap();
    assert_eq!(pins.count(), 0);
}

#[test]
fn a_sandbox_that_is_made_again_is_captured_when_the_old_one_is_removed() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let node = containerd(&lab);
    let server = lab.pod("server");
    let _echo = server.serve("[::]:80");
    let destination = format!("{}:80", server.v4());
    let pod = PodSpec::new("web");
    let old = node.sandbox(&pod);
    old.run("main", &[&destination]).wait_for("connected");
    // As after a crash of the pause process: the same uid, a new netns, the old one still there.
    let new = node.sandbox(&pod.attempt(1));
    assert_eq!(agent.dump().len(), 2);
    old.remove().unwrap();
    assert_eq!(agent.dump().len(), 1);
    new.run("main", &[&destination]).wait_for("connected");
    assert_eq!(ztunnel.wait_for_accepted(15001, 2).len(), 2);
}
