//! What a process holds, by /proc.

use std::fs;

use nix::unistd::Pid;

pub(super) const MIB: f64 = 1024.0 * 1024.0;

/// Resident memory in MiB: all of it (`Rss`), its files' pages included.
pub(super) fn rss(pid: Pid) -> f64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    field(&rollup, "Rss:")
}

/// The most that was ever resident, in MiB.
pub(super) fn peak(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    field(&status, "VmHWM:")
}

/// Open descriptors.
pub(super) fn descriptors(pid: Pid) -> f64 {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(f64::NAN, |entries| entries.count() as f64)
}

/// A field in KiB.
fn field(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim_end_matches("kB").trim().parse::<f64>().ok());
    kib.map_or(f64::NAN, |kib| kib * 1024.0 / MIB)
}
