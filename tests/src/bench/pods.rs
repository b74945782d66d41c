//! The time to program a pod, and what the kernel keeps for it.
//!
//! Culvert: `register` and `activate` in a process that lives. iptables: the two subprocesses of
//! istio-cni; the processes it runs before them to look for earlier rules, and its routes and rules, are
//! done but not timed.

use std::{
    net::IpAddr,
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use culvert_dataplane::{Netns, Options};

use super::{
    iptables, kernel_memory,
    measure::{
        Metrics, POD_1, POD_100, POD_1000, POD_MEMORY, POD_P50, POD_P99, PODS_AT_ONCE, median, metrics,
        percentile,
    },
    worker::Variant,
};
use crate::{ip, lab::Lab, topology};

/// How many pods around the 100th and the 1,000th are looked at.
const AROUND: usize = 10;
/// For what the kernel does afterwards.
const SETTLE: Duration = Duration::from_millis(500);

struct Pod {
    netns: Netns,
    addresses: [IpAddr; 2],
}

pub(super) fn measure(
    lab: &Lab,
    variant: Variant,
    one_by_one: usize,
    at_once: usize,
    ended: &AtomicBool,
) -> anyhow::Result<Metrics> {
    let mut times = Vec::new();
    // Dropping a pod would make the kernel clean up while the next is timed.
    let mut pods = Vec::new();
    for number in 1..=one_by_one {
        anyhow::ensure!(!ended.load(Ordering::Relaxed), "the benchmark ends");
        let pod = Pod::new(number)?;
        times.push(pod.program(lab, variant)?.as_secs_f64() * 1e3);
        pods.push(pod);
    }
    let around = |number: usize| match times.get(number.saturating_sub(AROUND)..number) {
        Some(times) if !times.is_empty() => median(times),
        _ => f64::NAN,
    };
    let mut metrics = metrics([
        (POD_1, times.first().copied().unwrap_or(f64::NAN)),
        (POD_100, around(100)),
        (POD_1000, around(1000)),
    ]);
    let more = (one_by_one + 1..=one_by_one + at_once).map(Pod::new).collect::<anyhow::Result<Vec<_>>>()?;
    thread::sleep(SETTLE);
    let memory = kernel_memory::kib();
    let together = program_at_once(lab, variant, &more)?;
    thread::sleep(SETTLE);
    let memory = (kernel_memory::kib() - memory) / at_once as f64;
    times.sort_by(f64::total_cmp);
    metrics.extend(super::measure::metrics([
        (POD_P50, percentile(&times, 0.5)),
        (POD_P99, percentile(&times, 0.99)),
        (PODS_AT_ONCE, together.as_secs_f64() * 1e3),
        (POD_MEMORY, memory),
    ]));
    Ok(metrics)
}

/// Until the last is done.
fn program_at_once(lab: &Lab, variant: Variant, pods: &[Pod]) -> anyhow::Result<Duration> {
    let begin = Barrier::new(pods.len() + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = pods
            .iter()
            .map(|pod| {
                scope.spawn(|| {
                    begin.wait();
                    pod.program(lab, variant)
                })
            })
            .collect();
        begin.wait();
        let begun = Instant::now();
        for thread in threads {
            thread.join().expect("a pod's thread")?;
        }
        Ok(begun.elapsed())
    })
}

impl Pod {
    /// As a CNI plugin leaves it: `lo`, a veth whose other end is in the node's netns, routes.
    fn new(number: usize) -> anyhow::Result<Self> {
        let (v4, v6) = topology::pod_addresses(u16::try_from(number)?);
        let netns = Netns::create()?;
        netns.run(|| {
            ip::batch(
                None,
                &format!(
                    "link add eth0 type veth peer name pod-{number} netns node
                     addr add {v4}/32 dev eth0
                     addr add {v6}/128 dev eth0 nodad
                     link set eth0 up
                     route add 0.0.0.0/0 dev eth0
                     route add ::/0 dev eth0"
                ),
            );
        })?;
        ip::batch(Some("node"), &format!("link set pod-{number} up"));
        Ok(Self { netns, addresses: [v4.into(), v6.into()] })
    }

    fn program(&self, lab: &Lab, variant: Variant) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        if variant == Variant::Iptables {
            iptables::apply_rules(&self.netns)?;
            let took = begun.elapsed();
            iptables::apply_routing(&self.netns)?;
            return Ok(took);
        }
        let dataplane = lab.dataplane();
        dataplane.register(&self.netns, &self.addresses, Options::default())?;
        dataplane.activate(&self.netns)?;
        Ok(begun.elapsed())
    }
}
