//! Under which the numbers were measured.

use std::{fs, process::Command, thread};

use serde::Serialize;

use super::plan::Plan;
use crate::real;

/// Everything that the numbers depend on, as far as it is known.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Conditions {
    date: String,
    kernel: String,
    cpu: String,
    cpus: usize,
    governor: Option<String>,
    memory: String,
    /// "stand-in" (no TLS) or "real" (mTLS).
    ztunnel: &'static str,
    ztunnel_version: String,
    ztunnel_threads: &'static str,
    access_log: bool,
    iptables: String,
    congestion_control: String,
    ip_family: &'static str,
    message_bytes: usize,
    clients_for_connections: usize,
    runs: usize,
    seconds: f64,
    load_average_before: String,
    load_average_after: String,
    cpu_time: &'static str,
    kernel_memory: &'static str,
    program_pod: &'static str,
    host_connect: &'static str,
}

impl Conditions {
    pub(super) fn read(plan: &Plan, congestion_control: Option<&str>) -> Self {
        let real = real::binary();
        Self {
            date: output("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]),
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_default(),
            cpu: field("/proc/cpuinfo", "model name"),
            cpus: thread::available_parallelism().map_or(0, usize::from),
            governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            memory: field("/proc/meminfo", "MemTotal"),
            ztunnel: if real.is_some() { "real" } else { "stand-in" },
            ztunnel_version: match &real {
                Some(binary) => output(&binary.to_string_lossy(), &["version"]),
                None => env!("CARGO_PKG_VERSION").to_owned(),
            },
            ztunnel_threads: "2, its default",
            access_log: false,
            iptables: output("iptables", &["-V"]),
            congestion_control: congestion_control.map_or_else(
                || read("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default(),
                str::to_owned,
            ),
            ip_family: "IPv4",
            message_bytes: super::load::MESSAGE,
            clients_for_connections: super::connections::AT_ONCE,
            runs: plan.runs,
            seconds: plan.seconds,
            load_average_before: load_average(),
            load_average_after: String::new(),
            cpu_time: "the lab's cgroup (client, server, ztunnel) and ksoftirqd",
            kernel_memory: "SUnreclaim + VmallocUsed + Percpu of /proc/meminfo, over 100 pods at once",
            program_pod: "culvert: register and activate; iptables: iptables-restore and ip6tables-restore \
                          alone, netlink not timed; parallel: until the last of 100 is done",
            host_connect: "direct: no programs loaded; ratio_to_direct is the cost",
        }
    }

    /// Once all is measured.
    pub(super) fn finish(&mut self) {
        self.load_average_after = load_average();
    }

    pub(super) fn is_real(&self) -> bool {
        self.ztunnel == "real"
    }

    #[expect(clippy::print_stdout, reason = "conditions belong to the table")]
    pub(super) fn print(&self) {
        let governor = self.governor.as_deref().unwrap_or("none");
        println!("{}, Linux {}, {} x {}, governor {governor}", self.date, self.kernel, self.cpus, self.cpu);
        println!("ztunnel: {}, {}, threads: {}", self.ztunnel, self.ztunnel_version, self.ztunnel_threads);
        println!(
            "{}; {}, {}, {} bytes each way",
            self.iptables, self.ip_family, self.congestion_control, self.message_bytes
        );
        println!("{} turns of {} s; load average {}", self.runs, self.seconds, self.load_average_before);
        println!("CPU time: {}", self.cpu_time);
        println!("kernel memory: {}", self.kernel_memory);
        println!("programming a pod: {}", self.program_pod);
        println!("host connect: {}", self.host_connect);
    }
}

pub(super) fn load_average() -> String {
    read("/proc/loadavg").unwrap_or_default()
}

pub(super) fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

pub(super) fn field(path: &str, name: &str) -> String {
    let text = read(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
    line.map(|value| value.trim().to_owned()).unwrap_or_default()
}

pub(super) fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().map(|output| output.stdout);
    String::from_utf8_lossy(&output.unwrap_or_default()).trim().to_owned()
}
