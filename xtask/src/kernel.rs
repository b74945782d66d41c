//! `cargo xtask kernel VERSION`: the network namespace tests under another kernel.
//!
//! qemu emulates a machine that boots Debian's kernel over this machine's own root file system, read-only
//! below a layer in memory. The guest has pure cgroup v2.

mod archive;
mod guest;
mod image;
mod initramfs;
mod qemu;

use std::env::consts::ARCH;
use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::bail;
use clap::ValueEnum;

use self::image::Image;
use crate::nextest::BuiltTests;
use crate::workspace::Workspace;
use crate::{build_ebpf, build_plugin, setup};

#[derive(clap::Args)]
pub(crate) struct Args {
    version: Version,
    /// Only tests whose name contains this, or those of the file tests/tests/NAME.rs
    #[arg(long, value_name = "NAME", conflicts_with = "command")]
    filter: Option<String>,
    /// Run this in place of the tests, in the clone's root as root
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// A kernel that Debian 12 has, from which suite of its archive.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Version {
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
}

impl Version {
    fn name(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }

    fn suite(self) -> &'static str {
        match self {
            Self::V6_1 => "bookworm",
            Self::V6_12 => "bookworm-backports",
        }
    }
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<ExitCode> {
    if ARCH != "x86_64" {
        bail!("`kernel` boots x86_64 kernels, this machine is {ARCH}: run it on x86_64");
    }
    if !args.command.is_empty() {
        setup::ensure(workspace, &[setup::VM])?;
        return boot(workspace, args.version, &args.command);
    }
    setup::ensure(workspace, &[setup::BUILD, setup::LAB, setup::NEXTEST, setup::VM])?;
    build_ebpf::run(workspace)?;
    build_plugin::run(workspace)?;
    let tests = BuiltTests::build(workspace)?;
    let mut command = vec![OsString::from(tests.program())];
    command.extend(tests.arguments("kernel-vm", args.filter.as_deref()));
    boot(workspace, args.version, &command)
}

fn boot(workspace: &Workspace, version: Version, command: &[OsString]) -> anyhow::Result<ExitCode> {
    let image = Image::get(workspace, version)?;
    let run = guest::RunDirectory::create(workspace)?;
    let script = guest::script(workspace.root(), command);
    let initramfs = initramfs::pack(workspace, &image, run.path(), &script)?;
    qemu::run(&image, &initramfs, &run.path().join("exit")).map(ExitCode::from)
}
