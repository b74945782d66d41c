//! CPU time of everything a lab does, kernel work included.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

/// Reads the CPU time that the lab's cgroup has used: client, server and ztunnel. Packets on `lo` and
/// on a veth are received in the context of the thread that sent them, so this includes the network
/// stack, except for what the kernel defers to ksoftirqd; that is added, for the whole machine. A
/// kernel that accounts for interrupts apart takes them out of the cgroup's time: there, all interrupt
/// time of the machine is added.
pub(super) struct Cpu {
    cgroup: PathBuf,
    deferred: Deferred,
}

enum Deferred {
    /// `/proc/<pid>/schedstat` of each ksoftirqd.
    Threads(Vec<PathBuf>),
    /// Interrupt columns of `/proc/stat`.
    Interrupts,
}

impl Cpu {
    pub(super) fn of(cgroup: &Path) -> Self {
        let deferred =
            if accounts_for_interrupts() { Deferred::Interrupts } else { Deferred::Threads(ksoftirqd()) };
        Self { cgroup: cgroup.join("cpu.stat"), deferred }
    }

    /// Time used since the cgroup was made.
    pub(super) fn time(&self) -> Duration {
        let stat = fs::read_to_string(&self.cgroup).expect("cpu.stat of the lab's cgroup");
        let used = stat.lines().find_map(|line| line.strip_prefix("usage_usec ")).expect("usage_usec");
        let used = Duration::from_micros(used.trim().parse().expect("microseconds"));
        used + match &self.deferred {
            Deferred::Threads(threads) => threads.iter().map(|path| run_time(path)).sum(),
            Deferred::Interrupts => interrupts(),
        }
    }
}

fn run_time(schedstat: &Path) -> Duration {
    let text = fs::read_to_string(schedstat).unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|first| first.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or_default())
}

fn ksoftirqd() -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    processes
        .filter(|process| {
            fs::read_to_string(process.join("comm")).is_ok_and(|name| name.starts_with("ksoftirqd/"))
        })
        .map(|process| process.join("schedstat"))
        .collect()
}

/// Time that the CPUs of the machine were not idle, all together.
pub(super) fn busy() -> Duration {
    // User, nice, system, and the interrupts.
    [(1, 3), (6, 2)].map(|(first, count)| machine(first, count)).into_iter().sum()
}

fn interrupts() -> Duration {
    machine(6, 2)
}

/// Columns of `cpu user nice system idle iowait irq softirq …`, in hundredths of a second.
fn machine(first: usize, count: usize) -> Duration {
    let stat = fs::read_to_string("/proc/stat").expect("/proc/stat");
    let cpu = stat.lines().next().unwrap_or_default();
    let columns = cpu.split_whitespace().skip(first).take(count);
    let ticks: u64 = columns.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}

fn accounts_for_interrupts() -> bool {
    let mut config = std::process::Command::new("sh");
    config.args(["-c", "zcat /proc/config.gz 2>/dev/null || cat /boot/config-$(uname -r) 2>/dev/null"]);
    let config = config.output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&config).lines().any(|line| line == "CONFIG_IRQ_TIME_ACCOUNTING=y")
}
