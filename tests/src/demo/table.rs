//! The table: a title for each leg, a row for each family.

use std::io::{self, Write};

use super::judge::{Observed, Sender, Syn};
use crate::address::Family;

/// Of a line.
pub(super) const WIDTH: usize = 110;
/// Columns before the verdict: family, connection, listeners, server saw, client was told, on the wire.
const WIDTHS: [usize; 6] = [4, 21, 12, 11, 19, 23];
const HEADS: [&str; 6] = ["", "connection", "ztunnel port", "server saw", "client was told", "on the wire"];

/// What a cell has to say.
pub(super) fn row(connection: &str, family: Family, observed: &Observed) -> [String; 6] {
    let ports: Vec<_> = observed.listeners().iter().map(u16::to_string).collect();
    let clients: Vec<_> = observed.accepted.iter().map(|one| one.peer.ip().to_string()).collect();
    [
        format!("IP{}", if family == Family::V4 { "v4" } else { "v6" }),
        connection.to_owned(),
        or_dash(&ports),
        or_dash(&clients),
        format!("{} {:.1} ms", observed.told, observed.took.as_secs_f64() * 1e3),
        match observed.syns.is_empty() {
            true => "nothing".to_owned(),
            false => observed.syns.iter().map(wire).collect::<Vec<_>>().join(", "),
        },
    ]
}

/// The address is another column's.
fn wire(syn: &Syn) -> String {
    let sender = if syn.sender == Sender::Client { "client" } else { "ztunnel" };
    format!("{sender}'s SYN to :{}", syn.to.port())
}

/// Writes the table.
pub(super) struct Table<'a> {
    out: &'a mut dyn Write,
    colours: bool,
}

impl<'a> Table<'a> {
    /// Writes the head. Colours are for terminals.
    pub(super) fn start(out: &'a mut dyn Write, colours: bool) -> io::Result<Self> {
        writeln!(out, "{}", line(HEADS, ""))?;
        writeln!(out, "{}", "-".repeat(WIDTH))?;
        Ok(Self { out, colours })
    }

    /// Writes what the next rows are about.
    pub(super) fn title(&mut self, title: &str) -> io::Result<()> {
        writeln!(self.out, "{title}")
    }

    /// Writes a row, and below it what is wrong.
    pub(super) fn row(&mut self, cells: &[String; 6], wrong: &[String]) -> io::Result<()> {
        let verdict = match (wrong.is_empty(), self.colours) {
            (true, false) => "ok",
            (true, true) => "\x1b[32mok\x1b[0m",
            (false, false) => "FAILED",
            (false, true) => "\x1b[31mFAILED\x1b[0m",
        };
        writeln!(self.out, "{}", line(cells.each_ref().map(String::as_str), verdict))?;
        for clause in wrong {
            writeln!(self.out, "        {clause}")?;
        }
        Ok(())
    }
}

fn line(cells: [&str; 6], verdict: &str) -> String {
    let padded = cells.into_iter().zip(WIDTHS).map(|(cell, width)| format!("{cell:<width$}  "));
    format!("  {}{verdict}", padded.collect::<String>()).trim_end().to_owned()
}

fn or_dash(parts: &[String]) -> String {
    if parts.is_empty() { "-".to_owned() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use super::*;
    use crate::{
        demo::{judge::Told, leg},
        server::Accepted,
    };

    #[test]
    fn a_line_fits() {
        let legs = [&leg::SERVING[..], &leg::WITHOUT_ZTUNNEL, &leg::RESTARTED].concat();
        for leg in legs {
            assert!(leg.title.len() <= WIDTH, "{}", leg.title);
            let peer = "[fd00:244::2]:15008".parse().unwrap();
            let observed = Observed {
                told: Told::AddressInUse,
                took: Duration::from_micros(499_900),
                reported: None,
                counted: leg.listeners.to_vec(),
                destinations: vec![],
                accepted: vec![Accepted { peer, local: peer }],
                syns: BTreeSet::from([Syn { sender: Sender::Ztunnel, to: peer }]),
                in_clear: false,
            };
            let mut out = Vec::new();
            let mut table = Table::start(&mut out, false).unwrap();
            table.row(&row(&leg.action.describe(), Family::V6, &observed), &[]).unwrap();
            table.row(&row(&leg.action.describe(), Family::V4, &observed), &["wrong".to_owned()]).unwrap();
            let text = String::from_utf8(out).unwrap();
            assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
            assert!(text.contains(" ok\n") && text.contains(" FAILED\n        wrong\n"), "{text}");
            assert!(!text.contains('\x1b'), "colours are for terminals");
        }
    }
}
