//! `cargo xtask setup`: installs what the other verbs need and is not there.

mod apt;
mod build;
mod go;
mod needs;
mod runtime;

use anyhow::bail;

pub(crate) use self::needs::{BUILD, LAB, NEXTEST, RUNTIME, VM};
use self::needs::{Need, Source};
use crate::as_root;
use crate::workspace::Workspace;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also what `kernel` needs: qemu and the tools for its initramfs
    #[arg(long)]
    vm: bool,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let mut groups = vec![BUILD, LAB, RUNTIME, NEXTEST];
    if args.vm {
        groups.push(VM);
    }
    ensure(workspace, &groups)?;
    eprintln!("setup: everything is there");
    Ok(())
}

/// Installs what is missing of these groups; says what to do where it cannot.
pub(crate) fn ensure(workspace: &Workspace, groups: &[&'static [Need]]) -> anyhow::Result<()> {
    let missing = missing(workspace, groups);
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|need| need.name).collect();
    eprintln!("setup: missing {}", names.join(", "));

    let packages: Vec<&str> =
        missing.iter().flat_map(|need| need.packages).copied().filter(|package| !apt::has(package)).collect();
    if !packages.is_empty() {
        if !apt::is_usable() || !as_root::is_root()? {
            bail!("{}", instructions(&missing, &packages));
        }
        apt::install(&packages)?;
    }
    for need in &missing {
        match need.source {
            Source::Packages => {}
            Source::BpfLinker => build::bpf_linker(workspace)?,
            Source::Nextest => build::nextest(workspace)?,
            Source::Runtime => runtime::unpack(workspace)?,
            Source::Go => go::build(workspace)?,
        }
    }
    let still: Vec<&str> = self::missing(workspace, groups).iter().map(|need| need.name).collect();
    if !still.is_empty() {
        bail!("installed, but still missing: {}. Run `cargo xtask build-ebpf` for details", still.join(", "));
    }
    Ok(())
}

fn missing(workspace: &Workspace, groups: &[&'static [Need]]) -> Vec<&'static Need> {
    groups.iter().flat_map(|group| group.iter()).filter(|need| !(need.is_met)(workspace)).collect()
}

fn instructions(missing: &[&Need], packages: &[&str]) -> String {
    let elsewhere: Vec<String> =
        missing.iter().map(|need| format!("\n  - {}: {}", need.name, need.elsewhere)).collect();
    format!(
        "this needs root on Debian or Ubuntu. As root there:\n  \
         apt-get update && apt-get install {}\n\
         and run this again. Elsewhere:{}",
        packages.join(" "),
        elsewhere.concat()
    )
}
