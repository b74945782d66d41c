//! One sandbox of a pod: the unit of capture.

use std::{
    collections::BTreeSet,
    fmt, io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use culvert_dataplane::Options;
use culvert_zds::{Workload, WorkloadInfo, WorkloadUid};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::{attachment::Attachment, redirect::Redirect};
use crate::record::{Phase, Record};

/// Identity of a netns that processes can compare: device and inode of the namespace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsId {
    /// Device.
    pub dev: u64,
    /// Inode.
    pub ino: u64,
}

impl NetnsId {
    /// Of an open namespace.
    pub fn of(netns: impl AsFd) -> io::Result<Self> {
        let stat = nix::sys::stat::fstat(netns)?;
        Ok(Self { dev: stat.st_dev, ino: stat.st_ino })
    }
}

impl fmt::Display for NetnsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.dev, self.ino)
    }
}

/// A pod of the mesh, by its identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// Uid of the API.
    pub uid: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Service account.
    pub service_account: String,
}

impl Pod {
    /// The uid as ztunnel is told.
    pub fn workload_uid(&self) -> WorkloadUid {
        self.uid.as_str().into()
    }
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A sandbox of a pod, with its netns open.
#[derive(Debug)]
pub struct Sandbox<N> {
    /// Whose it is.
    pub pod: Pod,
    /// The netns. Shared: attachments of one sandbox have one.
    pub netns: Arc<N>,
    /// A descriptor of the netns for ztunnel.
    pub descriptor: Arc<OwnedFd>,
    /// The kernel's identity of the netns.
    pub cookie: u64,
    /// Its identity for other processes.
    pub id: NetnsId,
    /// Where the runtime has it, as this process sees it.
    pub path: PathBuf,
    /// All addresses that an ADD reported.
    pub addresses: BTreeSet<IpAddr>,
    /// What the pod asks for.
    pub bypass_inbound: bool,
    /// Who asked for its enrollment.
    pub attachments: BTreeSet<Attachment>,
    /// When its last ADD began, since the boot (`CLOCK_BOOTTIME`): of two sandboxes of a pod the newer one is
    /// current. Their cookies do not tell, each CPU counts its own (`gen_cookie_next`).
    pub since: Duration,
}

impl<N> Clone for Sandbox<N> {
    fn clone(&self) -> Self {
        Self {
            pod: self.pod.clone(),
            netns: Arc::clone(&self.netns),
            descriptor: Arc::clone(&self.descriptor),
            cookie: self.cookie,
            id: self.id,
            path: self.path.clone(),
            addresses: self.addresses.clone(),
            bypass_inbound: self.bypass_inbound,
            attachments: self.attachments.clone(),
            since: self.since,
        }
    }
}

impl<N: AsFd + Send + Sync + 'static> Sandbox<N> {
    /// A sandbox whose netns has been opened.
    pub fn new<R: Redirect<Netns = N>>(pod: Pod, path: PathBuf, netns: N) -> io::Result<Self> {
        Ok(Self {
            pod,
            path,
            cookie: R::cookie(&netns),
            id: NetnsId::of(&netns)?,
            descriptor: Arc::new(netns.as_fd().try_clone_to_owned()?),
            netns: Arc::new(netns),
            addresses: BTreeSet::new(),
            bypass_inbound: false,
            attachments: BTreeSet::new(),
            since: clock_gettime(ClockId::CLOCK_BOOTTIME)?.into(),
        })
    }
}

impl<N> Sandbox<N> {
    /// As ztunnel is told of it.
    pub fn workload(&self) -> Workload {
        let Pod { uid: _, namespace, name, service_account } = self.pod.clone();
        Workload {
            uid: self.pod.workload_uid(),
            info: WorkloadInfo { name, namespace, service_account },
            netns: Arc::clone(&self.descriptor),
        }
    }

    /// As the dataplane wants them.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.addresses.iter().copied().collect()
    }

    /// What the pod asks of the dataplane.
    pub fn options(&self) -> Options {
        Options { bypass_inbound: self.bypass_inbound }
    }

    /// As a later agent is told of it.
    pub fn record(&self, phase: Phase) -> Record {
        Record {
            phase,
            pod: self.pod.clone(),
            netns: self.path.clone(),
            netns_id: self.id,
            cookie: self.cookie,
            addresses: self.addresses.clone(),
            bypass_inbound: self.bypass_inbound,
            attachments: self.attachments.clone(),
            since: self.since,
        }
    }
}
