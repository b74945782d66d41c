//! A node in a temporary directory, and the plugin as its runtime calls it.

use std::{
    fs::{self, File},
    path::PathBuf,
    time::{Duration, Instant},
};

use assert_cmd::Command;
use culvert_cni::scope::Scope;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::agent::{Agent, Reply};

/// Answers of the agent.
pub(crate) const ENROLLED: Reply = Reply::Answer(200, r#"{"outcome":"enrolled"}"#);
pub(crate) const NOT_IN_MESH: Reply = Reply::Answer(200, r#"{"outcome":"not-in-mesh"}"#);

/// A run that takes longer than this waits for what it should not wait for.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(900);

pub(crate) struct Node {
    directory: TempDir,
    pub(crate) config: Value,
}

/// One run of the plugin.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) exit: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Node {
    /// No agent, no scope file.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        File::create(directory.path().join("netns")).unwrap();
        let config = json!({
            "cniVersion": "1.1.0",
            "name": "podnet",
            "type": "culvert-cni",
            "runDir": directory.path(),
            "scopeFile": directory.path().join("scope.json"),
            "excludeNamespaces": ["kube-system"],
            "exempt": [{"namespace": "culvert-system", "daemonset": "culvert-node"}],
        });
        Self { directory, config }
    }

    /// With a scope file: pods of these namespaces may be of the mesh.
    pub(crate) fn with_scope(namespaces: &[&str]) -> Self {
        let node = Self::new();
        let namespaces = namespaces.iter().map(ToString::to_string);
        Scope::new(namespaces, None).write(&node.path("scope.json")).unwrap();
        node
    }

    pub(crate) fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.config[key] = value.into();
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn agent(&self, reply: Reply) -> Agent {
        Agent::listen(&self.path("cni.sock"), reply)
    }

    /// The verb for a pod `web-0` of the namespace.
    pub(crate) fn run(&self, verb: &str, namespace: &str) -> Ended {
        self.run_pod(verb, namespace, "web-0")
    }

    pub(crate) fn run_pod(&self, verb: &str, namespace: &str, pod: &str) -> Ended {
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={pod};K8S_POD_UID=u1;\
             K8S_POD_INFRA_CONTAINER_ID=c1"
        );
        let mut plugin = self.plugin(verb);
        plugin.env("CNI_ARGS", args);
        ended(plugin.write_stdin(self.config.to_string()))
    }

    /// The plugin with a complete environment, but for `CNI_ARGS`, and without stdin.
    pub(crate) fn plugin(&self, verb: &str) -> Command {
        let mut plugin = Command::new(env!("CARGO_BIN_EXE_culvert-cni"));
        plugin
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", "c1")
            .env("CNI_NETNS", self.path("netns"))
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .timeout(Duration::from_secs(30));
        plugin
    }

    /// What is in the directory that was not there at first.
    pub(crate) fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.directory.path()).unwrap();
        let mut names: Vec<_> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

pub(crate) fn ended(plugin: &mut Command) -> Ended {
    let started = Instant::now();
    let output = plugin.output().unwrap();
    Ended {
        exit: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        took: started.elapsed(),
    }
}

impl Ended {
    /// Exit 0 with this result, compared as JSON.
    #[track_caller]
    pub(crate) fn gives(&self, result: Value) -> &Self {
        assert_eq!(self.exit, Some(0), "{self:?}");
        assert_eq!(serde_json::from_str::<Value>(&self.stdout).unwrap(), result);
        self
    }

    /// Exit 0 with the empty result of 1.1.0.
    #[track_caller]
    pub(crate) fn passes(&self) -> &Self {
        self.gives(json!({"cniVersion": "1.1.0"}))
    }

    /// Exit 0 and not a word.
    #[track_caller]
    pub(crate) fn succeeds(&self) -> &Self {
        assert_eq!((self.exit, self.stdout.as_str()), (Some(0), ""), "{self:?}");
        self
    }

    /// Exit 1 with one error object, complete and nothing else.
    #[track_caller]
    pub(crate) fn fails(&self, code: u32) -> Value {
        assert_eq!(self.exit, Some(1), "{self:?}");
        let object: Value = serde_json::from_str(&self.stdout).unwrap();
        assert_eq!(object["code"], code, "{object}");
        for key in ["cniVersion", "msg", "details"] {
            assert!(object[key].as_str().is_some_and(|text| !text.is_empty()), "{key} in {object}");
        }
        object
    }

    #[track_caller]
    pub(crate) fn at_once(&self) -> &Self {
        assert!(self.took < AT_ONCE, "took {:?}", self.took);
        self
    }

    #[track_caller]
    pub(crate) fn after_a_second(&self) -> &Self {
        let second = Duration::from_secs(1);
        assert!((second..3 * second).contains(&self.took), "took {:?}", self.took);
        self
    }
}

/// Whether an error object's details say it.
#[track_caller]
pub(crate) fn says(object: &Value, text: &str) {
    let details = object["details"].as_str().unwrap();
    assert!(details.contains(text), "{text:?} is not in {details:?}");
}
