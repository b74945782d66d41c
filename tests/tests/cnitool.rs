//! The chain as libcni runs it, with specification 1.1.0: what containerd 1.6 does not know.

use std::collections::BTreeSet;

use culvert_tests::{Behaviour, Chain, Lab, Plugins, chain};
use serde_json::{Value, json};

#[test]
fn the_chain_of_specification_1_1_adds_checks_and_deletes_a_pod() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_stand_in(Behaviour::default());
    let chain = Chain::new(&lab, Plugins::Current);
    let pod = lab.empty("pod");
    let run = |verb| chain::succeed(chain.cnitool(verb, &pod.netns_path(), ("web", "uid-of-web")));
    let result: Value = serde_json::from_str(&run("add")).unwrap();
    assert_eq!(result["cniVersion"], "1.1.0");
    assert_eq!(result["ips"].as_array().unwrap().len(), 2);
    // The bridge plugin's, kept: bridge, the node's end, the pod's end.
    assert_eq!(result["interfaces"].as_array().unwrap().len(), 3);
    run("check");
    assert_eq!(agent.dump().len(), 1);

    // Somebody removes capture by hand.
    let pins = lab.config().bpffs.join("culvert/v1/pods");
    std::fs::remove_file(pins.join(pod.cookie().to_string())).unwrap();
    let error = chain::fail(chain.cnitool("check", &pod.netns_path(), ("web", "uid-of-web")));
    assert!(error.contains("the pod is enrolled and is not captured"), "{error}");

    run("del");
    run("del");
    assert!(agent.dump().is_empty() && agent.records().is_empty());
    assert_eq!(chain.addresses_in_use(), [""; 0]);
}

#[test]
fn a_gc_of_the_network_takes_out_what_the_runtime_does_not_know_and_status_never_fails_for_us() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_stand_in(Behaviour::default());
    let chain = Chain::new(&lab, Plugins::Current);
    let of_another_network = lab.pod("other");
    agent.runtime(&of_another_network).key("name", "another").add().succeeds();
    for name in ["one", "two"] {
        let pod = lab.empty(name);
        chain::succeed(chain.cnitool("add", &pod.netns_path(), (name, &format!("uid-of-{name}"))));
    }
    assert_eq!(agent.dump().len(), 3);
    let node = lab.node();
    let gc = || chain::succeed(chain.cnitool("gc", &node.netns_path(), ("", "")));
    // The runtime has lost its memory: nothing is left of the cache by which libcni would call DEL. And
    // cnitool's GC comes without a list, which says nothing about anybody.
    chain.forget();
    gc();
    assert_eq!(agent.dump().len(), 3);

    // As a runtime that knows of one.
    let uid = |pod: &Value| pod["pod"]["uid"].as_str().unwrap().to_owned();
    let one = agent.dump().into_iter().find(|pod| uid(pod) == "uid-of-one").unwrap();
    let known = json!({ "containerID": one["attachments"][0]["container_id"], "ifname": "eth0" });
    chain.set("cni.dev/valid-attachments", json!([known]));
    gc();
    let left: BTreeSet<_> = agent.dump().iter().map(uid).collect();
    assert_eq!(left, ["uid-of-one", "uid-of-other"].map(str::to_owned).into());

    chain::succeed(chain.cnitool("status", &node.netns_path(), ("", "")));
    ztunnel.kill();
    agent.kill();
    chain::succeed(chain.cnitool("status", &node.netns_path(), ("", "")));
    chain.set("timeoutSeconds", "soon");
    chain::fail(chain.cnitool("status", &node.netns_path(), ("", "")));
}
