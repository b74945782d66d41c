//! The rows as a table, with the goals where there are any.

use super::report::Row;

/// What is to be reached with the real ztunnel: `≥` for the ratio, `≤` for it, or `≤` in milliseconds.
enum Goal {
    AtLeast(f64),
    AtMost(f64),
    Milliseconds(f64),
}

const GOALS: [(&str, Goal); 7] = [
    ("rps_16", Goal::AtLeast(1.35)),
    ("cpu_per_request", Goal::AtMost(0.75)),
    ("connections_per_s", Goal::AtLeast(1.25)),
    ("p50_pinned", Goal::AtMost(0.80)),
    ("p50_unpinned", Goal::AtMost(1.0)),
    ("stream_throughput", Goal::AtLeast(1.15)),
    ("program_pod_p99_ms", Goal::Milliseconds(1.0)),
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
        Some((_, Goal::Milliseconds(goal))) => (format!("≤{goal} ms"), row.culvert.map(|is| is <= *goal)),
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
