//! Decisions of the plugin, in this process and without an agent.

use std::{ffi::OsString, io, os::unix::ffi::OsStringExt as _, path::PathBuf};

use proptest::prelude::*;
use rstest::rstest;

use super::{add::without_agent, *};
use crate::{
    client::{Absence, Error},
    scope::{self, Scope},
};

const CONFIG: &str = r#"{"cniVersion":"1.1.0","name":"podnet","type":"culvert-cni","runDir":"/nonexistent/culvert",
    "scopeFile":"/nonexistent/scope.json","excludeNamespaces":["kube-system"],
    "exempt":[{"namespace":"culvert-system","daemonset":"culvert-node"}]"#;

fn environment(variables: &[(&str, &str)]) -> Environment {
    Environment::new(|name| {
        let defaults = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/nonexistent/netns"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        let given = variables.iter().chain(&defaults).find(|(given, _)| *given == name);
        given.map(|(_, value)| OsString::from(value))
    })
}

fn answer(variables: &[(&str, &str)], stdin: &[u8]) -> Result<String, Refusal> {
    Plugin::new(Instant::now()).answer(&environment(variables), || Ok(stdin.to_vec()))
}

fn pod(namespace: &str, name: &str) -> String {
    format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID=u1")
}

#[rstest]
#[case::not_kubernetes("", true)]
#[case::an_excluded_namespace(&pod("kube-system", "dns-0"), true)]
#[case::the_agent_s_own_pod(&pod("culvert-system", "culvert-node-abcde"), true)]
#[case::another_pod_beside_it(&pod("culvert-system", "web-0"), false)]
#[case::any_other_pod(&pod("shop", "web-0"), false)]
fn without_agent_and_scope_file_only_these_pods_pass(#[case] args: &str, #[case] passes: bool) {
    let answer = answer(&[("CNI_ARGS", args)], format!("{CONFIG}}}").as_bytes());
    match answer {
        Ok(result) => {
            assert!(passes);
            assert_eq!(result, r#"{"cniVersion":"1.1.0"}"#);
        }
        Err(refusal) => {
            assert!(!passes);
            assert_eq!(refusal.code, Code::TryLater);
            assert!(refusal.details.contains("start the culvert agent"), "{refusal}");
        }
    }
}

fn unreachable() -> Error {
    Error::Unreachable { path: PathBuf::from("/run/cni.sock"), why: Absence::Refused }
}

fn timed_out() -> Error {
    Error::TimedOut { path: PathBuf::from("/run/cni.sock") }
}

fn lost() -> Error {
    Error::Lost(Box::new(io::Error::from(io::ErrorKind::ConnectionReset)))
}

fn istio_s() -> Error {
    Error::Foreign { status: 500, text: "pod not found".into() }
}

fn refused() -> Error {
    Error::Refused(Refusal::new(Code::Ztunnel, "nack", "why"))
}

#[rstest]
#[case::unreachable(unreachable(), Code::TryLater)]
#[case::silent(timed_out(), Code::Deadline)]
#[case::lost(lost(), Code::TryLater)]
#[case::istio_s(istio_s(), Code::TryLater)]
#[case::refused(refused(), Code::Ztunnel)]
fn the_scope_decides_over_all_but_a_refusal(#[case] error: Error, #[case] code: Code) {
    let refusal = matches!(error, Error::Refused(_));
    let scope = Ok(Scope::new(["shop".to_owned()], None));
    assert_eq!(without_agent(error, &scope, "default").is_err(), refusal);
    for scope in [scope, Err(scope::Error::Missing { path: "/scope.json".into() })] {
        let error = match code {
            Code::Deadline => timed_out(),
            Code::Ztunnel => refused(),
            _ => unreachable(),
        };
        assert_eq!(without_agent(error, &scope, "shop").unwrap_err().code, code);
    }
}

#[test]
fn a_panic_is_an_error_of_an_add_and_of_no_other_verb() {
    let panicking = |verb: &str| guarded(Some(OsStr::new(verb)), || panic!("index {} out of range", 7));
    let refusal = panicking("ADD").unwrap_err();
    assert_eq!(refusal.code, Code::TryLater);
    assert!(refusal.details.contains("index 7 out of range"), "{refusal}");
    assert!(panicking("VERSION").is_err());
    for verb in ["DEL", "CHECK", "STATUS", "GC"] {
        assert_eq!(panicking(verb), Ok(String::new()));
    }
}

#[test]
fn an_error_names_pod_step_and_remedy() {
    let mut plugin = Plugin::new(Instant::now());
    let args = pod("shop", "web-0");
    let stdin = format!("{CONFIG}}}").into_bytes();
    let refusal = plugin.answer(&environment(&[("CNI_ARGS", &args)]), || Ok(stdin)).unwrap_err();
    let refusal = plugin.explain(refusal);
    for part in
        ["shop/web-0", "uid u1", "container c1", "reach the agent", "What to do: ", "/nonexistent/culvert"]
    {
        assert!(refusal.details.contains(part), "{part} is not in {}", refusal.details);
    }
    let json: serde_json::Value = serde_json::from_str(&spec::error_json(plugin.version, &refusal)).unwrap();
    assert_eq!((&json["cniVersion"], &json["code"]), (&"1.1.0".into(), &11.into()));
}

#[test]
fn variables_that_are_not_text_are_named_and_do_not_stop_a_del() {
    let with = |verb: &'static str| {
        Environment::new(move |name| match name {
            "CNI_COMMAND" => Some(verb.into()),
            "CNI_CONTAINERID" => Some("c1".into()),
            "CNI_NETNS" => Some("/n".into()),
            "CNI_IFNAME" => Some("eth0".into()),
            "CNI_ARGS" => Some(OsString::from_vec(b"\xff".to_vec())),
            _ => None,
        })
    };
    let mut plugin = Plugin::new(Instant::now());
    let refusal = plugin.answer(&with("ADD"), || Ok(CONFIG.into())).unwrap_err();
    assert_eq!(refusal.code, Code::InvalidEnvironment);
    assert!(refusal.details.contains("CNI_ARGS"), "{refusal}");
    assert_eq!(plugin.answer(&with("DEL"), || Ok(CONFIG.into())), Ok(String::new()));
}

proptest! {
    #[test]
    fn no_stdin_and_no_arguments_make_the_plugin_panic(
        verb in prop::sample::select(vec!["ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION", "add", ""]),
        args in any::<String>(),
        stdin in any::<Vec<u8>>(),
    ) {
        let result = answer(&[("CNI_COMMAND", verb), ("CNI_ARGS", &args.replace('\0', ""))], &stdin);
        if verb == "DEL" {
            prop_assert_eq!(result, Ok(String::new()));
        }
    }

    #[test]
    fn no_previous_result_makes_the_plugin_panic(
        key in prop::sample::select(vec!["interfaces", "ips", "routes", "dns", "cniVersion", "other"]),
        value in "\\PC{0,40}|\\[[0-9,]{0,8}\\]|\\{\\}|[0-9]{1,30}|null|\"[a-f0-9:./]{0,20}\"",
        version in prop::sample::select(vec!["0.3.1", "0.4.0", "1.0.0", "1.1.0", "2.0.0"]),
    ) {
        let stdin = format!(
            r#"{{"cniVersion":"{version}","name":"n","prevResult":{{"{key}":{value}}}}}"#
        );
        if let Err(refusal) = answer(&[], stdin.as_bytes()) {
            prop_assert!([Code::IncompatibleVersion, Code::Undecodable].contains(&refusal.code));
        }
    }
}
