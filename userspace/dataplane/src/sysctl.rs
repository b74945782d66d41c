//! The settings of a pod's netns that enrollment switches on.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{fd::OwnedFd, unix::fs::FileExt as _},
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{self, OFlag},
    sys::stat::Mode,
};

use crate::reserved_ports;

/// - `tcp_fwmark_accept` (both families): an accepted socket takes the mark of its SYN, so that the
///   workload's replies to ztunnel stay on `lo`.
/// - `fwmark_reflect`: so does a RST that no socket sends, or ztunnel would wait 10 s for a closed port.
///
/// The bit of each in `PodEntry::saved_sysctls` is its position. Those of [`reserved_ports`] follow.
const SETTINGS: [(Directory, &str); 3] =
    [(IPV4, "tcp_fwmark_accept"), (IPV4, "fwmark_reflect"), (IPV6, "fwmark_reflect")];

/// Below `/proc`.
type Directory = &'static str;
const IPV4: Directory = "sys/net/ipv4";
const IPV6: Directory = "sys/net/ipv6";

/// All of them on.
pub(crate) const ALL_ON: u32 = (1 << (SETTINGS.len() + reserved_ports::PORTS.len())) - 1;

/// The settings of one netns. Each file is opened once, and below its directory: the kernel looks for
/// `sys/net/ipv4` among those of every netns (fs/proc/proc_sysctl.c, `proc_sys_compare`), so that a path
/// costs more with each pod, 0.5 ms with 500.
pub(crate) struct Sysctls {
    /// With what it says. A kernel without IPv6 lacks one.
    flags: [Option<(File, bool)>; SETTINGS.len()],
    reserved: Option<(File, String)>,
}

impl Sysctls {
    /// Opens those of the calling thread's netns and reads them.
    pub(crate) fn open(proc: &Path) -> io::Result<Self> {
        let (ipv4, ipv6) = (open_directory(&proc.join(IPV4))?, open_directory(&proc.join(IPV6))?);
        let mut flags = [const { None }; SETTINGS.len()];
        for ((directory, setting), flag) in SETTINGS.iter().zip(&mut flags) {
            let directory = if *directory == IPV4 { &ipv4 } else { &ipv6 };
            *flag = open(directory.as_ref(), setting)?.map(|(file, value)| (file, value.trim() != "0"));
        }
        Ok(Self { flags, reserved: open(ipv4.as_ref(), reserved_ports::SETTING)? })
    }

    /// What they were, one bit each.
    pub(crate) fn bits(&self) -> u32 {
        let flags = self.flags.iter().enumerate();
        let flags = flags.map(|(position, flag)| u32::from(matches!(flag, Some((_, true)))) << position);
        let reserved = self.reserved.as_ref().map_or(0, |(_, setting)| reserved_ports::bits(setting));
        flags.sum::<u32>() | reserved << SETTINGS.len()
    }

    /// Writes those that are to have another value, one bit each.
    pub(crate) fn write(&self, bits: u32) -> io::Result<()> {
        let changed = self.bits() ^ bits;
        for (position, flag) in self.flags.iter().enumerate() {
            if let (Some((file, _)), 1) = (flag, changed >> position & 1) {
                file.write_all_at(if bits >> position & 1 == 1 { b"1" } else { b"0" }, 0)?;
            }
        }
        if let (Some((file, before)), true) = (&self.reserved, changed >> SETTINGS.len() != 0) {
            let setting = reserved_ports::with_bits(before, bits >> SETTINGS.len());
            file.write_all_at(setting.as_bytes(), 0)?;
        }
        Ok(())
    }
}

/// A kernel without IPv6 has neither directory nor files of it.
fn open_directory(path: &Path) -> io::Result<Option<OwnedFd>> {
    absent_is_none(fcntl::open(path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()))
}

fn open(directory: Option<&OwnedFd>, name: &str) -> io::Result<Option<(File, String)>> {
    let Some(directory) = directory else { return Ok(None) };
    let opened = fcntl::openat(directory, name, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty());
    let Some(file) = absent_is_none(opened)? else { return Ok(None) };
    let (mut file, mut value) = (File::from(file), String::new());
    file.read_to_string(&mut value)?;
    Ok(Some((file, value)))
}

fn absent_is_none(opened: nix::Result<OwnedFd>) -> io::Result<Option<OwnedFd>> {
    match opened {
        Err(Errno::ENOENT) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}
