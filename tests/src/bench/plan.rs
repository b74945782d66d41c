//! What is measured, how often and for how long, and which rows come of it.

use super::{
    measure::{
        CPU, FAILED, Measure, OTHERS, P50, P99, PER_SECOND, POD_1, POD_100, POD_1000, POD_MEMORY, POD_P50,
        POD_P99, PODS_AT_ONCE,
    },
    placement::Placement,
    worker::{Of, Variant},
};

/// Direct, iptables, Culvert.
pub(super) const COLUMNS: usize = 3;
pub(super) const DIRECT: usize = 0;
pub(super) const IPTABLES: usize = 1;
pub(super) const CULVERT: usize = 2;

const ALL: [Option<Variant>; COLUMNS] =
    [Some(Variant::Direct), Some(Variant::Iptables), Some(Variant::Culvert)];
const WITHOUT_BIG_TCP: [Option<Variant>; COLUMNS] =
    [None, Some(Variant::Iptables), Some(Variant::CulvertWithoutBigTcp)];
const NODE_ONLY: [Option<Variant>; COLUMNS] = [Some(Variant::Direct), None, Some(Variant::Culvert)];
const CAPTURE_ONLY: [Option<Variant>; COLUMNS] = [None, Some(Variant::Iptables), Some(Variant::Culvert)];

/// A row of the result: where its numbers come from.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowPlan {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    pub(super) metric: &'static str,
    /// One of the worker's units in the row's.
    pub(super) scale: f64,
}

const fn row(name: &'static str, unit: &'static str, metric: &'static str) -> RowPlan {
    RowPlan { name, unit, metric, scale: 1.0 }
}

/// A measurement in each of the columns.
#[derive(Clone, Debug)]
pub(super) struct Step {
    measure: Measure,
    variants: [Option<Variant>; COLUMNS],
    bulk: bool,
    pub(super) rows: Vec<RowPlan>,
}

impl Step {
    pub(super) fn name(&self) -> &'static str {
        self.rows.first().map_or("", |row| row.name)
    }

    pub(super) fn measure(&self) -> &Measure {
        &self.measure
    }

    /// Which column is measured by whom, in this order.
    pub(super) fn roles(&self) -> impl Iterator<Item = (usize, Of)> {
        let variants = self.variants.iter().enumerate();
        variants
            .filter_map(|(column, variant)| variant.map(|variant| (column, Of { variant, bulk: self.bulk })))
    }
}

/// The whole benchmark.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) runs: usize,
    /// Length of a measurement of traffic.
    pub(super) seconds: f64,
    traffic: Vec<Step>,
    pods: Vec<Step>,
}

impl Plan {
    pub(super) fn new(quick: bool, runs: Option<usize>, only: Option<&str>) -> Self {
        let (usual, seconds, one_by_one) = if quick { (3, 1.0, 100) } else { (7, 2.5, 1000) };
        let (mut traffic, mut pods) = (traffic(seconds), vec![bulk(one_by_one)]);
        if let Some(text) = only {
            for steps in [&mut traffic, &mut pods] {
                steps.retain(|step| step.rows.iter().any(|row| row.name.contains(text)));
            }
        }
        Self { runs: runs.unwrap_or(usual), seconds, traffic, pods }
    }

    /// Steps that share their workers, and how many turns they take.
    pub(super) fn parts(&self) -> [(&[Step], usize); 2] {
        [(&self.traffic, self.runs), (&self.pods, 1)]
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = RowPlan> {
        self.traffic.iter().chain(&self.pods).flat_map(|step| step.rows.clone())
    }
}

fn traffic(seconds: f64) -> Vec<Step> {
    let step = |measure, variants, rows| Step { measure, variants, bulk: false, rows };
    let requests = |connections, placement| Measure::Requests { connections, placement, seconds };
    let milli = |row: RowPlan| RowPlan { scale: 1e-3, ..row };
    vec![
        step(
            requests(16, Placement::Free),
            ALL,
            vec![
                row("rps_16", "requests/s", PER_SECOND),
                row("cpu_per_request", "us", CPU),
                row("p50_16", "us", P50),
                row("p99_16", "us", P99),
                row("cpu_of_others", "of machine", OTHERS),
            ],
        ),
        step(
            requests(1, Placement::Free),
            ALL,
            vec![
                row("rps_1", "requests/s", PER_SECOND),
                row("p50_unpinned", "us", P50),
                row("p99_1", "us", P99),
                row("cpu_per_request_1", "us", CPU),
            ],
        ),
        step(
            requests(1, Placement::Pinned),
            ALL,
            vec![row("p50_pinned", "us", P50), row("p99_pinned", "us", P99)],
        ),
        step(
            Measure::Connections { seconds },
            ALL,
            vec![
                row("connections_per_s", "connections/s", PER_SECOND),
                row("cpu_per_connection", "us", CPU),
                row("connections_failed", "connections", FAILED),
            ],
        ),
        step(
            Measure::Stream { seconds },
            ALL,
            vec![row("stream_throughput", "GB/s", PER_SECOND), milli(row("cpu_per_gb", "ms", CPU))],
        ),
        step(
            Measure::Stream { seconds },
            WITHOUT_BIG_TCP,
            vec![
                row("stream_throughput_without_big_tcp", "GB/s", PER_SECOND),
                milli(row("cpu_per_gb_without_big_tcp", "ms", CPU)),
            ],
        ),
        step(
            Measure::HostConnect { seconds },
            NODE_ONLY,
            vec![row("host_connect_per_s", "connections/s", PER_SECOND)],
        ),
    ]
}

fn bulk(one_by_one: usize) -> Step {
    Step {
        measure: Measure::Pods { one_by_one, at_once: 100 },
        variants: CAPTURE_ONLY,
        bulk: true,
        rows: vec![
            row("program_pod_ms", "ms", POD_P50),
            row("program_pod_p99_ms", "ms", POD_P99),
            row("program_pod_1st_ms", "ms", POD_1),
            row("program_pod_100th_ms", "ms", POD_100),
            row("program_pod_1000th_ms", "ms", POD_1000),
            row("program_pod_100_parallel_ms", "ms", PODS_AT_ONCE),
            row("kernel_memory_per_pod_kib", "KiB", POD_MEMORY),
        ],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_row_has_a_name_of_its_own() {
        let rows: Vec<_> = Plan::new(true, None, None).rows().map(|row| row.name).collect();
        assert_eq!(rows.iter().collect::<HashSet<_>>().len(), rows.len(), "{rows:?}");
    }

    #[test]
    fn a_plan_can_be_narrowed_to_a_row() {
        let plan = Plan::new(false, Some(2), Some("p99_16"));
        assert_eq!(plan.parts().map(|(steps, runs)| (steps.len(), runs)), [(1, 2), (0, 1)]);
    }
}
