//! Pods and callers of every kind: addresses, interfaces, results of plugins before, Istio's own plugin.

use culvert_tests::{Behaviour, Family, Lab, NodeAgent, Pod, Ztunnel};
use serde_json::{Value, json};

/// A connection of the pod to another's address goes by ztunnel.
fn expect_outbound(pod: &Pod, to: (std::net::IpAddr, u16), ztunnel: &Ztunnel) {
    ztunnel.forget();
    let mut connection = pod.connect(to).unwrap();
    assert_eq!(connection.say(b"hello"), b"hello");
    assert_eq!(ztunnel.wait_for_accepted(15001, 1)[0].peer, connection.local_addr());
}

fn start(lab: &Lab) -> (NodeAgent<'_>, Ztunnel) {
    (lab.start_node_agent(), lab.start_ztunnel(Behaviour::default()))
}

#[test]
fn every_version_of_the_specification_gets_its_previous_result_back() {
    let lab = Lab::bare();
    let (agent, _ztunnel) = start(&lab);
    let pod = lab.pod("pod");
    for version in ["1.0.0", "1.1.0"] {
        let result = culvert_tests::cni::bridge_result(&pod, version);
        let runtime = agent.runtime(&pod).key("cniVersion", version).key("prevResult", result);
        runtime.add().succeeds();
        runtime.del().succeeds();
    }
    for version in ["0.3.1", "0.4.0"] {
        let mut result = culvert_tests::cni::bridge_result(&pod, version);
        for (ip, family) in result["ips"].as_array_mut().unwrap().iter_mut().zip(["4", "6"]) {
            ip["version"] = family.into();
        }
        let runtime = agent.runtime(&pod).key("cniVersion", version).key("prevResult", result);
        runtime.add().succeeds();
        runtime.del().succeeds();
    }
}

#[test]
fn in_the_middle_and_twice_in_one_chain_it_is_one_enrollment() {
    let lab = Lab::bare();
    let (agent, ztunnel) = start(&lab);
    let (pod, server) = (lab.pod("pod"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    let before = pod.footprint();
    let first = agent.runtime(&pod);
    first.add().succeeds();
    // A plugin after it adds an interface, and ours comes again with that in the result.
    pod.add_interface("net1", &["10.9.0.2/24"]);
    let mut result = first.previous().clone();
    let interfaces = result["interfaces"].as_array_mut().unwrap();
    interfaces.push(json!({ "name": "net1", "sandbox": "/var/run/netns/pod" }));
    result["ips"].as_array_mut().unwrap().push(json!({ "interface": 3, "address": "10.9.0.2/24" }));
    let second = agent.runtime(&pod).key("prevResult", result);
    second.add().succeeds();
    assert_eq!(agent.dump().len(), 1);
    expect_outbound(&pod, (server.v4().into(), 80), &ztunnel);
    second.del().succeeds();
    first.del().succeeds();
    pod.ip("link del net1");
    agent.expect_no_trace(&pod, &before);
}

#[test]
fn without_a_previous_result_the_addresses_are_those_of_the_netns() {
    let lab = Lab::bare();
    let (agent, ztunnel) = start(&lab);
    let (pod, server) = (lab.pod("pod"), lab.pod("server"));
    let _echoes = [pod.serve("[::]:80"), server.serve("[::]:80")];
    agent.runtime(&pod).key("prevResult", Value::Null).add().succeeds();
    let mut addresses: Vec<_> = agent.dump()[0]["addresses"].as_array().unwrap().clone();
    addresses.sort_by_key(ToString::to_string);
    assert_eq!(addresses, [json!(pod.v4()), json!(pod.v6())]);
    for family in Family::BOTH {
        expect_outbound(&pod, (server.address(family), 80), &ztunnel);
        // Kubelet's probe.
        assert_eq!(lab.node().connect(pod.at(family, 80)).unwrap().say(b"alive?"), b"alive?");
    }
    ztunnel.forget();
    assert_eq!(ztunnel.saw().accepted(), []);
}

#[test]
fn a_pod_with_several_addresses_is_probed_at_each() {
    let lab = Lab::bare();
    let (agent, ztunnel) = start(&lab);
    let pod = lab.pod("pod");
    pod.ip("addr add 10.244.7.7/16 dev eth0\naddr add fd00:244::7:7/64 dev eth0 nodad");
    let _echo = pod.serve("[::]:80");
    let mut result = culvert_tests::cni::bridge_result(&pod, "1.1.0");
    for address in ["10.244.7.7/16", "fd00:244::7:7/64"] {
        result["ips"].as_array_mut().unwrap().push(json!({ "interface": 2, "address": address }));
    }
    agent.runtime(&pod).key("prevResult", result).add().succeeds();
    for address in ["10.244.0.2", "10.244.7.7", "fd00:244::2", "fd00:244::7:7"] {
        let address: std::net::IpAddr = address.parse().unwrap();
        assert_eq!(lab.node().connect((address, 80)).unwrap().say(b"alive?"), b"alive?");
    }
    assert_eq!(ztunnel.saw().accepted(), []);
}

#[test]
fn a_pod_without_ipv6_is_captured() {
    let lab = Lab::bare();
    let (agent, ztunnel) = start(&lab);
    let (pod, server) = (lab.pod("pod").without_ipv6(), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    let mut result = culvert_tests::cni::bridge_result(&pod, "1.1.0");
    result["ips"].as_array_mut().unwrap().truncate(1);
    let before = pod.footprint();
    let runtime = agent.runtime(&pod).key("prevResult", result);
    runtime.add().succeeds();
    expect_outbound(&pod, (server.v4().into(), 80), &ztunnel);
    runtime.del().succeeds();
    agent.expect_no_trace(&pod, &before);
}

#[test]
fn an_interface_that_a_later_plugin_adds_is_captured_too() {
    let lab = Lab::bare();
    let (agent, ztunnel) = start(&lab);
    let pod = lab.pod("pod");
    agent.add(&pod);
    pod.add_interface("net1", &["10.9.0.2/24"]);
    lab.node().ip("addr add 10.9.0.1/24 dev net1-2");
    let _echo = lab.node().serve("10.9.0.1:80");
    expect_outbound(&pod, ("10.9.0.1".parse().unwrap(), 80), &ztunnel);
    let wire = lab.wire();
    ztunnel.kill();
    let device = pod.to(("10.9.0.1".parse::<std::net::IpAddr>().unwrap(), 80)).on_device("net1");
    assert_eq!(device.connect().unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    assert!(wire.stop().syns_to(("10.9.0.1".parse::<std::net::IpAddr>().unwrap(), 80)).is_empty());
}

/// Multus: two networks, one pod, one sandbox; it leaves the mesh with the last of them.
#[test]
fn a_pod_of_two_networks_leaves_with_the_last() {
    let lab = Lab::bare();
    let (agent, ztunnel) = start(&lab);
    let (pod, server) = (lab.pod("pod"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    let before = pod.footprint();
    let (one, other) = (agent.runtime(&pod), agent.runtime(&pod).key("name", "storage").ifname("net1"));
    one.add().succeeds();
    other.add().succeeds();
    assert_eq!(agent.dump().len(), 1);
    one.del().succeeds();
    expect_outbound(&pod, (server.v4().into(), 80), &ztunnel);
    other.del().succeeds();
    agent.expect_no_trace(&pod, &before);
}

/// Bodies as Istio's plugin writes them (ambient-behaviour §2.3), with the pod's netns, name and address.
const ISTIO: [&str; 5] = [
    r#"{"Netns":"$NETNS","PodName":"$NAME","PodNamespace":"default","IPs":null}"#,
    r#"{"Netns":"$NETNS","PodName":"$NAME","PodNamespace":"default","IPs":[{"Interface":2,"Address":{"IP":"$V4","Mask":"//8AAA=="},"Gateway":"10.244.0.1"}]}"#,
    r#"{"Netns":"$NETNS","PodName":"$NAME","PodNamespace":"default","IPs":[{"Interface":null,"Address":{"IP":"$V4","Mask":"//8AAA=="},"Gateway":""}]}"#,
    r#"{"Netns":"$NETNS","PodName":"$NAME","PodNamespace":"default","IPs":[{"Interface":2,"Address":{"IP":"::ffff:$V4","Mask":"////////////////////AAA="},"Gateway":""}]}"#,
    r#"{"netns":"$NETNS","podname":"$NAME","PODNAMESPACE":"default","ips":[{"interface":2,"address":{"ip":"$V4","mask":"//8AAA=="}}]}"#,
];

#[test]
fn events_of_istio_s_plugin_enroll_pods_and_their_end_is_noticed() {
    let lab = Lab::bare();
    let (agent, ztunnel) = start(&lab);
    let server = lab.pod("server");
    let _echo = server.serve("[::]:80");
    for (number, event) in ISTIO.iter().enumerate() {
        let pod = lab.pod(&format!("p{number}"));
        let event = event
            .replace("$NETNS", &format!("/var/run/netns/{}", pod.name()))
            .replace("$NAME", &format!("pod-{}", pod.number()))
            .replace("$V4", &pod.v4().to_string());
        let answer = agent.ask("cni.sock", "POST", "/cmdadd", &event).unwrap();
        assert_eq!(answer.status, 200, "{event}: {answer:?}");
        let dump = agent.dump();
        assert!(dump[0]["addresses"].as_array().unwrap().contains(&json!(pod.v4())), "{dump:?}");
        expect_outbound(&pod, (server.v4().into(), 80), &ztunnel);
        // Istio's plugin sends no DEL.
        let record = format!("{}.json", pod.cookie());
        pod.delete();
        culvert_tests::within(std::time::Duration::from_secs(30), "the end of the pod", || {
            (!agent.records().contains(&record)).then_some(())
        });
        assert!(agent.dump().is_empty());
    }
    let outside = r#"{"Netns":"/var/run/netns/x","PodName":"web","PodNamespace":"plain","IPs":null}"#;
    assert_eq!(agent.ask("cni.sock", "POST", "/cmdadd", outside).unwrap().status, 200);
    for (body, status) in [("", 400), ("{", 400), ("[]", 400)] {
        assert_eq!(agent.ask("cni.sock", "POST", "/cmdadd", body).unwrap().status, status);
    }
}
