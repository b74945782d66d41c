//! The container runtime's side of CNI: the plugin, executed as libcni does it.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{node_agent::NAMESPACE, pod::Pod, process, troubleshooting};

/// A quarter of an ADD's deadline.
const AT_ONCE: Duration = Duration::from_secs(5);
/// Where runtimes put the netns of pods.
const NETNS: &str = "/var/run/netns";

/// A runtime about to execute the plugin for one attachment of a pod: options, then a verb.
#[derive(Clone, Debug)]
#[must_use]
pub struct Runtime {
    container: String,
    netns: PathBuf,
    ifname: String,
    namespace: String,
    name: String,
    uid: String,
    config: Value,
    mounts: Option<String>,
}

impl Runtime {
    pub(crate) fn new(directory: &Path, pod: &Pod) -> Self {
        let config = json!({
            "cniVersion": "1.1.0",
            "name": "podnet",
            "type": "culvert-cni",
            "runDir": directory.join("run"),
            "scopeFile": directory.join("lib/scope.json"),
            "excludeNamespaces": ["kube-system"],
            "exempt": [{ "namespace": "culvert-system", "daemonset": "culvert-node" }],
            "prevResult": bridge_result(pod, "1.1.0"),
        });
        Self {
            container: format!("container-of-{}", pod.name()),
            netns: Path::new(NETNS).join(pod.name()),
            ifname: "eth0".to_owned(),
            namespace: NAMESPACE.to_owned(),
            name: format!("pod-{}", pod.number()),
            uid: uid(pod),
            config,
            mounts: None,
        }
    }

    /// Seconds that an ADD may take.
    pub fn patience(self, seconds: u64) -> Self {
        self.key("timeoutSeconds", seconds)
    }

    /// Another sandbox.
    pub fn container(mut self, container: &str) -> Self {
        self.container = container.to_owned();
        self
    }

    /// Another path of the netns.
    pub fn netns(mut self, path: impl Into<PathBuf>) -> Self {
        self.netns = path.into();
        self
    }

    /// Another interface.
    pub fn ifname(mut self, name: &str) -> Self {
        self.ifname = name.to_owned();
        self
    }

    /// As another pod.
    pub fn as_pod(mut self, namespace: &str, name: &str) -> Self {
        self.namespace = namespace.to_owned();
        self.name = name.to_owned();
        self
    }

    /// Another uid; none if it is empty.
    pub fn uid(mut self, uid: &str) -> Self {
        self.uid = uid.to_owned();
        self
    }

    /// A key of the network configuration; `null` is an absent one.
    pub fn key(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.config[key] = value.into();
        self
    }

    /// After a shell script in a mount namespace of its own: the runtime sees another file system than the
    /// agent.
    pub fn after(mut self, script: &str) -> Self {
        self.mounts = Some(script.to_owned());
        self
    }

    /// ADD.
    pub fn add(&self) -> Ended {
        self.begin("ADD").end()
    }

    /// DEL.
    pub fn del(&self) -> Ended {
        self.begin("DEL").end()
    }

    /// CHECK.
    pub fn check(&self) -> Ended {
        self.begin("CHECK").end()
    }

    /// STATUS.
    pub fn status(&self) -> Ended {
        self.begin("STATUS").end()
    }

    /// GC of this network, which these containers with this interface are still in.
    pub fn gc(&self, valid: &[&str]) -> Ended {
        let valid: Vec<_> =
            valid.iter().map(|id| json!({ "containerID": id, "ifname": self.ifname })).collect();
        self.clone().key("cni.dev/valid-attachments", valid).begin("GC").end()
    }

    /// The previous result that it hands to the plugin.
    pub fn previous(&self) -> &Value {
        &self.config["prevResult"]
    }

    /// Starts the plugin.
    pub fn begin(&self, verb: &str) -> Running {
        let program = process::program("culvert-cni");
        let mut command = match &self.mounts {
            None => Command::new(program),
            Some(script) => {
                let mut command = Command::new("unshare");
                command.args(["--mount", "sh", "-ec", &format!("{script}\nexec \"$0\"")]).arg(program);
                command
            }
        };
        let mut args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={}",
            self.namespace, self.name, self.container
        );
        if !self.uid.is_empty() {
            args = format!("{args};K8S_POD_UID={}", self.uid);
        }
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &self.container)
            .env("CNI_NETNS", &self.netns)
            .env("CNI_IFNAME", &self.ifname)
            .env("CNI_ARGS", args)
            .env("CNI_PATH", "/opt/cni/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let config = self.config.to_string();
        // One that is killed does not read it.
        child.stdin.take().map(|mut stdin| stdin.write_all(config.as_bytes()).ok());
        Running { child, started, verb: verb.to_owned(), expected: self.previous().clone() }
    }
}

/// The uid that the API would have given to the pod.
pub fn uid(pod: &Pod) -> String {
    format!("uid-of-{}", pod.name())
}

/// What the bridge plugin gives for the pod.
pub fn bridge_result(pod: &Pod, version: &str) -> Value {
    json!({
        "cniVersion": version,
        "interfaces": [
            { "name": "br0" },
            { "name": pod.node_interface() },
            { "name": "eth0", "sandbox": Path::new(NETNS).join(pod.name()) },
        ],
        "ips": [
            { "interface": 2, "address": format!("{}/16", pod.v4()), "gateway": "10.244.0.1" },
            { "interface": 2, "address": format!("{}/64", pod.v6()), "gateway": "fd00:244::1" },
        ],
        "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
        "dns": { "nameservers": ["10.96.0.10"] },
    })
}

/// A plugin at work.
#[derive(Debug)]
pub struct Running {
    child: Child,
    started: Instant,
    verb: String,
    expected: Value,
}

impl Running {
    /// SIGKILL: the runtime has had enough. Returns when it is gone.
    pub fn kill(mut self) {
        self.child.kill().expect("kill(2)");
        self.child.wait().expect("wait(2)");
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("wait(2)").is_none()
    }

    /// Waits for its end.
    pub fn end(self) -> Ended {
        let Self { mut child, started, verb, expected } = self;
        let (mut stdout, mut stderr) = (String::new(), String::new());
        let read = |pipe: Option<File>, text: &mut String| {
            pipe.map(|mut pipe| pipe.read_to_string(text)).transpose().expect("the plugin's words")
        };
        read(child.stdout.take().map(|pipe| File::from(std::os::fd::OwnedFd::from(pipe))), &mut stdout);
        read(child.stderr.take().map(|pipe| File::from(std::os::fd::OwnedFd::from(pipe))), &mut stderr);
        let status = child.wait().expect("wait(2)");
        Ended { verb, status, stdout, stderr, expected, took: started.elapsed() }
    }
}

/// What the runtime gets.
#[derive(Clone, Debug)]
pub struct Ended {
    verb: String,
    /// How it ended.
    pub status: ExitStatus,
    /// The result, or the error object.
    pub stdout: String,
    /// For the runtime's journal.
    pub stderr: String,
    expected: Value,
    /// From its start.
    pub took: Duration,
}

impl Ended {
    /// Exit code 0; an ADD gives the previous result back.
    #[track_caller]
    pub fn succeeds(&self) -> &Self {
        assert!(self.status.success(), "{self:?}");
        if self.verb == "ADD" {
            let result: Value = serde_json::from_str(&self.stdout).expect("a result");
            if self.expected.is_null() {
                assert_eq!(result, json!({ "cniVersion": result["cniVersion"] }));
            } else {
                assert_eq!(result, self.expected);
            }
        } else {
            assert_eq!(self.stdout, "");
        }
        self
    }

    /// Without waiting for anybody's deadline, on a busy machine too.
    #[track_caller]
    pub fn at_once(&self) -> &Self {
        assert!(self.took < AT_ONCE, "took {:?}", self.took);
        self
    }

    /// Fails with a CNI error of this code, whose text is a message of README's table of failures.
    #[track_caller]
    pub fn fails(&self, code: u32, message: &str) -> &Self {
        assert_eq!(self.status.code(), Some(1), "{self:?}");
        let error: Value = serde_json::from_str(&self.stdout).expect("an error object");
        assert_eq!(error["code"], code, "{error:#}");
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        let said = format!("{}; {}", text("msg"), text("details"));
        assert!(troubleshooting::fits(message, &said), "{message:?} is not in {said:?}");
        let known = troubleshooting::messages();
        assert!(known.iter().any(|row| row == message), "README has no row {message:?} in {known:#?}");
        self
    }
}
