//! Samples become rows: medians, and ratios within each turn.

use std::collections::HashMap;

use serde::Serialize;

use super::{
    measure::{Metrics, median},
    plan::{COLUMNS, CULVERT, DIRECT, IPTABLES, Plan, RowPlan, Step},
};

/// All samples of the benchmark.
pub(super) struct Report {
    rows: Vec<RowPlan>,
    samples: HashMap<&'static str, [Vec<f64>; COLUMNS]>,
}

/// A row of the result. `None` (null) where a column does not apply.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    pub(super) direct: Option<f64>,
    pub(super) iptables: Option<f64>,
    pub(super) culvert: Option<f64>,
    /// Culvert divided by iptables.
    pub(super) ratio: Option<f64>,
    pub(super) ratio_min: Option<f64>,
    pub(super) ratio_max: Option<f64>,
    /// Culvert divided by direct.
    pub(super) ratio_to_direct: Option<f64>,
}

impl Report {
    pub(super) fn new(plan: &Plan) -> Self {
        Self { rows: plan.rows().collect(), samples: HashMap::new() }
    }

    /// Takes the rows of a step out of what a worker measured for a column.
    pub(super) fn add(&mut self, step: &Step, column: usize, metrics: &Metrics) {
        for row in &step.rows {
            let samples = self.samples.entry(row.name).or_default().get_mut(column);
            if let Some((samples, value)) = samples.zip(metrics.get(row.metric)) {
                samples.push(value * row.scale);
            }
        }
    }

    pub(super) fn rows(&self) -> Vec<Row> {
        let none = <[Vec<f64>; COLUMNS]>::default();
        let samples = |plan: &RowPlan| self.samples.get(plan.name).unwrap_or(&none);
        self.rows.iter().map(|plan| Row::of(plan, samples(plan))).collect()
    }
}

impl Row {
    /// Of what only Culvert has.
    pub(super) fn of_culvert(name: &'static str, unit: &'static str, value: f64) -> Self {
        let none = None;
        let culvert = finite(value);
        Self {
            name,
            unit,
            direct: none,
            iptables: none,
            culvert,
            ratio: none,
            ratio_min: none,
            ratio_max: none,
            ratio_to_direct: none,
        }
    }

    fn of(plan: &RowPlan, samples: &[Vec<f64>; COLUMNS]) -> Self {
        let ratios = ratios(&samples[CULVERT], &samples[IPTABLES]);
        let middle = |samples: &[f64]| finite(median(samples));
        Self {
            name: plan.name,
            unit: plan.unit,
            direct: middle(&samples[DIRECT]),
            iptables: middle(&samples[IPTABLES]),
            culvert: middle(&samples[CULVERT]),
            ratio: middle(&ratios),
            ratio_min: ratios.iter().copied().reduce(f64::min).and_then(finite),
            ratio_max: ratios.iter().copied().reduce(f64::max).and_then(finite),
            ratio_to_direct: middle(&self::ratios(&samples[CULVERT], &samples[DIRECT])),
        }
    }
}

fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect()
}

fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: RowPlan = RowPlan { name: "rps", unit: "requests/s", metric: "per_second", scale: 1.0 };

    #[test]
    fn ratios_are_taken_within_a_turn() {
        let row = Row::of(&PLAN, &[vec![], vec![10.0, 20.0, 40.0], vec![20.0, 20.0, 60.0]]);
        assert_eq!((row.iptables, row.culvert), (Some(20.0), Some(20.0)));
        assert_eq!((row.ratio, row.ratio_min, row.ratio_max), (Some(1.5), Some(1.0), Some(2.0)));
        assert_eq!((row.direct, row.ratio_to_direct), (None, None));
    }

    #[test]
    fn nothing_divided_by_nothing_is_no_ratio() {
        let row = Row::of(&PLAN, &[vec![], vec![0.0], vec![0.0]]);
        assert_eq!((row.culvert, row.ratio), (Some(0.0), None));
    }
}
