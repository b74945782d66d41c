//! Programs of the Go module proxy, built into target/tools/go and kept there by version.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::workspace::Workspace;
use crate::{exec, programs};

/// A main package, its version, and the directory below target/tools that shows it.
struct Tool {
    package: &'static str,
    version: &'static str,
    shown: &'static str,
}

/// The one place of these versions. crictl takes 45 s on two idle cores, all others together 20.
const TOOLS: [Tool; 5] = [
    Tool { package: "github.com/containernetworking/cni/cnitool", version: "v1.3.1", shown: "bin" },
    plugin("github.com/containernetworking/plugins/plugins/main/bridge"),
    plugin("github.com/containernetworking/plugins/plugins/main/loopback"),
    plugin("github.com/containernetworking/plugins/plugins/ipam/host-local"),
    Tool { package: "sigs.k8s.io/cri-tools/cmd/crictl", version: "v1.37.0", shown: "bin" },
];

/// Debian's know the CNI specification up to 1.0.0 only.
const fn plugin(package: &'static str) -> Tool {
    Tool { package, version: "v1.9.0", shown: "cni" }
}

impl Tool {
    fn name(&self) -> &str {
        self.package.rsplit('/').next().unwrap_or(self.package)
    }

    /// Where it is built to.
    fn directory(&self, workspace: &Workspace) -> PathBuf {
        programs::tools(workspace).join("go").join(format!("{}@{}", self.name(), self.version))
    }

    /// Where the tests look for it.
    fn link(&self, workspace: &Workspace) -> PathBuf {
        programs::tools(workspace).join(self.shown).join(self.name())
    }

    fn is_built(&self, workspace: &Workspace) -> bool {
        let program = self.directory(workspace).join(self.name());
        program.exists() && fs::read_link(self.link(workspace)).is_ok_and(|target| target == program)
    }
}

pub(super) fn is_built(workspace: &Workspace) -> bool {
    TOOLS.iter().all(|tool| tool.is_built(workspace))
}

/// Builds those that are missing, one after the other, each with its time.
pub(super) fn build(workspace: &Workspace) -> anyhow::Result<()> {
    let go = find().context(
        "Go is missing, which builds crictl, cnitool and CNI plugins for the tests and the demo: \
         install Go 1.25 or later from https://go.dev/dl into /usr/local/go",
    )?;
    let missing: Vec<_> = TOOLS.iter().filter(|tool| !tool.is_built(workspace)).collect();
    for (number, tool) in missing.iter().enumerate() {
        eprintln!("setup: {} of {} Go programs: {} {}", number + 1, missing.len(), tool.name(), tool.version);
        let directory = tool.directory(workspace);
        let mut install = Command::new(&go);
        install
            .args(["install", "-trimpath", "-ldflags=-s -w"])
            .arg(format!("{}@{}", tool.package, tool.version))
            .env("CGO_ENABLED", "0")
            .env("GOBIN", &directory)
            .env_remove("GOFLAGS");
        exec::run_quietly(&mut install)?;
        show(&directory.join(tool.name()), &tool.link(workspace))?;
    }
    Ok(())
}

/// Puts a link in place of another version's.
fn show(program: &Path, link: &Path) -> anyhow::Result<()> {
    let cannot = || format!("cannot link {} to {}", link.display(), program.display());
    let directory = link.parent().context("a link below a directory")?;
    fs::create_dir_all(directory).with_context(cannot)?;
    if link.symlink_metadata().is_ok() {
        fs::remove_file(link).with_context(cannot)?;
    }
    symlink(program, link).with_context(cannot)
}

fn find() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // Where Go's own archive is unpacked to.
    let usual = PathBuf::from("/usr/local/go/bin");
    env::split_paths(&path).chain([usual]).map(|directory| directory.join("go")).find(|go| go.is_file())
}
