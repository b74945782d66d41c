//! What the kernel can do: the programs are loaded, attached and made to work once.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6, TcpListener},
    os::fd::AsRawFd as _,
};

use culvert_abi::ztunnel::{LOOP_MARK, OUTBOUND_PORT};
use nix::sys::{
    socket::{
        AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, SockaddrIn6, bind, getsockopt, listen,
        setsockopt, socket, sockopt,
    },
    time::{TimeVal, TimeValLike as _},
};

use super::{Check, environment::with_cause};
use crate::{Config, Dataplane, Error, Netns, Options};

const PATIENCE_SECONDS: i64 = 2;

/// Loads a second instance under pins of its own, so nothing that serves is touched.
pub(super) fn checks(config: &Config) -> Vec<Check> {
    let directory = config.bpffs.join(format!("culvert-probe-{}", std::process::id()));
    let scratch = Config { bpffs: directory.clone(), ..config.clone() };
    let started = Dataplane::start(&scratch).map_err(|error| with_cause(&error));
    let mut checks = vec![Check::new(
        "programs load and attach",
        started.as_ref().map(|_| ()).map_err(Clone::clone),
        "Linux 6.1 or later with CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF and CONFIG_BPF_EVENTS; the verifier's log says what is missing",
    )];
    if let Ok(dataplane) = started {
        checks.push(Check::new(
            "a connection in a scratch netns is captured",
            capture(&dataplane).map_err(|error| with_cause(&error)),
            "the hooks were loaded but did not run: is --host-cgroup the root above every process of the node, and \
             is no other sk_lookup or cgroup program in the way? `bpftool cgroup tree` lists them",
        ));
    }
    let removed = match std::fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", directory.display()))
        }
        _ => Ok(()),
    };
    checks.push(Check::new("pins can be removed", removed, "remove the named directory by hand"));
    checks
}

/// This process plays ztunnel: it introduces itself, its listener is stored and shared, and a packet
/// with our mark to an address that exists nowhere is steered to it.
fn capture(dataplane: &Dataplane) -> Result<(), Error> {
    let netns = Netns::create()?;
    let result = captured_connection(dataplane, &netns);
    dataplane.forget(netns.cookie())?;
    result
}

fn captured_connection(dataplane: &Dataplane, netns: &Netns) -> Result<(), Error> {
    let introduction = dataplane.introduce()?;
    let _known = introduction.netns().run(listener)?.map_err(Error::system("listen in the introduction"))?;
    dataplane.register(netns, &[], Options::default())?;
    let ztunnel = netns.run(listener)?.map_err(Error::system("listen on ztunnel's port"))?;
    dataplane.check_listener(netns, OUTBOUND_PORT)?;
    let shared = getsockopt(&ztunnel, sockopt::ReuseAddr)
        .map_err(|errno| Error::System { call: "getsockopt(SO_REUSEADDR)", source: errno.into() })?;
    if !shared {
        let source = io::Error::other("SO_REUSEADDR did not arrive on the listener");
        return Err(Error::System { call: "bpf_setsockopt(SO_REUSEADDR)", source });
    }
    dataplane.activate(netns)?;
    netns.run(|| connect(&ztunnel))?.map_err(Error::system("connect through sk_lookup"))
}

/// A socket as ztunnel opens it (`src/inpod/config.rs`).
fn listener() -> io::Result<TcpListener> {
    let fd = socket(AddressFamily::Inet6, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReusePort, &true)?;
    let any = SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, OUTBOUND_PORT, 0, 0);
    bind(fd.as_raw_fd(), &SockaddrIn6::from(any))?;
    listen(&fd, Backlog::new(16)?)?;
    setsockopt(&fd, sockopt::IpTransparent, &true)?;
    Ok(fd.into())
}

/// Our own sockets are taken for ztunnel's, which are not marked: the mark is set by hand.
fn connect(ztunnel: &TcpListener) -> io::Result<()> {
    let destination = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 80);
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::Mark, &LOOP_MARK)?;
    // An empty netns has no other address to send from.
    bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)))?;
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::seconds(PATIENCE_SECONDS))?;
    nix::sys::socket::connect(fd.as_raw_fd(), &SockaddrIn::from(destination))?;
    ztunnel.set_nonblocking(true)?;
    let (accepted, _) = ztunnel.accept()?;
    let local = accepted.local_addr()?;
    if local.ip().to_canonical() == IpAddr::V4(*destination.ip()) && local.port() == destination.port() {
        return Ok(());
    }
    Err(io::Error::other(format!("the accepted connection's destination is {local}, not {destination}")))
}
