//! A container runtime of the lab's own, driven through CRI as kubelet drives it.
//!
//! ```text
//!  test ──crictl──► containerd ──► runc: sandboxes and containers, in the lab's cgroup
//!                       └── libcni ──► bridge ──► culvert-cni ──► agent
//! ```
//!
//! It has a mount namespace and a pid namespace of its own below the lab's: its root, state, sockets and CNI
//! directories are the lab's, /run and /var/lib are hidden, and all its processes end with its first one. Only
//! the mounts below /run/netns are shared, because the agent has to see them.

mod container;
mod image;
mod sandbox;

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

pub use container::Container;
pub use image::Image;
pub use sandbox::{PodSpec, Sandbox};

use crate::{
    chain::Chain,
    eventually::within,
    isolation::NETNS,
    lab::Lab,
    process::{self, Process},
};

/// A busy machine takes its time.
const START: Duration = Duration::from_secs(30);
/// Before it serves.
const SCRIPT: &str = r#"
mkdir -p "$0/run/netns" "$0/var-lib"
mount --rbind /run/netns "$0/run/netns"
mount --rbind "$0/run" /run
mount --bind "$0/var-lib" /var/lib
exec "$@" 2>&1
"#;

/// A running containerd. Dropping it ends every process of it.
#[derive(Debug)]
pub struct Containerd<'a> {
    lab: &'a Lab,
    process: Process,
    directory: PathBuf,
    pub(crate) chain: Chain,
}

impl<'a> Containerd<'a> {
    /// One that knows the image of the lab's pods and runs this chain for each pod.
    pub fn start(lab: &'a Lab, chain: Chain) -> Self {
        let directory = lab.directory().join("containerd");
        fs::create_dir_all(&directory).expect("a directory of the lab");
        fs::write(directory.join("config.toml"), configuration(&directory, &chain)).expect("configuration");
        let socket = socket(&directory);
        let crictl = json!({ "runtime-endpoint": socket, "image-endpoint": socket, "timeout": 60 });
        fs::write(directory.join("crictl.yaml"), crictl.to_string()).expect("crictl's configuration");
        // Netns that are made below are seen here.
        mount(None::<&str>, NETNS, None::<&str>, MsFlags::MS_SHARED, None::<&str>).expect("share netns");
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation=unchanged",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]);
        command.args(["sh", "-ec", SCRIPT]).arg(&directory);
        command.arg(process::tool("runtime/usr/bin/containerd")).arg("--config");
        command.arg(directory.join("config.toml")).env("PATH", path());
        let (process, _stdin) = Process::start(lab.node(), command, hear);
        let containerd = Self { lab, process, directory, chain };
        within(START, "containerd", || {
            assert!(containerd.process.status().is_none(), "containerd ended, see above");
            containerd.crictl(&["info"]).output().ok().filter(|output| output.status.success())
        });
        containerd.import(&Image::pod());
        containerd
    }

    /// The lab.
    pub fn lab(&self) -> &'a Lab {
        self.lab
    }

    /// The chain that it runs.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Takes in an image.
    pub fn import(&self, image: &Image) {
        let archive = self.directory.join("image.tar");
        image.write(&archive).unwrap_or_else(|error| panic!("{}: {error}", archive.display()));
        let mut command = Command::new(process::tool("runtime/usr/bin/ctr"));
        command.arg("--address").arg(self.directory.join("containerd.sock"));
        command.args("--namespace k8s.io images import --snapshotter native".split(' ')).arg(&archive);
        crate::chain::succeed(command);
        fs::remove_file(&archive).expect("the archive");
    }

    pub(crate) fn crictl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(process::tool("bin/crictl"));
        command.arg("--config").arg(self.directory.join("crictl.yaml")).args(arguments);
        command
    }

    /// Words that crictl takes from a file, written to one.
    pub(crate) fn file(&self, name: &str, content: &Value) -> io::Result<String> {
        let path = self.directory.join(name);
        fs::write(&path, content.to_string())?;
        Ok(path.display().to_string())
    }

    /// Where containers log.
    pub(crate) fn logs(&self) -> PathBuf {
        self.directory.join("logs")
    }

    /// Cgroup of pods: the lab's, which its programs are attached to.
    pub(crate) fn cgroup_parent(&self) -> String {
        let name = self.lab.config().cgroup.file_name().unwrap_or_default().to_string_lossy();
        format!("/{name}")
    }

    /// The directory of netns under a path that no other mount has: the runtime looks at the propagation of a
    /// volume's source, and takes the first mount of its path for it.
    pub fn netns_directory(&self) -> PathBuf {
        self.directory.join("run/netns")
    }

    /// Names below /run/netns that are the runtime's.
    pub fn netns(&self) -> Vec<String> {
        let mut names = crate::node_agent::names(Path::new(NETNS));
        names.retain(|name| name.starts_with("cni-"));
        names
    }
}

impl Drop for Containerd<'_> {
    fn drop(&mut self) {
        self.process.kill();
        crate::cgroup::remove_from_all_hierarchies(&self.cgroup_parent());
    }
}

/// An answer of crictl: what it printed, or why it failed.
pub(crate) fn answer(output: io::Result<Output>) -> Result<String, String> {
    let output = output.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    // Its words are quoted in its log.
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr).replace("\\\"", "\""))
    }
}

#[expect(clippy::print_stderr, reason = "what containerd says belongs to the test's output")]
fn hear(line: String) {
    if !line.contains("level=info") {
        eprintln!("containerd: {line}");
    }
}

fn socket(directory: &Path) -> String {
    format!("unix://{}", directory.join("containerd.sock").display())
}

/// With containerd's own programs first.
fn path() -> String {
    let own = ["runtime/usr/bin", "runtime/usr/sbin"].map(|name| process::tool(name).display().to_string());
    format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", own.join(":"))
}

/// Configuration, version 2.
fn configuration(directory: &Path, chain: &Chain) -> String {
    let directory = directory.display();
    format!(
        r#"
version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = [
    "io.containerd.internal.v1.opt",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
]
[grpc]
address = "{directory}/containerd.sock"
[ttrpc]
address = "{directory}/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{configuration}"
"#,
        image = Image::POD,
        plugins = chain.plugins().display(),
        configuration = chain.configuration().display(),
    )
}
