//! What surrounds the process: capabilities and mounts.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{BPF_FS_MAGIC, CGROUP2_SUPER_MAGIC, FsType, statfs};

use super::Check;
use crate::{
    Config, Netns,
    sysctl::{self, Sysctls},
};

/// Number and name (include/uapi/linux/capability.h), and what it is for.
const CAPABILITIES: [(u32, &str); 3] = [(12, "NET_ADMIN"), (21, "SYS_ADMIN"), (39, "BPF")];

pub(super) fn checks(config: &Config) -> Vec<Check> {
    vec![
        Check::new(
            "capabilities NET_ADMIN, SYS_ADMIN, BPF",
            capabilities(),
            "run as root, or add them to the container's securityContext.capabilities",
        ),
        Check::new(
            "host network namespace",
            Netns::open(&config.host_netns).map(drop).map_err(|error| with_cause(&error)),
            "name it with --host-netns; in a container it is <host-proc>/1/ns/net and needs SYS_PTRACE",
        ),
        Check::new(
            "bpffs, where pins outlive the process",
            mounted(&config.bpffs, BPF_FS_MAGIC, "bpffs"),
            "mount it on the host: mount -t bpf bpf /sys/fs/bpf (a mount inside the container would vanish with it)",
        ),
        Check::new(
            "root of the cgroup2 hierarchy",
            mounted(&config.cgroup, CGROUP2_SUPER_MAGIC, "cgroup2").and_then(|()| is_root(&config.cgroup)),
            "name the host's root: /sys/fs/cgroup, on a hybrid host /sys/fs/cgroup/unified, in a container the \
             same below the host's mount; programs attached lower down see no pods",
        ),
        Check::new(
            "sysctls of a pod can be written",
            writable_sysctls(config),
            "mount the host's /proc read-write and name it with --host-proc; a container's own /proc/sys is read-only",
        ),
    ]
}

/// The mount point of the cgroup2 hierarchy, on hybrid hosts too (systemd mounts it at `unified`).
pub fn find_cgroup2() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (target, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(target))
    })
}

fn capabilities() -> Result<(), String> {
    let status = fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let field = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap_or_default();
    let effective = u64::from_str_radix(field.trim(), 16).map_err(|error| format!("CapEff: {error}"))?;
    let missing: Vec<_> =
        CAPABILITIES.iter().filter(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| *name).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("missing: {}", missing.join(", "))) }
}

fn mounted(path: &Path, magic: FsType, name: &str) -> Result<(), String> {
    let found = statfs(path).map_err(|errno| format!("{}: {errno}", path.display()))?;
    if found.filesystem_type() == magic { Ok(()) } else { Err(format!("{} is no {name}", path.display())) }
}

/// Every cgroup but the root of the hierarchy has this file, whatever the process's cgroup namespace.
fn is_root(cgroup: &Path) -> Result<(), String> {
    if cgroup.join("cgroup.type").exists() {
        return Err(format!("{} is not the root but a cgroup below it", cgroup.display()));
    }
    Ok(())
}

fn writable_sysctls(config: &Config) -> Result<(), String> {
    let netns = Netns::create().map_err(|error| with_cause(&error))?;
    netns
        .run(|| Sysctls::open(&config.proc)?.write(sysctl::ALL_ON))
        .map_err(|error| with_cause(&error))?
        .map_err(|error| format!("below {}: {error}", config.proc.join("sys/net").display()))
}

pub(super) fn with_cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
