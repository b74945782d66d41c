//! Policy routing of a netns, as iproute2 shows it.

use crate::{eventually::eventually, host::Host};

/// The rules and the routes of table 100, of both families.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routing(Vec<String>);

impl Host {
    /// What is there now.
    pub fn routing(&self) -> Routing {
        let mut lines = Vec::new();
        for family in ["-4", "-6"] {
            for what in [&["rule", "show"][..], &["route", "show", "table", "100"]] {
                let output = self.command("ip").arg(family).args(what).output().expect("iproute2");
                let mut found: Vec<_> = String::from_utf8_lossy(&output.stdout)
                    .lines()
                    .map(|line| format!("{family} {what:?} {line}"))
                    .collect();
                // Rules of one preference and routes come in the order of their making.
                found.sort();
                lines.extend(found);
            }
        }
        Routing(lines)
    }

    /// Waits until it is as it was.
    pub fn wait_for_routing(&self, before: &Routing) {
        let mut now = None;
        let is_back = || {
            now = Some(self.routing());
            (now.as_ref() == Some(before)).then_some(())
        };
        eventually(&format!("the routing of {} to be as before: {before:#?}", self.name()), is_back);
    }
}
