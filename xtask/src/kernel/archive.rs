//! Kernel packages of Debian's archive, fetched with apt lists of their own.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use super::Version;
use crate::exec;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The newest package of the version, into `directory`.
pub(super) fn download(version: Version, directory: &Path) -> anyhow::Result<PathBuf> {
    let lists = directory.join("lists/partial");
    fs::create_dir_all(&lists).with_context(|| format!("cannot create {}", lists.display()))?;
    let source = format!("deb [signed-by={KEYRING}] {} {} main\n", mirror()?, version.suite());
    fs::write(directory.join("sources.list"), source).context("cannot write an apt source")?;

    let apt = |program: &str| apt(program, directory);
    exec::run_quietly(apt("apt-get").args(["-qq", "update"]))
        .with_context(|| format!("cannot read the Debian suite {}", version.suite()))?;
    let found = exec::query(apt("apt-cache").args(["search", "--names-only", "^linux-image-6.*-amd64$"]))?;
    let names = found.lines().filter_map(|line| line.split_whitespace().next());
    let package = newest(names, version.name())
        .with_context(|| format!("the suite {} has no kernel {}", version.suite(), version.name()))?;
    exec::run_quietly(apt("apt-get").current_dir(directory).args(["-qq", "download", package]))?;

    let files = fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    files
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .with_context(|| format!("apt-get download left no package in {}", directory.display()))
}

/// Where this machine gets Debian from.
fn mirror() -> anyhow::Result<String> {
    let mut targets = Command::new("apt-get");
    targets
        .args(["indextargets", "--format", "$(REPO_URI)"])
        .args(["Created-By: Packages", "Origin: Debian"]);
    let uris = exec::query(&mut targets)?;
    let main = uris.lines().find(|uri| !uri.trim_end_matches('/').ends_with("security"));
    main.map(str::to_owned)
        .context("apt knows no Debian archive to take kernels from: run `apt-get update`, on Debian")
}

/// apt with lists of its own: the machine's sources stay as they are.
fn apt(program: &str, directory: &Path) -> Command {
    let set = |key: &str, value: &Path| {
        let mut option = OsString::from(format!("{key}="));
        option.push(value);
        [OsString::from("-o"), option]
    };
    let mut command = Command::new(program);
    command
        .args(set("Dir::Etc::sourcelist", &directory.join("sources.list")))
        .args(set("Dir::Etc::sourceparts", Path::new("-")))
        .args(set("Dir::State::lists", &directory.join("lists")))
        .args(set("Dir::Cache::pkgcache", Path::new("")))
        .args(set("Dir::Cache::srcpkgcache", Path::new("")))
        // The user `_apt` may not be able to write into this clone.
        .args(["-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none"]);
    command
}

/// The newest package of a version, without the variants for clouds and real time.
fn newest<'a>(names: impl Iterator<Item = &'a str>, version: &str) -> Option<&'a str> {
    let prefix = format!("linux-image-{version}.");
    names
        .filter(|name| name.starts_with(&prefix))
        .filter(|name| !["-cloud-", "-rt-", "-unsigned"].iter().any(|variant| name.contains(variant)))
        .max_by_key(|name| numbers(name.trim_end_matches("-amd64")))
}

fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_compares_numbers_and_skips_variants() {
        let names = [
            "linux-image-6.1.0-9-amd64",
            "linux-image-6.1.0-57-amd64",
            "linux-image-6.1.0-58-cloud-amd64",
            "linux-image-6.1.0-58-rt-amd64",
            "linux-image-6.12.90+deb12-amd64",
            "linux-image-6.12.90+deb12.1-amd64",
        ];
        assert_eq!(newest(names.into_iter(), "6.1"), Some("linux-image-6.1.0-57-amd64"));
        assert_eq!(newest(names.into_iter(), "6.12"), Some("linux-image-6.12.90+deb12.1-amd64"));
        assert_eq!(newest(names.into_iter(), "6.16"), None);
    }
}
