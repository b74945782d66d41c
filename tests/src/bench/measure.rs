//! What a worker can be asked for.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::placement::Placement;

/// A measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Measure {
    /// Requests on connections that stay open.
    Requests { connections: usize, placement: Placement, seconds: f64 },
    /// Connections with one request each.
    Connections { seconds: f64 },
    /// One stream from client to server.
    Stream { seconds: f64 },
    /// Connections between processes of the node.
    HostConnect { seconds: f64 },
    /// Pods programmed one after the other, then some at once.
    Pods { one_by_one: usize, at_once: usize },
}

/// Results by name.
pub(super) type Metrics = BTreeMap<String, f64>;

pub(super) const PER_SECOND: &str = "per_second";
/// Microseconds.
pub(super) const P50: &str = "p50";
/// Microseconds.
pub(super) const P99: &str = "p99";
/// Microseconds of CPU time for one of what `PER_SECOND` counts.
pub(super) const CPU: &str = "cpu";
/// Share of the machine's CPU time that went to others: near 0, or the numbers are not to be trusted.
pub(super) const OTHERS: &str = "others";
/// Those that did not do what they should.
pub(super) const FAILED: &str = "failed";
/// Milliseconds for one pod, median and 99th percentile of all.
pub(super) const POD_P50: &str = "pod_p50";
pub(super) const POD_P99: &str = "pod_p99";
/// Milliseconds for the first pod of a fresh process.
pub(super) const POD_1: &str = "pod_1";
/// Milliseconds, median of the pods around this one.
pub(super) const POD_100: &str = "pod_100";
pub(super) const POD_1000: &str = "pod_1000";
/// Milliseconds until the last of the pods begun at once is done.
pub(super) const PODS_AT_ONCE: &str = "pods_at_once";
/// KiB.
pub(super) const POD_MEMORY: &str = "pod_memory";

/// Without those that are no number: nothing was there to measure.
pub(super) fn metrics<const N: usize>(pairs: [(&str, f64); N]) -> Metrics {
    let pairs = pairs.into_iter().filter(|(_, value)| value.is_finite());
    pairs.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The value below which this share of the samples lies.
pub(super) fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = ((sorted.len() as f64 * share).ceil() as usize).saturating_sub(1);
    sorted.get(rank).or(sorted.last()).copied().unwrap_or(f64::NAN)
}

/// The middle of unsorted samples.
pub(super) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_percentile_is_one_of_the_samples() {
        let samples: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&samples, 0.5), 50.0);
        assert_eq!(percentile(&samples, 0.99), 99.0);
        assert_eq!(percentile(&[7.0], 0.99), 7.0);
    }
}
