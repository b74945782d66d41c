//! How a ztunnel becomes known.
//!
//! Process ids that BPF sees belong to the initial pid namespace, those of SO_PEERCRED to the agent's:
//! instead of translating, each ztunnel is given a workload of the agent's own, an empty netns. Whoever
//! binds ztunnel's ports there is that ztunnel, and stays known as long as it listens there: the kernel
//! removes a listener of a process that ended. Until the sweep has seen that, a process that is given its id
//! would be taken for it.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use culvert_abi::{PodEntry, listener::DUAL_STACK, pod::INTRODUCTION, ztunnel::OUTBOUND_PORT};
use nix::time::{ClockId, clock_gettime};

use crate::{Dataplane, Error, Netns, maps::Maps};

/// How long a ztunnel may be without a listener: one that drains has closed them all and still opens
/// connections for those it accepted.
const GRACE: Duration = Duration::from_secs(10);

/// A netns in which one ztunnel introduces itself. It lives as long as the ZDS connection, and proves
/// at any time that this ztunnel accepts connections.
pub struct Introduction {
    netns: Netns,
    maps: Arc<Maps>,
}

impl Dataplane {
    /// Makes the netns. Hand it to ztunnel as a workload before any other.
    ///
    /// # Errors
    /// When no netns can be made, or `PODS` is full.
    pub fn introduce(&self) -> Result<Introduction, Error> {
        let netns = Netns::create()?;
        let entry = PodEntry { state: INTRODUCTION, ..PodEntry::default() };
        self.maps.set_pod(netns.cookie(), entry)?;
        Ok(Introduction { netns, maps: Arc::clone(&self.maps) })
    }
}

impl Introduction {
    /// The netns.
    pub const fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Whether a ztunnel has bound its ports in it.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn is_known(&self) -> Result<bool, Error> {
        Ok(self.maps.ztunnels()?.iter().any(|(_, introduced)| *introduced == self.netns.cookie()))
    }
}

/// The ZDS connection ended, or so does this process: the ztunnel may well go on serving, so it stays
/// known; the sweep removes it once it is gone.
impl Drop for Introduction {
    fn drop(&mut self) {
        if let Err(error) = self.maps.remove_pod(self.netns.cookie()) {
            tracing::warn!(netns = self.netns.cookie(), %error, "cannot end an introduction");
        }
    }
}

/// What time takes away: host flows that nobody closed, ztunnels that ended.
#[derive(Default)]
pub(crate) struct Sweep {
    silent: HashMap<u32, Instant>,
}

impl Sweep {
    pub(crate) fn run(&mut self, maps: &Maps) -> Result<(), Error> {
        maps.sweep_flows(monotonic_ns()?)?;
        let mut silent = HashMap::new();
        for (tgid, introduced) in maps.ztunnels()? {
            if !maps.listeners(introduced, OUTBOUND_PORT, DUAL_STACK)?.is_empty() {
                continue;
            }
            let since = self.silent.get(&tgid).copied().unwrap_or_else(Instant::now);
            if since.elapsed() < GRACE {
                silent.insert(tgid, since);
            } else {
                tracing::info!(tgid, "a ztunnel is gone");
                maps.remove_ztunnel(tgid)?;
                maps.remove_pod(introduced)?;
            }
        }
        self.silent = silent;
        Ok(())
    }
}

fn monotonic_ns() -> Result<u64, Error> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_err(|errno| Error::System { call: "clock_gettime", source: errno.into() })?;
    Ok(now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64)
}
