//! What can go wrong, by what the caller can do about it.

use std::{io, net::IpAddr, path::PathBuf};

/// An error of the dataplane. Every message says what failed, where, and what to do if that is known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The crate was built without the BPF objects.
    #[error("this binary was built without its BPF objects; run `cargo xtask build-ebpf` and build it again")]
    ObjectMissing,
    /// The objects do not hold what this crate expects of them.
    #[error(
        "BPF object {object} is not what this binary expects: {reason}; run `cargo xtask build-ebpf` and build again"
    )]
    Object {
        /// Which of the two.
        object: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The kernel refused the objects. `probe` tells which feature is missing.
    #[error("cannot load {object} into the kernel")]
    Load {
        /// Which of the two.
        object: &'static str,
        /// The kernel's answer, with the verifier's log.
        #[source]
        source: Box<aya::EbpfError>,
    },
    /// The kernel refused a program.
    #[error("cannot {action} program {program}")]
    Program {
        /// What was tried.
        action: &'static str,
        /// The program's name.
        program: String,
        /// The kernel's answer, with the verifier's log.
        #[source]
        source: Box<aya::programs::ProgramError>,
    },
    /// A BPF map could not be read or written. A full map (E2BIG) means too many pods or addresses.
    #[error("cannot {action} BPF map {map}")]
    Map {
        /// What was tried.
        action: &'static str,
        /// The map's name.
        map: &'static str,
        /// The kernel's answer.
        #[source]
        source: Box<aya::maps::MapError>,
    },
    /// A pinned map of another layout lies where ours belongs.
    #[error(
        "pinned map {path} is not ours: {difference}; it was left by another program or version. \
         Nothing was changed. Drain the node's mesh pods, remove {directory} and start again"
    )]
    PinMismatch {
        /// The pin.
        path: PathBuf,
        /// What differs.
        difference: String,
        /// The directory that holds it.
        directory: PathBuf,
    },
    /// A path below /sys, /proc or the bpffs could not be used.
    #[error("cannot {action} {path}")]
    Path {
        /// What was tried.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("{call} failed")]
    System {
        /// Its name.
        call: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The host's own netns was named as a pod's.
    #[error(
        "refusing to redirect the host's network namespace (cookie {cookie}): the path given for the pod names it"
    )]
    HostNetns {
        /// Its cookie.
        cookie: u64,
    },
    /// A route, rule or setting could not be put into the pod's netns.
    #[error("cannot {action} in netns {cookie}")]
    Routing {
        /// What was tried.
        action: String,
        /// The netns's cookie.
        cookie: u64,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The netns has not been registered, or has been withdrawn.
    #[error("netns {cookie} is not registered")]
    NotRegistered {
        /// Its cookie.
        cookie: u64,
    },
    /// ztunnel does not listen where it must.
    #[error(
        "ztunnel has no listener on port {port} in netns {cookie}; it must open it before the pod is captured"
    )]
    NoListener {
        /// The port.
        port: u16,
        /// The netns's cookie.
        cookie: u64,
    },
    /// Somebody else listens on a port of ztunnel.
    #[error(
        "a process that is not ztunnel listens on {address} port {port} in netns {cookie}; \
         the port is reserved for ztunnel in mesh pods: stop that process or change its port"
    )]
    ForeignListener {
        /// Its address.
        address: IpAddr,
        /// The port.
        port: u16,
        /// The netns's cookie.
        cookie: u64,
    },
    /// ztunnel's listener cannot answer for foreign addresses.
    #[error(
        "ztunnel's listener on port {port} in netns {cookie} is not IP_TRANSPARENT, captured connections would \
         time out; give ztunnel NET_ADMIN and do not set ENABLE_ORIG_SRC=false"
    )]
    NotTransparent {
        /// The port.
        port: u16,
        /// The netns's cookie.
        cookie: u64,
    },
}

impl Error {
    pub(crate) fn path(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Path { action, path, source }
    }

    pub(crate) fn system(call: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { call, source }
    }

    pub(crate) fn map(action: &'static str, map: &'static str) -> impl FnOnce(aya::maps::MapError) -> Self {
        move |source| Self::Map { action, map, source: Box::new(source) }
    }
}
