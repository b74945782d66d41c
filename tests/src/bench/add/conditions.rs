//! Under which the ADD path was measured.

use std::{thread, time::Duration};

use serde::Serialize;

use super::super::conditions::{field, load_average, output, read};

#[derive(Clone, Debug, Serialize)]
pub(super) struct Conditions {
    date: String,
    kernel: String,
    cpu: String,
    cpus: usize,
    governor: Option<String>,
    memory: String,
    plugin: &'static str,
    agent: &'static str,
    ztunnel: &'static str,
    pods: &'static str,
    time: &'static str,
    restart: &'static str,
    quick: bool,
    load_average_before: String,
    load_average_after: String,
    /// Share of the machine's CPU time that was used, this benchmark's own included.
    machine_busy: f64,
}

impl Conditions {
    pub(super) fn read(quick: bool) -> Self {
        Self {
            date: output("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]),
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_default(),
            cpu: field("/proc/cpuinfo", "model name"),
            cpus: thread::available_parallelism().map_or(0, usize::from),
            governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            memory: field("/proc/meminfo", "MemTotal"),
            plugin: "static, profile `plugin`, log level info",
            agent: "--standalone, release build, log level info to a pipe",
            ztunnel: "stand-in: opens its seven sockets and acks at once",
            pods: "netns with lo and a veth on a bridge, IPv4 and IPv6",
            time: "from before the start of the plugin until it was waited for; 1,000 ADDs and DELs in turn; \
                   330 at once beside 170 enrolled ones",
            restart: "SIGTERM, wait, exec, until the plugin's socket answers; without the start-up probe",
            quick,
            load_average_before: load_average(),
            load_average_after: String::new(),
            machine_busy: f64::NAN,
        }
    }

    /// Once all is measured.
    pub(super) fn finish(&mut self, took: Duration, busy: Duration) {
        self.load_average_after = load_average();
        self.machine_busy = busy.as_secs_f64() / took.as_secs_f64() / self.cpus as f64;
    }

    #[expect(clippy::print_stdout, reason = "conditions belong to the table")]
    pub(super) fn print(&self) {
        let governor = self.governor.as_deref().unwrap_or("none");
        println!("{}, Linux {}, {} x {}, governor {governor}", self.date, self.kernel, self.cpus, self.cpu);
        println!("plugin: {}", self.plugin);
        println!("agent: {}", self.agent);
        println!("ztunnel: {}", self.ztunnel);
        println!("pods: {}", self.pods);
        println!("time: {}", self.time);
        println!("restart: {}", self.restart);
        println!("load average {}", self.load_average_before);
    }
}
