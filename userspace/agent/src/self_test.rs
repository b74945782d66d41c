//! Proof that a pod is captured: a connection of its netns arrives at ztunnel's port.
//!
//! The probe connects from inside the netns to an address that nobody has. If capture works, the SYN is
//! marked, looped through `lo` and steered to 15001, which one counter of the pod's says, and a listener
//! answers it. The probe then resets the connection instead of completing the handshake (its ACK waits,
//! as that of any socket without `TCP_QUICKACK`, up to 200 ms for data): ztunnel accepts nothing, opens no
//! connection of its own and logs nothing, and nothing leaves the pod. Only a probe that is *not* captured
//! puts a SYN on the wire, to an address reserved for documentation or discarding (RFC 5737, RFC 6666).
//!
//! Before an ADD has ended no process runs in the pod, so the counter can only have moved by the probe.
//! In a running pod the workload may move it, which proves the same.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use culvert_abi::Counter;
use culvert_dataplane::{Dataplane, Netns};
use socket2::{Domain, Socket, Type};

/// TEST-NET-1.
const NOBODY_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
/// The discard-only prefix.
const NOBODY_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1));
/// Discard; the probe never gets there.
const PORT: u16 = 9;
/// How long the first of several SYNs is given.
const FIRST: Duration = Duration::from_millis(100);

/// Why a pod does not count as captured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection took another way.
    #[error("a connection to {destination} was not answered at ztunnel's port; it was counted as: {counted}")]
    NotCaptured {
        /// Where to.
        destination: SocketAddr,
        /// The counters that moved.
        counted: String,
    },
    /// Capture is on and there is nobody to take the connection.
    #[error("a connection to {destination} was refused: ztunnel does not listen in the pod")]
    Refused {
        /// Where to.
        destination: SocketAddr,
    },
    /// The looped connection has no way back into the pod.
    #[error("a connection to {destination} was marked and then had no route: table 100 is not as we left it")]
    NoLoop {
        /// Where to.
        destination: SocketAddr,
    },
    /// The probe itself failed.
    #[error("the probe to {destination} could not be sent")]
    Probe {
        /// Where to.
        destination: SocketAddr,
        /// The system's word.
        source: io::Error,
    },
    /// The dataplane's word.
    #[error(transparent)]
    Dataplane(#[from] culvert_dataplane::Error),
}

impl Error {
    /// Whether it shows that the pod is not captured, whatever ztunnel does.
    pub const fn is_no_capture(&self) -> bool {
        matches!(self, Self::NotCaptured { .. } | Self::NoLoop { .. })
    }
}

/// Probes each family that the pod has an address of, each for at most `patience`: the answer comes at
/// once unless the kernel has no time. A family without a route has nothing to capture.
pub fn run(
    dataplane: &Dataplane,
    netns: &Netns,
    addresses: &[IpAddr],
    patience: Duration,
) -> Result<(), Error> {
    let has = |is_family: fn(&IpAddr) -> bool| addresses.iter().any(is_family);
    let families = [(has(IpAddr::is_ipv4), NOBODY_V4), (has(IpAddr::is_ipv6), NOBODY_V6)];
    for (_, nobody) in families.into_iter().filter(|(present, _)| *present) {
        insist(dataplane, netns, SocketAddr::new(nobody, PORT), patience)?;
    }
    Ok(())
}

/// A SYN may get lost, and the kernel repeats it only after a second.
fn insist(
    dataplane: &Dataplane,
    netns: &Netns,
    destination: SocketAddr,
    patience: Duration,
) -> Result<(), Error> {
    let (start, mut wait) = (Instant::now(), FIRST);
    loop {
        let probed = probe(dataplane, netns, destination, wait);
        let left = patience.saturating_sub(start.elapsed());
        match probed {
            Err(Error::NotCaptured { .. }) if !left.is_zero() => wait = (wait * 2).min(left),
            probed => return probed,
        }
    }
}

fn probe(
    dataplane: &Dataplane,
    netns: &Netns,
    destination: SocketAddr,
    patience: Duration,
) -> Result<(), Error> {
    let cookie = netns.cookie();
    let before = dataplane.counters(cookie)?;
    let connected = netns.run(|| connect(destination, patience))?;
    let after = dataplane.counters(cookie)?;
    let moved = |counter| after.get(counter) > before.get(counter);
    match connected {
        Ok(()) if moved(Counter::LookupCaptured) => Ok(()),
        Err(error)
            if is_refused(&error)
                && (moved(Counter::RefusedOutbound) || moved(Counter::LookupRefusedOutbound)) =>
        {
            Err(Error::Refused { destination })
        }
        Err(error) if is_no_route(&error) && moved(Counter::CapturedOutbound) => {
            Err(Error::NoLoop { destination })
        }
        Err(error) if is_no_route(&error) && !netns.run(|| has_route(destination))? => Ok(()),
        Err(source)
            if !is_refused(&source) && !is_no_route(&source) && source.kind() != io::ErrorKind::TimedOut =>
        {
            Err(Error::Probe { destination, source })
        }
        Ok(()) | Err(_) => {
            let names: Vec<_> =
                Counter::ALL.into_iter().filter(|counter| moved(*counter)).map(Counter::name).collect();
            let counted = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
            Err(Error::NotCaptured { destination, counted })
        }
    }
}

/// Connects and resets.
fn connect(destination: SocketAddr, patience: Duration) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(destination), Type::STREAM, None)?;
    socket.set_tcp_quickack(false)?;
    socket.set_linger(Some(Duration::ZERO))?;
    socket.connect_timeout(&destination.into(), patience)
}

/// A router's word is none about the pod: this asks the pod's own tables, and sends nothing.
fn has_route(destination: SocketAddr) -> bool {
    let connect = || {
        let socket = Socket::new(Domain::for_address(destination), Type::DGRAM, None)?;
        socket.connect(&destination.into())
    };
    !connect().is_err_and(|error| is_no_route(&error))
}

fn is_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

/// The family has no address that may be used, or no way out of the pod.
fn is_no_route(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable | io::ErrorKind::AddrNotAvailable
    )
}
