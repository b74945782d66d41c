//! Sockets in a pod's netns, made as ztunnel makes them: in, `socket(2)`, out (`inpod/netns.rs`).

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    process,
    sync::Arc,
};

use nix::sched::{CloneFlags, setns};
use nix::sys::stat::fstat;
use socket2::{Domain, Protocol, Socket, Type};

/// The netns this process lives in.
#[derive(Debug)]
pub(super) struct Home(Arc<File>);

impl Home {
    pub(super) fn current() -> io::Result<Self> {
        Ok(Self(Arc::new(File::open("/proc/thread-self/ns/net")?)))
    }

    /// The way into a pod's netns and back.
    pub(super) fn pod(&self, netns: OwnedFd) -> io::Result<PodNetns> {
        let stat = fstat(&netns)?;
        Ok(PodNetns { pod: netns, home: Arc::clone(&self.0), id: (stat.st_dev, stat.st_ino) })
    }
}

/// A pod's netns.
#[derive(Debug)]
pub(super) struct PodNetns {
    pod: OwnedFd,
    home: Arc<File>,
    id: (u64, u64),
}

impl PodNetns {
    /// Whether both are the same netns; ztunnel compares like this too.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// A non-blocking socket in the pod. The calling thread is back home when this returns.
    pub(super) fn socket(&self, domain: Domain, kind: Type, protocol: Protocol) -> io::Result<Socket> {
        enter(&self.pod)?;
        let socket = Socket::new(domain, kind.nonblocking(), Some(protocol));
        if let Err(error) = enter(&self.home) {
            tracing::error!(%error, "thread is lost in a pod's netns");
            process::abort();
        }
        socket
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "ztunnel does it on its worker threads; nothing awaits between in and out"
)]
fn enter(netns: impl AsFd) -> io::Result<()> {
    setns(netns, CloneFlags::CLONE_NEWNET)?;
    Ok(())
}
