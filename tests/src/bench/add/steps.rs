//! Where the time of an ADD goes, by the plugin's own words in the agent's log.

use std::collections::BTreeMap;

use super::{Row, median, node::Node, row};
use crate::pod::Pod;

/// The line of the plugin that names all steps.
pub(super) const LINE: &str = "the agent's answer: enrolled; ";

/// As the plugin names them, in their order.
const STEPS: [(&str, &str); 11] = [
    ("prepare", "step_prepare_ms"),
    ("connect", "step_connect_ms"),
    ("membership", "step_membership_ms"),
    ("turn", "step_turn_ms"),
    ("netns", "step_netns_ms"),
    ("register", "step_register_ms"),
    ("ztunnel", "step_ztunnel_ms"),
    ("attach", "step_attach_ms"),
    ("self-test", "step_self_test_ms"),
    ("record", "step_record_ms"),
    ("reply", "step_reply_ms"),
];

/// Medians of each step. `exec` is what they leave of a whole ADD, `whole_ms`, which tells nothing of its
/// steps: start of the process before its first line, and its end.
pub(super) fn measure(
    node: &Node<'_>,
    pods: &[Pod],
    count: usize,
    whole_ms: f64,
) -> anyhow::Result<Vec<Row>> {
    let mut samples: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for pod in pods.iter().cycle().take(count) {
        let line = node.add_telling_steps(pod)?;
        node.del(pod)?;
        for (step, name) in STEPS {
            samples.entry(name).or_default().extend(time(&line, step));
        }
    }
    let steps: Vec<_> = STEPS.iter().map(|(_, name)| (*name, median(&samples[name]))).collect();
    let exec = whole_ms - steps.iter().map(|(_, time)| time).sum::<f64>();
    let rows = [("step_exec_ms", exec)].into_iter().chain(steps);
    Ok(rows.map(|(name, time)| row(name, "ms", time)).collect())
}

/// The milliseconds of a step in a line like `prepare 0.20 ms, connect 0.05 ms`.
fn time(line: &str, step: &str) -> Option<f64> {
    let (_, steps) = line.split_once(LINE)?;
    let named = steps.split(", ").find_map(|named| named.strip_prefix(step)?.strip_prefix(' '));
    named?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_found_by_its_name() {
        let line = "DEBUG culvert_cni: the agent's answer: enrolled; prepare 0.21 ms, self-test 0.30 ms, total 3.10 ms uid=u";
        assert_eq!(time(line, "prepare"), Some(0.21));
        assert_eq!(time(line, "self-test"), Some(0.3));
        assert_eq!(time(line, "self"), None);
        assert_eq!(time(line, "reply"), None);
    }
}
