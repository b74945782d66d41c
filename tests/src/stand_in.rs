//! The stand-in for ztunnel: the same sockets, opened in the same order with the same options, the
//! same treatment of connections, without TLS, policy and xDS.
//!
//! ```text
//! zds ──add──► workload ──7 sockets──► ack, then one accept loop per listener
//!                         15001 outbound ── connect from the pod, or a tunnel
//!                         15006 inbound  ── connect to the pod from the client's address
//!                         15008 tunnel   ── CONNECT in clear, then as inbound
//! ```
//!
//! Its sources are ztunnel's (62d82653) and the measurements in the project's `ztunnel.md`.

mod connection;
mod copy;
mod fault;
mod inbound;
mod netns;
mod outbound;
mod report;
mod sockets;
mod tunnel;
mod workload;
mod zds;

use std::{
    net::{AddrParseError, IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::event::Event;
use report::Report;

/// How long connections go on after SIGTERM (ztunnel: `CONNECTION_TERMINATION_DEADLINE`).
const DRAIN: Duration = Duration::from_secs(5);

/// The command line.
#[derive(Debug, clap::Parser)]
#[command(about = "Opens ztunnel's sockets in the pods it is handed and proxies without TLS")]
pub struct Options {
    /// ZDS socket to connect to
    #[arg(long, env = "INPOD_UDS")]
    pub socket: PathBuf,
    /// Reach this address through a tunnel to its port 15008; may be repeated
    #[arg(long)]
    pub tunnel: Vec<IpAddr>,
    /// A service's address and the endpoint it leads to; may be repeated
    #[arg(long, value_name = "ADDRESS=ENDPOINT", value_parser = service)]
    pub service: Vec<(SocketAddr, SocketAddr)>,
    /// Do not tell about connections
    #[arg(long)]
    pub quiet: bool,
    /// Threads that serve connections
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// How to misbehave.
    #[command(flatten)]
    pub faults: fault::Faults,
}

fn service(argument: &str) -> Result<(SocketAddr, SocketAddr), AddrParseError> {
    let (address, endpoint) = argument.split_once('=').unwrap_or((argument, ""));
    Ok((address.parse()?, endpoint.parse()?))
}

/// What every part shares.
#[derive(Debug)]
pub(crate) struct Proxy {
    options: Options,
    home: netns::Home,
    report: Report,
    /// Listeners close.
    shutdown: CancellationToken,
    /// Connections under way.
    connections: TaskTracker,
}

/// Serves until SIGTERM, or until the faults ask for an early end.
pub fn run(options: Options) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(options.threads).enable_all().build()?;
    let proxy = Arc::new(Proxy {
        home: netns::Home::current().context("own netns")?,
        report: Report::start(options.quiet),
        shutdown: CancellationToken::new(),
        connections: TaskTracker::new(),
        options,
    });
    let outcome = runtime.block_on(serve(&proxy));
    runtime.shutdown_background();
    proxy.report.finish();
    outcome
}

async fn serve(proxy: &Arc<Proxy>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut flush = signal(SignalKind::user_defined1())?;
    let mut client = tokio::spawn(zds::run(Arc::clone(proxy)));
    loop {
        tokio::select! {
            _ = flush.recv() => proxy.report.tell(Event::Flushed),
            outcome = &mut client => return outcome?,
            _ = terminate.recv() => break,
        }
    }
    proxy.shutdown.cancel();
    proxy.report.tell(Event::Draining);
    proxy.connections.close();
    tokio::time::timeout(DRAIN, proxy.connections.wait()).await.ok();
    Ok(())
}
