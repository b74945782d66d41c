//! The rows as a table, with the goals where there are any.

use super::report::Row;

/// What is to be reached: `≥` for the ratio or `≤` for it, with the real ztunnel; or `≤` in the row's unit.
enum Goal {
    AtLeast(f64),
    AtMost(f64),
    Value(f64),
}

const GOALS: [(&str, Goal); 17] = [
    ("rps_16", Goal::AtLeast(1.35)),
    ("cpu_per_request", Goal::AtMost(0.75)),
    ("connections_per_s", Goal::AtLeast(1.25)),
    ("p50_pinned", Goal::AtMost(0.80)),
    ("p50_unpinned", Goal::AtMost(1.0)),
    ("stream_throughput", Goal::AtLeast(1.15)),
    ("program_pod_p99_ms", Goal::Value(1.0)),
    ("add_p50_ms", Goal::Value(4.0)),
    ("add_p99_ms", Goal::Value(10.0)),
    ("add_330_p99_ms", Goal::Value(1000.0)),
    ("add_330_lost", Goal::Value(0.0)),
    ("add_non_mesh_p50_ms", Goal::Value(2.0)),
    ("plugin_mib", Goal::Value(3.0)),
    ("plugin_rss_mib", Goal::Value(5.0)),
    ("agent_rss_500_mib", Goal::Value(40.0)),
    ("restart_500_ms", Goal::Value(1000.0)),
    ("fds_after_1000_cycles", Goal::Value(0.0)),
];

/// Prints all rows. Goals for ratios are for the real ztunnel only.
#[expect(clippy::print_stdout, reason = "the table is what the program is for")]
pub(super) fn print(rows: &[Row], is_real: bool) {
    println!();
    println!(
        "{:<34} {:<13} {:>10} {:>10} {:>10} {:>7} {:>15} {:>9}  goal",
        "row", "unit", "direct", "iptables", "culvert", "ratio", "(min..max)", "to direct"
    );
    for row in rows {
        let spread = match (row.ratio_min, row.ratio_max) {
            (Some(min), Some(max)) => format!("({min:.2}..{max:.2})"),
            _ => String::new(),
        };
        println!(
            "{:<34} {:<13} {:>10} {:>10} {:>10} {:>7} {spread:>15} {:>9}  {}",
            row.name,
            row.unit,
            number(row.direct),
            number(row.iptables),
            number(row.culvert),
            ratio(row.ratio),
            ratio(row.ratio_to_direct),
            goal(row, is_real)
        );
    }
}

fn goal(row: &Row, is_real: bool) -> String {
    let found = GOALS.iter().find(|(name, _)| *name == row.name);
    let (text, met) = match found {
        Some((_, Goal::AtLeast(goal))) if is_real => (format!("≥{goal:.2}"), row.ratio.map(|is| is >= *goal)),
        Some((_, Goal::AtMost(goal))) if is_real => (format!("≤{goal:.2}"), row.ratio.map(|is| is <= *goal)),
        Some((_, Goal::Value(goal))) => (format!("≤{goal} {}", row.unit), row.culvert.map(|is| is <= *goal)),
        _ => return String::new(),
    };
    match met {
        Some(true) => format!("{text} met"),
        Some(false) => format!("{text} missed"),
        None => text,
    }
}

fn ratio(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

/// About four digits.
fn number(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value.abs() >= 1000.0 => format!("{value:.0}"),
        Some(value) if value.abs() >= 100.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.2}"),
    }
}
