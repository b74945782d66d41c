//! DEL, CHECK, STATUS and GC.

use rstest::rstest;
use serde_json::json;

use crate::{
    agent::Reply,
    node::{ENROLLED, Node, ended, says},
};

const DOWN: Reply = Reply::Answer(503, r#"{"code":11,"msg":"no ztunnel","details":"none is connected"}"#);
const NOT_CAPTURED: Reply =
    Reply::Answer(409, r#"{"code":101,"msg":"not captured","details":"the sk_lookup link is gone"}"#);

#[test]
fn a_del_names_its_attachment() {
    let node = Node::new();
    let agent = node.agent(Reply::Answer(200, r#"{"outcome":"removed"}"#));
    node.run("DEL", "shop").succeeds().at_once();
    assert_eq!(
        agent.request("/cmddel"),
        json!({"ContainerID": "c1", "IfName": "eth0", "NetworkName": "podnet", "Netns": node.path("netns"),
               "PodName": "web-0", "PodNamespace": "shop", "PodUID": "u1",
               "PluginVersion": env!("CARGO_PKG_VERSION")})
    );
}

#[test]
fn a_del_of_an_excluded_namespace_or_of_no_pod_is_told_as_well() {
    // The configuration may have changed since the ADD.
    let node = Node::new();
    let agent = node.agent(Reply::Answer(200, r#"{"outcome":"unknown"}"#));
    node.run("DEL", "kube-system").succeeds();
    ended(node.plugin("DEL").write_stdin(node.config.to_string())).succeeds();
    assert_eq!(agent.endpoints(), ["/cmddel", "/cmddel"]);
}

#[test]
fn a_del_needs_nothing_but_its_container() {
    let node = Node::new();
    let agent = node.agent(Reply::Answer(200, r#"{"outcome":"removed"}"#));
    let mut plugin = node.plugin("DEL");
    plugin.env_remove("CNI_NETNS").env_remove("CNI_IFNAME").env_remove("CNI_PATH");
    ended(plugin.write_stdin(node.set("timeoutSeconds", "damaged").config.to_string())).succeeds();
    assert_eq!(
        agent.request("/cmddel"),
        json!({"ContainerID": "c1", "NetworkName": "podnet", "PluginVersion": env!("CARGO_PKG_VERSION")})
    );
}

#[rstest]
#[case::refused(DOWN)]
#[case::plain_text(Reply::Answer(500, "no"))]
#[case::not_found(Reply::Answer(404, ""))]
fn a_del_succeeds_whatever_the_agent_says(#[case] reply: Reply) {
    let node = Node::new();
    let agent = node.agent(reply);
    for _ in 0..2 {
        assert_eq!(node.run("DEL", "shop").succeeds().at_once().stderr, "");
    }
    assert!(agent.log().contains("not told of the DEL"), "{}", agent.log());
}

#[test]
fn a_del_succeeds_without_an_agent() {
    let node = Node::new();
    let ended = node.run("DEL", "shop");
    ended.succeeds().at_once();
    assert!(ended.stderr.contains("there is no socket"), "{}", ended.stderr);
}

#[test]
fn a_silent_agent_holds_up_del_check_and_status_for_a_second() {
    let node = Node::new();
    let _agent = node.agent(Reply::Silence);
    for verb in ["DEL", "CHECK", "STATUS"] {
        node.run(verb, "shop").succeeds().after_a_second();
    }
}

#[rstest]
#[case::captured(ENROLLED)]
#[case::outside_the_mesh(Reply::Answer(200, r#"{"outcome":"not-in-mesh"}"#))]
#[case::unknown(Reply::Answer(200, r#"{"outcome":"unknown"}"#))]
#[case::no_ztunnel(DOWN)]
#[case::plain_text(Reply::Answer(500, "no"))]
#[case::an_older_agent(Reply::Answer(404, ""))]
fn a_check_passes_without_a_positive_word(#[case] reply: Reply) {
    let node = Node::new();
    let agent = node.agent(reply);
    node.run("CHECK", "shop").succeeds().at_once();
    assert_eq!(agent.request("/check")["ContainerID"], "c1");
}

#[test]
fn a_check_fails_on_the_agent_s_word_that_capture_is_gone() {
    let node = Node::new();
    let _agent = node.agent(NOT_CAPTURED);
    let object = node.run("CHECK", "shop").at_once().fails(101);
    says(&object, "the sk_lookup link is gone");
    says(&object, "shop/web-0");
}

#[test]
fn a_check_without_an_agent_or_of_no_pod_passes() {
    let node = Node::new();
    node.run("CHECK", "shop").succeeds().at_once();
    let agent = node.agent(NOT_CAPTURED);
    ended(node.plugin("CHECK").write_stdin(node.config.to_string())).succeeds();
    assert_eq!(agent.endpoints(), [""; 0]);
}

#[rstest]
#[case::refused(DOWN, "no ztunnel")]
#[case::not_ready(
    Reply::Answer(200, r#"{"ready":false,"reasons":["no ztunnel is connected"]}"#),
    "no ztunnel is"
)]
#[case::plain_text(Reply::Answer(500, "no"), "500")]
fn a_status_succeeds_and_logs_what_is_missing(#[case] reply: Reply, #[case] logged: &str) {
    let node = Node::new();
    let agent = node.agent(reply);
    node.run("STATUS", "shop").succeeds().at_once();
    assert_eq!(agent.request("/status")["NetworkName"], "podnet");
    assert!(agent.log().contains(logged), "{}", agent.log());
}

#[test]
fn a_status_without_an_agent_succeeds_and_logs() {
    let node = Node::new();
    let ended = ended(
        node.plugin("STATUS")
            .env_remove("CNI_CONTAINERID")
            .env_remove("CNI_NETNS")
            .env_remove("CNI_IFNAME")
            .env_remove("CNI_PATH")
            .write_stdin(node.config.to_string()),
    );
    assert!(ended.succeeds().at_once().stderr.contains("there is no socket"), "{}", ended.stderr);
}

#[test]
fn a_ready_agent_s_status_is_silent() {
    let node = Node::new();
    let agent = node.agent(Reply::Answer(200, r#"{"ready":true}"#));
    assert_eq!(node.run("STATUS", "shop").succeeds().stderr, "");
    assert_eq!(agent.log(), "");
}

#[test]
fn a_gc_hands_on_the_attachments_of_its_network() {
    let node = Node::new().set(
        "cni.dev/valid-attachments",
        json!([{"containerID": "c1", "ifname": "eth0"}, {"containerID": "c2", "ifname": "net1"}]),
    );
    // As libcni sends it, with the key of an older draft.
    let node = node.set("cni.dev/attachments", json!([]));
    let agent = node.agent(Reply::Answer(200, ""));
    node.run("GC", "shop").succeeds().at_once();
    assert_eq!(
        agent.request("/gc"),
        json!({"NetworkName": "podnet", "PluginVersion": env!("CARGO_PKG_VERSION"),
               "ValidAttachments": [{"ContainerID": "c1", "IfName": "eth0"}, {"ContainerID": "c2", "IfName": "net1"}]})
    );
}

#[test]
fn a_gc_without_a_list_is_not_a_gc_of_everything() {
    let agent_asked = |node: Node| {
        let agent = node.agent(Reply::Answer(200, ""));
        node.run("GC", "shop").succeeds();
        agent.endpoints().len()
    };
    assert_eq!(agent_asked(Node::new()), 0);
    assert_eq!(agent_asked(Node::new().set("cni.dev/valid-attachments", json!(null))), 0);
    assert_eq!(agent_asked(Node::new().set("cni.dev/valid-attachments", json!([]))), 1);
}

#[test]
fn a_gc_fails_only_if_the_agent_says_so() {
    let node = Node::new().set("cni.dev/valid-attachments", json!([]));
    node.run("GC", "shop").succeeds().at_once();
    let agent = node.agent(DOWN);
    node.run("GC", "shop").fails(11);
    drop(agent);
    let _agent = node.agent(Reply::Answer(500, "no"));
    node.run("GC", "shop").succeeds();
}
