//! ADD with an agent that answers.

use std::{fs, os::unix::fs::MetadataExt as _};

use rstest::rstest;
use serde_json::json;

use crate::{
    agent::Reply,
    node::{ENROLLED, NOT_IN_MESH, Node, ended, says},
};

#[test]
fn the_agent_is_told_all_that_identifies_the_pod() {
    let node = Node::new().set(
        "prevResult",
        json!({"cniVersion": "1.1.0", "ips": [{"address": "10.1.2.3/24", "gateway": "10.1.2.1", "interface": 2},
                                              {"address": "fd00::3/64"}]}),
    );
    let agent = node.agent(ENROLLED);
    assert_eq!(node.run("ADD", "shop").at_once().exit, Some(0));
    let netns = fs::metadata(node.path("netns")).unwrap();
    assert_eq!(
        agent.request("/cmdadd"),
        json!({
            "Netns": node.path("netns"),
            "PodName": "web-0",
            "PodNamespace": "shop",
            "IPs": [{"Interface": 2, "Address": {"IP": "10.1.2.3", "Mask": "////AA=="}, "Gateway": "10.1.2.1"},
                    {"Interface": null, "Address": {"IP": "fd00::3", "Mask": "//////////8AAAAAAAAAAA=="},
                     "Gateway": ""}],
            "ContainerID": "c1",
            "IfName": "eth0",
            "NetworkName": "podnet",
            "PodUID": "u1",
            "NetnsDev": netns.dev(),
            "NetnsIno": netns.ino(),
            "PluginVersion": env!("CARGO_PKG_VERSION"),
        })
    );
}

#[test]
fn the_netns_of_a_process_is_identified_through_its_link() {
    let node = Node::new();
    let agent = node.agent(ENROLLED);
    let mut plugin = node.plugin("ADD");
    plugin.env("CNI_NETNS", "/proc/self/ns/net").env("CNI_ARGS", "K8S_POD_NAME=a;K8S_POD_NAMESPACE=b");
    ended(plugin.write_stdin(node.config.to_string())).passes();
    let netns = fs::metadata("/proc/self/ns/net").unwrap();
    let event = agent.request("/cmdadd");
    assert_eq!((&event["NetnsDev"], &event["NetnsIno"]), (&netns.dev().into(), &netns.ino().into()));
    // Some runtimes send no uid.
    assert_eq!(event.get("PodUID"), None);
}

#[test]
fn a_netns_that_is_gone_is_the_agent_s_to_judge() {
    let node = Node::new();
    let agent = node.agent(NOT_IN_MESH);
    fs::remove_file(node.path("netns")).unwrap();
    node.run("ADD", "shop").passes();
    assert_eq!(agent.request("/cmdadd").get("NetnsIno"), None);
    assert!(agent.log().contains("No such file"), "{}", agent.log());
}

#[rstest]
#[case::enrolled(ENROLLED)]
#[case::not_in_mesh(NOT_IN_MESH)]
#[case::istio_s_empty_body(Reply::Answer(200, ""))]
fn a_yes_of_the_agent_passes_the_pod(#[case] reply: Reply) {
    let node = Node::with_scope(&["shop"]);
    let agent = node.agent(reply);
    node.run("ADD", "shop").passes().at_once();
    assert_eq!(agent.endpoints(), ["/cmdadd"]);
}

#[rstest]
#[case::no_ztunnel(
    503,
    r#"{"code":11,"msg":"no ztunnel","details":"why"}"#,
    11,
    "reach the agent and ztunnel"
)]
#[case::netns(500, r#"{"code":100,"msg":"no netns","details":"why"}"#, 100, "open the network namespace")]
#[case::attach(500, r#"{"code":101,"msg":"no attach","details":"why"}"#, 101, "attach capture")]
#[case::nack(500, r#"{"code":102,"msg":"nack","details":"why"}"#, 102, "hand the pod to ztunnel")]
#[case::self_test(500, r#"{"code":103,"msg":"not captured","details":"why"}"#, 103, "test capture")]
#[case::deadline(504, r#"{"code":104,"msg":"too slow","details":"why"}"#, 104, "finish in time")]
#[case::a_newer_agent_s(500, r#"{"code":999,"msg":"odd","details":"why"}"#, 11, "999")]
fn the_agent_s_no_names_pod_step_and_remedy(
    #[case] status: u16,
    #[case] body: &'static str,
    #[case] code: u32,
    #[case] step: &str,
) {
    // The scope does not matter: the agent knows better.
    let node = Node::with_scope(&[]);
    let agent = node.agent(Reply::Answer(status, body));
    let object = node.run("ADD", "shop").at_once().fails(code);
    for text in ["why", step, "shop/web-0", "uid u1", "container c1", "What to do: "] {
        says(&object, text);
    }
    // The agent's own log has the line as well.
    assert!(agent.log().contains("What to do"), "{}", agent.log());
}

#[rstest]
#[case::in_the_scope("shop", Some(11))]
#[case::outside_the_scope("default", None)]
fn istio_s_plain_text_decides_nothing(#[case] namespace: &str, #[case] code: Option<u32>) {
    let node = Node::with_scope(&["shop"]);
    let _agent = node.agent(Reply::Answer(500, "failed to add pod to mesh: pod not eligible\n"));
    let ended = node.run("ADD", namespace);
    match code {
        Some(code) => says(&ended.at_once().fails(code), "pod not eligible"),
        None => drop(ended.passes()),
    }
}

#[rstest]
#[case::an_excluded_namespace("kube-system", "web-0")]
#[case::the_agent_s_own_pod("culvert-system", "culvert-node-x7k2p")]
fn these_pods_are_never_asked_about(#[case] namespace: &str, #[case] pod: &str) {
    let node = Node::new();
    let agent = node.agent(Reply::Silence);
    node.run_pod("ADD", namespace, pod).passes().at_once();
    assert_eq!(agent.endpoints(), [""; 0]);
}

#[test]
fn a_container_that_is_no_pod_is_not_asked_about() {
    let node = Node::new();
    let agent = node.agent(Reply::Silence);
    for args in ["", "IgnoreUnknown=1;FOO=1", "K8S_POD_NAME=web-0", "K8S_POD_NAME=;K8S_POD_NAMESPACE="] {
        let mut plugin = node.plugin("ADD");
        ended(plugin.env("CNI_ARGS", args).write_stdin(node.config.to_string())).passes().at_once();
    }
    assert_eq!(agent.endpoints(), [""; 0]);
}

#[test]
fn a_pod_that_passes_leaves_no_word_and_no_file() {
    let node = Node::new();
    let ended = node.run("ADD", "kube-system");
    assert_eq!(ended.passes().stderr, "");
    assert_eq!(node.files(), ["netns"]);
}

#[test]
fn at_level_debug_the_agent_s_log_tells_of_each_pod() {
    let node = Node::new().set("logLevel", "debug");
    let agent = node.agent(ENROLLED);
    assert_eq!(node.run("ADD", "shop").passes().stderr, "");
    let log = agent.log();
    for part in ["enrolled; prepare ", ", connect ", ", reply ", ", total ", "shop/web-0", "debug", "c1"] {
        assert!(log.contains(part), "{part} is not in {log}");
    }
}
