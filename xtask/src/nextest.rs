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
    nextest.args(["nextest", "run", "--locked"]).args(selection(filter));
    if objects {
        nextest.env("EBPF_OBJECTS_REQUIRED", "1");
    }
    exec::run(&mut nextest)
}

/// The tests of culvert-tests, built here and run elsewhere: as root, or in another kernel.
pub(crate) struct BuiltTests {
    nextest: PathBuf,
    binaries: PathBuf,
    metadata: PathBuf,
}

impl BuiltTests {
    pub(crate) fn build(workspace: &Workspace) -> anyhow::Result<Self> {
        let directory = workspace.path("target/nextest-reuse");
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let built = Self {
            nextest: program(workspace)?,
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
        words.into_iter().chain(files).chain(selection(filter).into_iter().map(OsString::from)).collect()
    }
}

fn program(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    programs::find(workspace, "cargo-nextest").context("cargo-nextest is missing: run `cargo xtask setup`")
}

/// What a name selects: tests that contain it, and whole test files. It may match among the tests with
/// root or those without only, so none is no error here.
fn selection(filter: Option<&str>) -> Vec<String> {
    filter.map_or_else(Vec::new, |name| {
        vec!["--no-tests=warn".into(), "-E".into(), format!("test({name}) | binary({name})")]
    })
}

fn write(file: &PathBuf, text: &str) -> anyhow::Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}
