//! Every verb in every version, and the result of the plugin before in each version's layout.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    agent::Reply,
    node::{ENROLLED, Node, ended},
};

const READY: Reply = Reply::Answer(200, r#"{"ready":true,"outcome":"enrolled"}"#);

#[rstest]
fn each_verb_exists_from_its_version_on(
    #[values("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0", "1.2.0", "9.9.9")] version: &str,
    #[values("ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION")] verb: &str,
) {
    let node = Node::new().set("cniVersion", version).set("cni.dev/valid-attachments", json!([]));
    let _agent = node.agent(READY);
    let ours = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"].contains(&version);
    let exists = match verb {
        "DEL" | "VERSION" => true,
        "CHECK" => ours && version != "0.3.1",
        "STATUS" | "GC" => version == "1.1.0",
        _ => ours,
    };
    let ended = node.run(verb, "shop");
    if exists {
        assert_eq!(ended.exit, Some(0), "{ended:?}");
    } else {
        assert_eq!(ended.fails(1)["cniVersion"], version);
    }
}

#[test]
fn version_names_what_is_spoken_and_reads_no_stdin() {
    let node = Node::new();
    let spoken = json!({"cniVersion": "1.1.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]});
    let mut plugin = node.plugin("VERSION");
    ended(plugin.env_remove("CNI_CONTAINERID").write_stdin("no json")).gives(spoken);
}

#[rstest]
fn without_a_previous_result_the_result_is_an_empty_one_of_the_version(
    #[values("0.3.1", "0.4.0", "1.0.0", "1.1.0")] version: &str,
    #[values(json!(null), json!({}))] previous: Value,
) {
    let node = Node::new().set("cniVersion", version).set("prevResult", previous);
    let agent = node.agent(ENROLLED);
    let empty = if version.starts_with('0') {
        json!({"cniVersion": version, "dns": {}})
    } else {
        json!({"cniVersion": version})
    };
    node.run("ADD", "shop").gives(empty);
    assert_eq!(agent.request("/cmdadd")["IPs"], Value::Null);
}

/// All that the layout of 0.3.0 to 0.4.0 knows.
fn legacy(version: &str) -> Value {
    json!({
        "cniVersion": version,
        "interfaces": [
            {"name": "cni0", "mac": "00:11:22:33:44:55"},
            {"name": "eth0", "mac": "66:77:88:99:aa:bb", "sandbox": "/var/run/netns/cni-1"},
        ],
        "ips": [
            {"version": "4", "address": "10.1.2.3/24", "gateway": "10.1.2.1", "interface": 1},
            {"version": "6", "address": "fd00::3/64", "interface": 1},
        ],
        "routes": [
            {"dst": "0.0.0.0/0", "gw": "10.1.2.1", "mtu": 1400, "advmss": 1360, "priority": 10, "table": 100, "scope": 0},
            {"dst": "fd00::/8"},
        ],
        "dns": {"nameservers": ["10.1.0.1"], "domain": "local", "search": ["a", "b"], "options": ["ndots:5"]},
    })
}

/// All that the layout of 1.0.0 and 1.1.0 knows.
fn current(version: &str) -> Value {
    let mut result = legacy(version);
    for ip in result["ips"].as_array_mut().unwrap() {
        ip.as_object_mut().unwrap().remove("version");
    }
    let interface = &mut result["interfaces"][1];
    interface["mtu"] = 1400.into();
    interface["socketPath"] = "/run/vhost.sock".into();
    interface["pciID"] = "0000:00:1f.6".into();
    result
}

#[rstest]
#[case::v0_3_1(legacy("0.3.1"))]
#[case::v0_4_0(legacy("0.4.0"))]
#[case::v1_0_0(current("1.0.0"))]
#[case::v1_1_0(current("1.1.0"))]
fn the_previous_result_comes_back_with_every_key(#[case] previous: Value) {
    let node =
        Node::new().set("cniVersion", previous["cniVersion"].clone()).set("prevResult", previous.clone());
    let _agent = node.agent(ENROLLED);
    // Asked about, and not asked about.
    for namespace in ["shop", "kube-system"] {
        node.run("ADD", namespace).gives(previous.clone());
    }
}

#[rstest]
#[case::to_an_older_layout("0.4.0", current("1.1.0"), legacy("0.4.0"))]
#[case::to_a_newer_layout("1.0.0", legacy("0.3.1"), {
    let mut result = current("1.0.0");
    for key in ["mtu", "socketPath", "pciID"] {
        result["interfaces"][1].as_object_mut().unwrap().remove(key);
    }
    result
})]
fn a_previous_result_of_another_version_is_converted(
    #[case] version: &str,
    #[case] previous: Value,
    #[case] result: Value,
) {
    let node = Node::new().set("cniVersion", version).set("prevResult", previous);
    let _agent = node.agent(ENROLLED);
    node.run("ADD", "shop").gives(result);
}
