//! What no runtime should send: each gets its code, in bounded time and memory.

use std::{
    ffi::OsStr,
    fs::File,
    os::unix::ffi::OsStrExt as _,
    process::{Command, Stdio},
};

use rstest::rstest;
use serde_json::Value;

use crate::{
    agent::Reply,
    node::{Node, ended, says},
};

/// A configuration of the test's node, with another ending.
fn config(node: &Node, ending: &str) -> String {
    let config = node.config.to_string();
    format!("{}{ending}", config.strip_suffix('}').unwrap())
}

fn nested(depth: usize) -> String {
    format!("{}{}", "[".repeat(depth), "]".repeat(depth))
}

/// Bad configurations, with the code that an ADD gives.
fn bad_configurations(node: &Node) -> Vec<(&'static str, Vec<u8>, u32)> {
    let with = |ending: &str| config(node, ending).into_bytes();
    let replaced = |from: &str, to: &str| node.config.to_string().replace(from, to).into_bytes();
    vec![
        ("empty", vec![], 6),
        ("blank", b" \n".to_vec(), 6),
        ("null", b"null".to_vec(), 6),
        ("a list", b"[]".to_vec(), 6),
        ("truncated", with(""), 6),
        ("two documents", with("}{}"), 6),
        ("ten MiB of blanks", vec![b' '; 10 << 20], 6),
        ("ten MiB in a key", with(&format!(",\"x\":\"{}\"}}", "x".repeat(10 << 20))), 6),
        ("nested", nested(500_000).into_bytes(), 6),
        ("nested in an unknown key", with(&format!(",\"x\":{}}}", nested(100_000))), 6),
        ("nested in prevResult", with(&format!(",\"prevResult\":{}}}", nested(100_000))), 6),
        ("open brackets", vec![b'['; 1 << 20], 6),
        ("not UTF-8", b"{\"name\":\"\xff\xfe\"}".to_vec(), 6),
        ("not UTF-8 in an unknown key", [&with("")[..], b",\"x\":\"\xff\"}"].concat(), 6),
        ("a key twice", with(",\"runDir\":\"/run\"}"), 6),
        ("an unknown key twice", with(",\"x\":1,\"x\":2}"), 6),
        ("a key twice in prevResult", with(",\"prevResult\":{\"ips\":[],\"ips\":[]}}"), 6),
        ("wrong type of ours", with(",\"timeoutSeconds\":\"soon\"}"), 6),
        ("wrong type of the runtime's", replaced("\"podnet\"", "7"), 6),
        ("wrong type of prevResult", with(",\"prevResult\":[]}"), 6),
        ("wrong type in prevResult", with(",\"prevResult\":{\"ips\":{}}}"), 6),
        ("an address that is none", with(",\"prevResult\":{\"ips\":[{\"address\":\"10.0.0.1\"}]}}"), 6),
        ("senseless value", with(",\"timeoutSeconds\":0}"), 7),
        ("no name", replaced("\"podnet\"", "\"\""), 7),
        ("a name with a slash", replaced("\"podnet\"", "\"../x\""), 7),
        ("unknown cniVersion", replaced("1.1.0", "9.9.9"), 1),
        ("old cniVersion", replaced("1.1.0", "0.2.0"), 1),
        ("no cniVersion", replaced("\"1.1.0\"", "null"), 1),
        ("malformed cniVersion", replaced("1.1.0", "one"), 6),
    ]
}

#[test]
fn a_bad_configuration_fails_an_add_with_its_code() {
    let node = Node::new();
    let agent = node.agent(Reply::Silence);
    for (what, stdin, code) in bad_configurations(&node) {
        let ended = ended(node.plugin("ADD").write_stdin(stdin));
        println!("{what}: {}", ended.stdout);
        ended.at_once().fails(code);
    }
    assert_eq!(agent.endpoints(), [""; 0]);
}

#[test]
fn a_bad_configuration_fails_no_del() {
    let node = Node::new();
    for (what, stdin, _) in bad_configurations(&node) {
        println!("{what}");
        ended(node.plugin("DEL").write_stdin(stdin)).succeeds().at_once();
    }
}

#[test]
fn a_bad_configuration_is_code_50_of_a_status() {
    let node = Node::new();
    for (what, stdin, code) in bad_configurations(&node) {
        println!("{what}");
        let ended = ended(node.plugin("STATUS").write_stdin(stdin));
        match code {
            1 => drop(ended.fails(1)),
            // A STATUS is not given a prevResult, and reads none.
            _ if what.ends_with("of prevResult") || what == "wrong type in prevResult" => {
                ended.succeeds();
            }
            _ if what == "an address that is none" => drop(ended.succeeds()),
            _ => drop(ended.fails(50)),
        }
    }
}

#[rstest]
#[case::no_equals_sign("K8S_POD_NAME")]
#[case::in_the_middle("K8S_POD_NAME=a;K8S_POD_NAMESPACE;IgnoreUnknown=1")]
#[case::two_equals_signs("K8S_POD_NAME=a=b")]
#[case::unknown_key("FOO=bar")]
fn malformed_arguments_are_code_4_and_named(#[case] args: &str) {
    let node = Node::new();
    for verb in ["ADD", "CHECK"] {
        let mut plugin = node.plugin(verb);
        plugin.env("CNI_ARGS", args);
        says(&ended(plugin.write_stdin(node.config.to_string())).at_once().fails(4), "CNI_ARGS");
    }
    let mut plugin = node.plugin("DEL");
    ended(plugin.env("CNI_ARGS", args).write_stdin(node.config.to_string())).succeeds();
}

#[rstest]
#[case::no_command("ADD", "CNI_COMMAND")]
#[case::no_container("ADD", "CNI_CONTAINERID")]
#[case::no_netns("ADD", "CNI_NETNS")]
#[case::no_interface("ADD", "CNI_IFNAME")]
#[case::no_container_to_check("CHECK", "CNI_CONTAINERID")]
#[case::no_command_to_delete("DEL", "CNI_COMMAND")]
#[case::no_container_to_delete("DEL", "CNI_CONTAINERID")]
#[case::no_path_for_gc("GC", "CNI_PATH")]
fn a_missing_variable_is_code_4_and_named(#[case] verb: &str, #[case] variable: &str) {
    let node = Node::new();
    for empty in [false, true] {
        let mut plugin = node.plugin(verb);
        if empty {
            plugin.env(variable, "");
        } else {
            plugin.env_remove(variable);
        }
        says(&ended(plugin.write_stdin(node.config.to_string())).at_once().fails(4), variable);
    }
}

#[rstest]
#[case::container("CNI_CONTAINERID", b"../c1")]
#[case::interface("CNI_IFNAME", b"an-interface-too-long")]
#[case::not_utf_8("CNI_NETNS", b"/\xff")]
#[case::unknown_verb("CNI_COMMAND", b"PLEASE")]
fn a_malformed_variable_is_code_4(#[case] variable: &str, #[case] value: &[u8]) {
    let node = Node::new();
    let mut plugin = node.plugin("ADD");
    plugin.env(variable, OsStr::from_bytes(value));
    ended(plugin.write_stdin(node.config.to_string())).at_once().fails(4);
}

#[test]
fn a_stdin_that_cannot_be_read_is_code_5() {
    let node = Node::new();
    let output = with_stdin(&node, File::open("/").unwrap().into());
    assert_eq!(output["code"], 5);
}

#[test]
fn a_closed_stdin_is_an_empty_one() {
    let node = Node::new();
    // The standard library opens /dev/null in its place.
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" <&-", env!("CARGO_BIN_EXE_culvert-cni")]);
    assert_eq!(error_of(&node, shell)["code"], 6);
}

#[test]
fn a_stdin_that_never_ends_is_code_5_after_five_seconds() {
    let node = Node::new();
    let (reader, _writer) = std::io::pipe().unwrap();
    assert_eq!(with_stdin(&node, reader.into())["code"], 5);
}

#[test]
fn the_longest_input_fits_into_little_memory() {
    let node = Node::new();
    for (what, stdin) in [("blanks", vec![b' '; 1 << 20]), ("numbers", b"[0,".repeat(1 << 18))] {
        println!("{what}");
        let (reader, mut writer) = std::io::pipe().unwrap();
        std::thread::spawn(move || drop(std::io::Write::write_all(&mut writer, &stdin)));
        let mut shell = Command::new("sh");
        // Address space, of which the binary and its stacks are the most.
        shell.args(["-c", "ulimit -v 32768; exec \"$0\"", env!("CARGO_BIN_EXE_culvert-cni")]).stdin(reader);
        assert_eq!(error_of(&node, shell)["code"], 6);
    }
}

fn with_stdin(node: &Node, stdin: Stdio) -> Value {
    let mut plugin = Command::new(env!("CARGO_BIN_EXE_culvert-cni"));
    plugin.stdin(stdin);
    error_of(node, plugin)
}

fn error_of(node: &Node, mut plugin: Command) -> Value {
    let output = plugin
        .envs([("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0")])
        .env("CNI_NETNS", node.path("netns"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    serde_json::from_slice(&output.stdout).unwrap()
}
