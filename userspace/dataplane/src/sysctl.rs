//! The settings of a pod's netns that enrollment switches on.

use std::{fs, io, path::Path};

use crate::reserved_ports;

/// - `tcp_fwmark_accept` (both families): an accepted socket takes the mark of its SYN, so that the
///   workload's replies to ztunnel stay on `lo`.
/// - `fwmark_reflect`: so does a RST that no socket sends, or ztunnel would wait 10 s for a closed port.
///
/// The bit of each in `PodEntry::saved_sysctls` is its position. Those of [`reserved_ports`] follow.
const SETTINGS: [&str; 3] =
    ["sys/net/ipv4/tcp_fwmark_accept", "sys/net/ipv4/fwmark_reflect", "sys/net/ipv6/fwmark_reflect"];

/// The present values, one bit each, of the calling thread's netns.
pub(crate) fn read(proc: &Path) -> io::Result<u32> {
    let mut bits = 0;
    for (position, setting) in SETTINGS.iter().enumerate() {
        let Some(value) = absent_is_none(fs::read_to_string(proc.join(setting)))? else {
            continue;
        };
        bits |= u32::from(value.trim() != "0") << position;
    }
    let reserved = absent_is_none(fs::read_to_string(proc.join(reserved_ports::SETTING)))?;
    Ok(bits | reserved_ports::bits(&reserved.unwrap_or_default()) << SETTINGS.len())
}

/// Writes them, one bit each, in the calling thread's netns. Those that have the value already are left.
pub(crate) fn write(proc: &Path, bits: u32) -> io::Result<()> {
    let present = read(proc)?;
    for (position, setting) in SETTINGS.iter().enumerate() {
        if (present ^ bits) >> position & 1 == 1 {
            let value = if bits >> position & 1 == 1 { "1" } else { "0" };
            absent_is_none(fs::write(proc.join(setting), value))?;
        }
    }
    if (present ^ bits) >> SETTINGS.len() != 0 {
        let setting = proc.join(reserved_ports::SETTING);
        if let Some(before) = absent_is_none(fs::read_to_string(&setting))? {
            fs::write(&setting, reserved_ports::with_bits(&before, bits >> SETTINGS.len()))?;
        }
    }
    Ok(())
}

/// All of them on.
pub(crate) const ALL_ON: u32 = (1 << (SETTINGS.len() + reserved_ports::PORTS.len())) - 1;

/// A kernel without IPv6 has no such file.
fn absent_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}
