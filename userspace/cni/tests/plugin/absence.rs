//! The agent does not answer: the scope file decides.

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, net::UnixListener, process::CommandExt as _},
    process::{Command, Stdio},
    time::Duration,
};

use rstest::rstest;
use serde_json::Value;

use crate::{
    agent::Reply,
    node::{ENROLLED, Node, ended, says},
};

fn no_socket(_: &mut Node) {}

fn regular_file(node: &mut Node) {
    fs::write(node.path("cni.sock"), "").unwrap();
}

fn directory(node: &mut Node) {
    fs::create_dir(node.path("cni.sock")).unwrap();
}

fn dead_socket(node: &mut Node) {
    drop(UnixListener::bind(node.path("cni.sock")).unwrap());
}

fn no_run_dir(node: &mut Node) {
    node.config["runDir"] = "/nonexistent/culvert".into();
}

#[rstest]
#[case::missing(no_socket, "there is no socket")]
#[case::a_regular_file(regular_file, "it is not a socket")]
#[case::a_directory(directory, "it is not a socket")]
#[case::dead(dead_socket, "nobody listens there")]
#[case::with_its_directory(no_run_dir, "there is no socket")]
fn without_a_socket_the_scope_decides_at_once(#[case] damage: fn(&mut Node), #[case] why: &str) {
    let mut node = Node::with_scope(&["shop"]);
    damage(&mut node);
    let object = node.run("ADD", "shop").at_once().fails(11);
    says(&object, why);
    says(&object, "namespace shop is in the scope");
    let passed = node.run("ADD", "default");
    passed.passes().at_once();
    // The agent cannot be told, the runtime's journal is.
    assert!(passed.stderr.contains("passes without the agent"), "{}", passed.stderr);
    let line: Value = serde_json::from_str(passed.stderr.trim()).unwrap();
    assert_eq!((&line["level"], &line["pod"]), (&"warn".into(), &"default/web-0".into()));
}

#[rstest]
#[case::missing(None, "does not exist")]
#[case::empty(Some(""), "is damaged")]
#[case::truncated(Some(r#"{"version":1,"namesp"#), "is damaged")]
#[case::of_a_later_version(Some(r#"{"version":7,"namespaces":[],"writtenAt":"now"}"#), "is damaged")]
fn without_a_scope_file_only_exempt_pods_pass(#[case] content: Option<&str>, #[case] why: &str) {
    let node = Node::new();
    if let Some(content) = content {
        fs::write(node.path("scope.json"), content).unwrap();
    }
    let object = node.run("ADD", "default").at_once().fails(11);
    says(&object, why);
    says(&object, "start the culvert agent on this node");
    node.run("ADD", "kube-system").passes().at_once();
    node.run_pod("ADD", "culvert-system", "culvert-node-x7k2p").passes().at_once();
    node.run_pod("ADD", "culvert-system", "web-0").fails(11);
}

#[test]
fn a_scope_file_from_before_a_reboot_is_good() {
    let node = Node::new();
    let old = r#"{"version":1,"namespaces":["shop"],"writtenAt":"2020-01-01T00:00:00Z","bootID":"another"}"#;
    fs::write(node.path("scope.json"), old).unwrap();
    node.run("ADD", "default").passes();
    node.run("ADD", "shop").fails(11);
}

#[test]
fn a_silent_agent_holds_up_foreign_pods_for_a_second() {
    let node = Node::with_scope(&["shop"]);
    let agent = node.agent(Reply::Silence);
    let passed = node.run("ADD", "default");
    passed.passes().after_a_second();
    assert!(passed.stderr.contains("did not answer in time"), "{}", passed.stderr);
    assert_eq!(agent.log(), "");
}

#[rstest]
#[case::of_the_scope(Node::with_scope(&["shop"]))]
#[case::without_a_scope_file(Node::new())]
fn a_silent_agent_fails_mesh_pods_at_their_deadline(#[case] node: Node) {
    let node = node.set("timeoutSeconds", 2);
    let _agent = node.agent(Reply::Silence);
    let ended = node.run("ADD", "shop");
    says(&ended.fails(104), "finish in time");
    assert!((2.0..4.0).contains(&ended.took.as_secs_f32()), "took {:?}", ended.took);
}

#[test]
fn an_agent_that_is_stopped_in_its_queue_of_connections_is_silent() {
    let node = Node::with_scope(&["shop"]).set("timeoutSeconds", 1);
    // Never accepts.
    let _listener = UnixListener::bind(node.path("cni.sock")).unwrap();
    node.run("ADD", "default").passes().after_a_second();
    node.run("ADD", "shop").fails(104);
}

#[test]
fn an_agent_that_hangs_up_is_not_there() {
    let node = Node::with_scope(&["shop"]);
    let listener = UnixListener::bind(node.path("cni.sock")).unwrap();
    let hangs_up = std::thread::spawn(move || listener.incoming().take(2).for_each(drop));
    says(&node.run("ADD", "shop").at_once().fails(11), "lost before its answer");
    node.run("ADD", "default").passes().at_once();
    hangs_up.join().unwrap();
}

#[test]
fn an_agent_of_another_user_is_not_asked() {
    if !nix::unistd::geteuid().is_root() {
        assert_eq!(std::env::var_os("CI"), None, "this test has to run as root");
        eprintln!("skipped: only root can be somebody else");
        return;
    }
    let node = Node::with_scope(&["shop"]);
    let agent = node.agent(ENROLLED);
    let open = |name: &str, mode| {
        fs::set_permissions(node.path(name), <Permissions as PermissionsExt>::from_mode(mode))
    };
    fs::copy(env!("CARGO_BIN_EXE_culvert-cni"), node.path("plugin")).unwrap();
    open("", 0o755).unwrap();
    open("cni.sock", 0o777).unwrap();
    open("plugin", 0o755).unwrap();
    open("scope.json", 0o644).unwrap();
    fs::write(node.path("stdin"), node.config.to_string()).unwrap();

    // The plugin trusts its own user, who is root on a node. Here the roles are swapped.
    let output = Command::new(node.path("plugin"))
        .env_clear()
        .envs([
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/n"),
            ("CNI_IFNAME", "eth0"),
        ])
        .env("CNI_ARGS", "K8S_POD_NAME=web-0;K8S_POD_NAMESPACE=shop")
        .stdin(fs::File::open(node.path("stdin")).unwrap())
        .stderr(Stdio::null())
        .uid(65534)
        .output()
        .unwrap();
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &object["code"]), (Some(1), &11.into()));
    says(&object, "uid 0 listens there, not uid 65534");
    assert_eq!(agent.endpoints(), [""; 0]);
}

#[test]
fn a_hundred_plugins_at_once_all_get_their_answer() {
    let node = Node::with_scope(&["shop"]);
    let agent = node.agent(ENROLLED);
    std::thread::scope(|scope| {
        for _ in 0..100 {
            scope.spawn(|| {
                let mut plugin = node.plugin("ADD");
                plugin.env("CNI_ARGS", "K8S_POD_NAME=web-0;K8S_POD_NAMESPACE=shop");
                ended(plugin.write_stdin(node.config.to_string()).timeout(Duration::from_secs(60))).passes();
            });
        }
    });
    assert_eq!(agent.endpoints().len(), 100);
}
