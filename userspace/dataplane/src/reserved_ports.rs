//! `ip_local_reserved_ports`: what the kernel chooses no port from.
//!
//! The bind hooks see the ports that a workload names. One that it is given (`bind()` to port 0,
//! `connect()` or `listen()` without a `bind()`) no hook sees, and with a wide `ip_local_port_range` it
//! can be one of ztunnel's while no ztunnel listens; ztunnel could not listen there when it comes back.

use std::fmt::Write as _;

use culvert_abi::ztunnel::{DNS_PORT, HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT};

/// ztunnel's, in the order of their bits.
pub(crate) const PORTS: [u16; 4] = [OUTBOUND_PORT, INBOUND_PORT, HBONE_PORT, DNS_PORT];

/// In the directory of IPv4, for both families.
pub(crate) const SETTING: &str = "ip_local_reserved_ports";

/// Which of [`PORTS`] the setting holds, one bit each.
pub(crate) fn bits(setting: &str) -> u32 {
    let ranges = ranges(setting);
    let holds = |port: &u16| ranges.iter().any(|(first, last)| (first..=last).contains(&port));
    PORTS.iter().enumerate().map(|(position, port)| u32::from(holds(port)) << position).sum()
}

/// The setting with exactly those of [`PORTS`] whose bits are set; others are left as they are.
pub(crate) fn with_bits(setting: &str, bits: u32) -> String {
    let mut kept = ranges(setting);
    for (position, port) in PORTS.into_iter().enumerate() {
        kept = kept.into_iter().flat_map(|range| without(range, port)).collect();
        if bits >> position & 1 == 1 {
            kept.push((port, port));
        }
    }
    let mut text = String::new();
    for (first, last) in kept {
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a String does not fail. The kernel joins and sorts.
        write!(text, "{comma}{first}-{last}").unwrap_or_default();
    }
    text.push('\n');
    text
}

fn ranges(setting: &str) -> Vec<(u16, u16)> {
    let range = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    setting.trim().split(',').filter_map(range).collect()
}

fn without((first, last): (u16, u16), port: u16) -> Vec<(u16, u16)> {
    if !(first..=last).contains(&port) {
        return vec![(first, last)];
    }
    let below = (first < port).then(|| (first, port - 1));
    let above = (port < last).then(|| (port + 1, last));
    below.into_iter().chain(above).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ztunnels_ports_are_found_alone_and_in_ranges() {
        assert_eq!(bits("\n"), 0);
        assert_eq!(bits("8080,15001\n"), 0b0001);
        assert_eq!(bits("15000-15007,15053\n"), 0b1011);
        assert_eq!(bits("1-65535\n"), 0b1111);
    }

    #[test]
    fn they_are_added_and_removed_and_others_stay() {
        assert_eq!(with_bits("\n", 0b1111), "15001-15001,15006-15006,15008-15008,15053-15053\n");
        assert_eq!(with_bits("8080,9000-9010\n", 0b0001), "8080-8080,9000-9010,15001-15001\n");
        assert_eq!(with_bits("8080,15001,15006\n", 0b0010), "8080-8080,15006-15006\n");
        assert_eq!(with_bits("15000-15007\n", 0), "15000-15000,15002-15005,15007-15007\n");
        assert_eq!(with_bits("15001\n", 0), "\n");
        for before in ["\n", "15006\n", "15001-15010\n", "8080\n"] {
            assert_eq!(bits(&with_bits(&with_bits(before, 0b1111), bits(before))), bits(before));
        }
    }
}
