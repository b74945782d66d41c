//! The node agent as users start it: the process `culvert-agent --standalone FILE` on the lab's node.

use std::{
    fs, io,
    net::Ipv4Addr,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::{Duration, Instant},
};

use nix::{sys::signal::Signal, unistd::Pid};
use serde_json::{Value, json};

use crate::{
    cni::Runtime,
    http::{self, Answer},
    journal::{DEADLINE, Journal},
    lab::Lab,
    pod::Pod,
    process::{self, Process},
};

/// Loading programs takes its time on a busy machine.
const START: Duration = Duration::from_secs(60);
const GLANCE: Duration = Duration::from_millis(5);
/// Its pages; the second of two on one node has another, as two pods have netns of their own.
const PORT: u16 = 15014;
/// Namespace of the lab's pods, all in the mesh. The real ztunnel's configuration has the same.
pub(crate) const NAMESPACE: &str = "default";
/// Pods that the real ztunnel knows by a service account of their own.
const ACCOUNTS: std::ops::Range<u16> = 2..64;

/// An agent to be started.
#[derive(Clone, Debug)]
#[must_use]
pub struct Start<'a> {
    lab: &'a Lab,
    port: u16,
    patience: u64,
    pods: Vec<Value>,
    log: String,
    is_quiet: bool,
    arguments: Vec<String>,
}

impl<'a> Start<'a> {
    /// Seconds that an ADD may take, for the agent and for the plugin; 20 by default.
    pub fn patience(mut self, seconds: u64) -> Self {
        self.patience = seconds;
        self
    }

    /// An entry of the standalone file's `pods`.
    pub fn pod(mut self, entry: Value) -> Self {
        self.pods.push(entry);
        self
    }

    /// An argument of the command line.
    pub fn argument(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Log levels, in place of debug for the agent's own.
    pub fn log(mut self, directives: &str) -> Self {
        self.log = directives.to_owned();
        self
    }

    /// Its log is kept and not shown.
    pub fn quiet(mut self) -> Self {
        self.is_quiet = true;
        self
    }

    /// Beside another one, which it takes the node over from.
    pub fn beside_another(mut self) -> Self {
        self.port = PORT + 1;
        self
    }

    /// Starts it and waits until it is ready.
    pub fn start(self) -> NodeAgent<'a> {
        let agent = self.launch();
        agent.wait_until_ready();
        agent
    }

    /// Starts it.
    pub fn launch(self) -> NodeAgent<'a> {
        let Self { lab, port, patience, pods, log: levels, is_quiet, arguments } = self;
        let directory = lab.directory().to_owned();
        let mesh = directory.join("mesh/mesh.yaml");
        fs::create_dir_all(directory.join("mesh")).expect("directory of the standalone file");
        fs::write(&mesh, standalone(pods)).expect("standalone file");
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$@\" 2>&1"]).arg(process::program("culvert-agent"));
        command.arg("--standalone").arg(&mesh);
        command.arg("--run-dir").arg(directory.join("run"));
        command.arg("--scope-file").arg(directory.join("lib/scope.json"));
        command.arg("--zds-socket").arg(directory.join("zds.sock"));
        command.arg("--bpffs").arg(&lab.config().bpffs);
        command.arg("--host-cgroup").arg(&lab.config().cgroup);
        command.arg("--host-netns").arg(&lab.config().host_netns);
        command.arg(format!("--http=127.0.0.1:{port}"));
        command.arg(format!("--add-timeout={patience}s"));
        command.arg(format!("--log={levels}"));
        command.arg("--skip-probe").args(arguments);
        let log = Journal::default();
        let (process, _stdin) = Process::start(lab.node(), command, {
            let log = log.clone();
            move |line| hear(&log, line, is_quiet)
        });
        NodeAgent { lab, process, log, directory, port, patience }
    }
}

/// The standalone file. JSON is YAML.
fn standalone(pods: Vec<Value>) -> String {
    let accounts = ACCOUNTS.map(|number| {
        let name = format!("pod-{number}");
        json!({ "namespace": NAMESPACE, "name": name, "serviceAccount": name })
    });
    let named = |pod: &Value, own: &Value| pod["namespace"] == own["namespace"] && pod["name"] == own["name"];
    let accounts: Vec<_> = accounts.filter(|pod| !pods.iter().any(|own| named(pod, own))).collect();
    let pods = [accounts, pods].concat();
    let ambient = json!({ "labels": { "istio.io/dataplane-mode": "ambient" } });
    json!({
        "namespaces": { NAMESPACE: ambient, "kube-system": ambient, "plain": {} },
        "pods": pods,
    })
    .to_string()
}

#[expect(clippy::print_stderr, reason = "what the agent says belongs to the test's output")]
fn hear(log: &Journal<String>, line: String, is_quiet: bool) {
    if !is_quiet {
        eprintln!("agent: {line}");
    }
    log.push(line);
}

/// A running agent, or one that was. Dropping it kills the process.
#[derive(Debug)]
pub struct NodeAgent<'a> {
    lab: &'a Lab,
    process: Process,
    log: Journal<String>,
    directory: PathBuf,
    port: u16,
    patience: u64,
}

impl Lab {
    /// An agent with options. Its files are those of any other agent of this lab.
    pub fn node_agent(&self) -> Start<'_> {
        Start {
            lab: self,
            port: PORT,
            patience: 20,
            pods: Vec::new(),
            log: "info,culvert_agent=debug".to_owned(),
            is_quiet: false,
            arguments: Vec::new(),
        }
    }

    /// An agent that is ready.
    pub fn start_node_agent(&self) -> NodeAgent<'_> {
        self.node_agent().start()
    }
}

impl<'a> NodeAgent<'a> {
    /// The container runtime, about to run the plugin for this pod.
    pub fn runtime(&self, pod: &Pod) -> Runtime {
        Runtime::new(&self.directory, pod).patience(self.patience)
    }

    /// Has the runtime ADD the pod, which must succeed.
    pub fn add(&self, pod: &Pod) {
        self.runtime(pod).add().succeeds();
    }

    /// Has the runtime DEL the pod.
    pub fn del(&self, pod: &Pod) {
        self.runtime(pod).del().succeeds();
    }

    /// Process id.
    pub fn pid(&self) -> Pid {
        self.process.pid
    }

    /// Run directory: sockets, lock, records.
    pub fn run_directory(&self) -> PathBuf {
        self.directory.join("run")
    }

    /// Which namespaces' pods may not start without it.
    pub fn scope_file(&self) -> PathBuf {
        self.directory.join("lib/scope.json")
    }

    /// Who is in the mesh.
    pub fn standalone_file(&self) -> PathBuf {
        self.directory.join("mesh/mesh.yaml")
    }

    /// Its log, a line each.
    pub fn log(&self) -> &Journal<String> {
        &self.log
    }

    /// Waits for a line of its log.
    pub fn wait_for_log(&self, text: &str) {
        self.log.wait_for(text, |line| line.contains(text));
    }

    /// `GET` of a page for kubelet and Prometheus.
    pub fn page(&self, path: &str) -> io::Result<Answer> {
        let connection = self.lab.node().connect((Ipv4Addr::LOCALHOST, self.port))?;
        http::request(connection.stream(), "GET", path, "")
    }

    /// A request on one of its unix sockets.
    pub fn ask(&self, socket: &str, method: &str, path: &str, body: &str) -> io::Result<Answer> {
        let stream = UnixStream::connect(self.run_directory().join(socket))?;
        stream.set_read_timeout(Some(DEADLINE))?;
        http::request(stream, method, path, body)
    }

    /// The pods as it knows them.
    pub fn dump(&self) -> Vec<Value> {
        let answer = self.ask("admin.sock", "GET", "/dump", "").expect("the dump");
        serde_json::from_str(&answer.body).expect("a list of pods")
    }

    /// Waits for readyz.
    pub fn wait_until_ready(&self) {
        let deadline = Instant::now() + START;
        while !self.page("/readyz").is_ok_and(|answer| answer.status == 200) {
            let ended = self.process.wait(GLANCE);
            assert!(ended.is_none(), "the agent ended: {ended:?}, {:#?}", self.log.all());
            assert!(Instant::now() < deadline, "the agent is not ready: {:#?}", self.log.all());
        }
    }

    /// SIGKILL, and waits.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.process.signal(Signal::SIGTERM);
    }

    /// SIGSTOP: it is there and does nothing.
    pub fn freeze(&self) {
        self.process.signal(Signal::SIGSTOP);
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        self.process.signal(Signal::SIGCONT);
    }

    /// Whether the plugin would be answered.
    pub fn serves(&self) -> bool {
        self.ask("cni.sock", "POST", "/status", "{}").is_ok_and(|answer| answer.status == 200)
    }

    /// Waits for its end.
    pub fn wait_for_exit(&self) -> ExitStatus {
        self.process.wait(START).unwrap_or_else(|| panic!("the agent is still alive after {START:?}"))
    }

    pub(crate) fn lab(&self) -> &'a Lab {
        self.lab
    }

    /// Files of the directory of records.
    pub fn records(&self) -> Vec<String> {
        let mut records = names(&self.run_directory().join("pods"));
        records.sort();
        records
    }
}

impl Drop for NodeAgent<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Names in a directory.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
