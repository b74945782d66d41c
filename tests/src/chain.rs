//! The chain of CNI plugins that a runtime runs for each pod: bridge, then ours.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};

use crate::{lab::Lab, node_agent::NAMESPACE, process};

/// Name of the network.
pub const NETWORK: &str = "podnet";
/// What host-local gives addresses of; the lab's own pods have others.
const SUBNETS: [&str; 2] = ["10.88.0.0/16", "fd00:88::/64"];

/// Where the plugins before ours come from, by the newest specification that they know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugins {
    /// Debian's, 1.0.0.
    Debian,
    /// The project's current ones, 1.1.0.
    Current,
}

impl Plugins {
    fn version(self) -> &'static str {
        match self {
            Self::Debian => "1.0.0",
            Self::Current => "1.1.0",
        }
    }

    fn directory(self) -> PathBuf {
        process::tool(match self {
            Self::Debian => "runtime/usr/lib/cni",
            Self::Current => "cni",
        })
    }
}

/// Plugins in a directory of the lab's own, and the configuration of their chain in another.
#[derive(Clone, Debug)]
pub struct Chain {
    directory: PathBuf,
}

impl Chain {
    /// Writes it; our plugin asks the lab's [`NodeAgent`](crate::NodeAgent).
    pub fn new(lab: &Lab, plugins: Plugins) -> Self {
        let chain = Self { directory: lab.directory().join("chain") };
        for directory in [chain.plugins(), chain.configuration(), chain.directory.join("lib")] {
            fs::create_dir_all(&directory).expect("a directory of the lab");
        }
        for name in ["bridge", "host-local", "loopback"] {
            symlink(plugins.directory().join(name), chain.plugins().join(name)).expect("a link to a plugin");
        }
        symlink(process::plugin(), chain.plugins().join("culvert-cni")).expect("a link to our plugin");
        let ranges: Vec<_> = SUBNETS.iter().map(|subnet| json!([{ "subnet": subnet }])).collect();
        let bridge = json!({
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "dataDir": chain.addresses(),
                "ranges": ranges,
                "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
            },
        });
        let conflist = json!({
            "cniVersion": plugins.version(),
            "name": NETWORK,
            "plugins": [bridge, entry(lab.directory())],
        });
        chain.write(&conflist);
        chain
    }

    /// With another entry for our plugin, or more keys in it.
    pub fn set(&self, key: &str, value: impl Into<Value>) {
        let text = fs::read_to_string(self.conflist()).expect("the configuration");
        let mut conflist: Value = serde_json::from_str(&text).expect("JSON");
        conflist["plugins"][1][key] = value.into();
        self.write(&conflist);
    }

    fn write(&self, conflist: &Value) {
        fs::write(self.conflist(), conflist.to_string()).expect("the configuration");
    }

    /// Directory of the plugins.
    pub fn plugins(&self) -> PathBuf {
        self.directory.join("bin")
    }

    /// Directory of the configuration.
    pub fn configuration(&self) -> PathBuf {
        self.directory.join("net.d")
    }

    fn conflist(&self) -> PathBuf {
        self.configuration().join("10-podnet.conflist")
    }

    fn addresses(&self) -> PathBuf {
        self.directory.join("ipam")
    }

    /// Removes libcni's cache, as a new disk would.
    pub fn forget(&self) {
        fs::remove_dir_all(self.directory.join("lib")).expect("the cache");
        fs::create_dir(self.directory.join("lib")).expect("a directory of the lab");
    }

    /// Addresses that host-local has given away.
    pub fn addresses_in_use(&self) -> Vec<String> {
        let mut names = crate::node_agent::names(&self.addresses().join(NETWORK));
        names.retain(|name| name.contains(['.', ':']) && !name.starts_with("last_reserved"));
        names.sort();
        names
    }

    /// Has these plugins run by `lab_timed`, which notes their times in the file that LAB_TIMES names.
    pub fn time(&self, names: &[&str]) {
        fs::create_dir_all(self.timed()).expect("a directory of the lab");
        for name in names {
            fs::rename(self.plugins().join(name), self.timed().join(name)).expect("a plugin");
            symlink(process::program("lab_timed"), self.plugins().join(name)).expect("a link");
        }
    }

    /// Directory of the plugins that are timed.
    fn timed(&self) -> PathBuf {
        self.directory.join("timed")
    }

    /// A run of `cnitool`, which does what a runtime does with the chain, for a netns and the pod that is to
    /// be in it. Its cache is the lab's own, not the machine's.
    pub fn cnitool(&self, verb: &str, netns: &Path, pod: (&str, &str)) -> Command {
        let mut command = Command::new("unshare");
        let script = "mount --bind \"$0\" /var/lib && exec \"$@\"";
        command.args(["--mount", "sh", "-ec", script]).arg(self.directory.join("lib"));
        command.arg(process::tool("bin/cnitool")).args([verb, NETWORK]).arg(netns);
        command.env("LAB_PLUGINS", self.timed());
        command.env("CNI_PATH", self.plugins()).env("NETCONFPATH", self.configuration());
        let (name, uid) = pod;
        let args = [
            ("IgnoreUnknown", "1"),
            ("K8S_POD_NAMESPACE", NAMESPACE),
            ("K8S_POD_NAME", name),
            ("K8S_POD_UID", uid),
        ];
        let args = args.iter().filter(|(_, value)| !value.is_empty());
        let args: Vec<_> = args.map(|(key, value)| format!("{key}={value}")).collect();
        command.env("CNI_ARGS", args.join(";"));
        command
    }
}

/// Our plugin's part of the configuration.
fn entry(directory: &Path) -> Value {
    json!({
        "type": "culvert-cni",
        "runDir": directory.join("run"),
        "scopeFile": directory.join("lib/scope.json"),
        "excludeNamespaces": ["kube-system"],
        "exempt": [{ "namespace": "culvert-system", "daemonset": "culvert-node" }],
        "logLevel": "debug",
    })
}

/// Runs a command that must succeed; what it printed.
#[track_caller]
pub fn succeed(mut command: Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", said(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a command that must fail; what it printed.
#[track_caller]
pub fn fail(mut command: Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(!output.status.success(), "{command:?}: {}", said(&output));
    said(&output)
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat()
}
