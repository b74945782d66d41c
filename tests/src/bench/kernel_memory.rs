//! What the kernel holds.

use std::fs;

/// Kernel memory of the whole machine in KiB: slabs that cannot be reclaimed (sockets, rules, map
/// entries), vmalloc areas (programs, large maps), per-CPU memory (counters).
pub(super) fn kib() -> f64 {
    let meminfo = fs::read_to_string("/proc/meminfo").expect("/proc/meminfo");
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.trim_end_matches("kB").trim().parse::<f64>().ok()).unwrap_or_default()
    };
    field("SUnreclaim:") + field("VmallocUsed:") + field("Percpu:")
}
