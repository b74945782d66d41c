//! cargo-nextest: one process per test.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;

use crate::workspace::Workspace;
use crate::{exec, programs};

/// The tests that need no root: those of the default members.
pub(crate) fn run_host_tests(
    workspace: &Workspace,
    filter: Option<&str>,
    objects: bool,
) -> anyhow::Result<()> {
    let mut nextest = workspace.command(program(workspace)?);
    nextest.args(["nextest", "run", "--locked"]).args(selection(filter.map(named)));
    if objects {
        nextest.env("EBPF_OBJECTS_REQUIRED", "1");
    }
    exec::run(&mut nextest)
}

/// The tests of culvert-tests, built here and run elsewhere: as root, or in another kernel.
pub(crate) struct BuiltTests {
    nextest: PathBuf,
    sources: PathBuf,
    binaries: PathBuf,
    metadata: PathBuf,
}

impl BuiltTests {
    pub(crate) fn build(workspace: &Workspace) -> anyhow::Result<Self> {
        let directory = workspace.path("target/nextest-reuse");
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let built = Self {
            nextest: program(workspace)?,
            sources: workspace.path("tests/tests"),
            binaries: directory.join("binaries.json"),
            metadata: directory.join("metadata.json"),
        };

        // The agent and the plugin that the tests start as processes.
        let mut programs = workspace.cargo();
        programs.args("build --locked --package culvert-agent --package culvert-cni --bins".split(' '));
        exec::run(programs.env("EBPF_OBJECTS_REQUIRED", "1"))?;

        let mut list = workspace.command(&built.nextest);
        list.args(["nextest", "list", "--locked", "--package", "culvert-tests"])
            .args(["--list-type", "binaries-only", "--message-format", "json"])
            .env("EBPF_OBJECTS_REQUIRED", "1");
        write(&built.binaries, &exec::run_for_output(&mut list)?)?;

        let mut metadata = workspace.cargo();
        metadata.args(["metadata", "--locked", "--format-version", "1"]);
        write(&built.metadata, &exec::query(&mut metadata)?)?;
        Ok(built)
    }

    pub(crate) fn program(&self) -> &PathBuf {
        &self.nextest
    }

    pub(crate) fn arguments(&self, profile: &str, filter: Option<&str>) -> Vec<OsString> {
        let words = ["nextest", "run", "--profile", profile].map(OsString::from);
        let files = [
            OsString::from("--binaries-metadata"),
            self.binaries.clone().into(),
            OsString::from("--cargo-metadata"),
            self.metadata.clone().into(),
        ];
        let selection = selection(filter.map(|name| {
            // nextest refuses a file name that does not exist.
            let is_file = self.sources.join(name).with_extension("rs").is_file();
            if is_file { format!("binary({name})") } else { named(name) }
        }));
        words.into_iter().chain(files).chain(selection.into_iter().map(OsString::from)).collect()
    }
}

fn program(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    programs::find(workspace, "cargo-nextest").context("cargo-nextest is missing: run `cargo xtask setup`")
}

fn named(name: &str) -> String {
    format!("test({name})")
}

/// Those of a filter set. It may match among the tests with root or those without only, so none is no error
/// here.
fn selection(filter_set: Option<String>) -> Vec<String> {
    filter_set.map_or_else(Vec::new, |set| vec!["--no-tests=warn".into(), "-E".into(), set])
}

fn write(file: &PathBuf, text: &str) -> anyhow::Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}
