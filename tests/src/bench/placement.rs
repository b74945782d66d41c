//! Which thread runs where.

use std::{fs, io, thread};

use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

/// Where the threads of a measurement run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Placement {
    /// Where the scheduler puts them.
    Free,
    /// Client and server on the first CPU, ztunnel on the second.
    Pinned,
}

const WORKLOAD: usize = 0;
const ZTUNNEL: usize = 1;

impl Placement {
    /// Places the calling thread, which is a client or a server.
    pub(super) fn enter(self) -> io::Result<()> {
        match self {
            Self::Free => Ok(()),
            Self::Pinned => Ok(sched_setaffinity(Pid::from_raw(0), &cpus([WORKLOAD])?)?),
        }
    }

    /// Places every thread of ztunnel.
    pub(super) fn place(self, ztunnel: Pid) -> io::Result<()> {
        let set = match self {
            Self::Free => cpus(0..thread::available_parallelism()?.get())?,
            Self::Pinned => cpus([ZTUNNEL])?,
        };
        for task in fs::read_dir(format!("/proc/{ztunnel}/task"))? {
            if let Some(task) = task?.file_name().to_str().and_then(|name| name.parse().ok()) {
                sched_setaffinity(Pid::from_raw(task), &set)?;
            }
        }
        Ok(())
    }
}

fn cpus(numbers: impl IntoIterator<Item = usize>) -> io::Result<CpuSet> {
    let mut set = CpuSet::new();
    for number in numbers {
        set.set(number)?;
    }
    Ok(set)
}
