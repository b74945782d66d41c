//! How a ztunnel becomes known.
//!
//! Process ids that BPF sees belong to the initial pid namespace, those of SO_PEERCRED to the agent's:
//! instead of translating, each ztunnel is given a workload of the agent's own, an empty netns. Whoever
//! binds ztunnel's ports there is that ztunnel, and stays known until it ends (tracepoint
//! `sched_process_exit`), whether it listens or not: one that drains has closed its listeners and still opens
//! connections for those it accepted.

use std::sync::Arc;

use culvert_abi::{PodEntry, pod::INTRODUCTION};

use crate::{Dataplane, Error, Netns, maps::Maps};

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
/// known.
impl Drop for Introduction {
    fn drop(&mut self) {
        if let Err(error) = self.maps.remove_pod(self.netns.cookie()) {
            tracing::warn!(netns = self.netns.cookie(), %error, "cannot end an introduction");
        }
    }
}
