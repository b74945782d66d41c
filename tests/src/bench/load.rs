//! What every measurement of traffic has: a server in one netns, clients in another, and a window of
//! time in which counts.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinSet,
};

use super::{
    cpu::{self, Cpu},
    placement::Placement,
};
use crate::host::Host;

/// Bytes of a request, and of its response.
pub(super) const MESSAGE: usize = 1024;

/// Before the window: connections are made, caches and ztunnel's pool fill.
const WARM_UP: Duration = Duration::from_millis(400);

/// Who takes part.
pub(super) struct Parties<'a> {
    pub(super) client: &'a Host,
    pub(super) server: &'a Host,
    pub(super) placement: Placement,
}

/// The time that counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) from: Instant,
    pub(super) until: Instant,
}

impl Window {
    pub(super) fn of(seconds: f64) -> Self {
        let from = Instant::now() + WARM_UP;
        Self { from, until: from + Duration::from_secs_f64(seconds) }
    }

    pub(super) fn contains(self, at: Instant) -> bool {
        self.from <= at && at < self.until
    }

    pub(super) fn is_over(self) -> bool {
        Instant::now() >= self.until
    }

    pub(super) fn seconds(self) -> f64 {
        (self.until - self.from).as_secs_f64()
    }

    /// Waits for the window and through it; `sample` is read at both ends, and the difference returned.
    pub(super) fn observe<T>(self, sample: impl Fn() -> T) -> (T, T) {
        thread::sleep(self.from.saturating_duration_since(Instant::now()));
        let before = sample();
        thread::sleep(self.until.saturating_duration_since(Instant::now()));
        (before, sample())
    }

    /// CPU time used in the window by the lab, and the share of the machine that others used.
    pub(super) fn cpu_time(self, cpu: &Cpu) -> (Duration, f64) {
        let (before, after) = self.observe(|| (cpu.time(), cpu::busy()));
        let (ours, all) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
        let cpus = thread::available_parallelism().map_or(1, usize::from) as f64;
        (ours, all.saturating_sub(ours).as_secs_f64() / self.seconds() / cpus)
    }
}

/// A port that no earlier measurement used, below the ephemeral ones.
pub(super) fn next_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A server on one thread, which ends when this is dropped.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    _stop: oneshot::Sender<()>,
}

impl Server {
    /// `serve` handles each accepted connection.
    pub(super) fn start<F>(parties: &Parties<'_>, serve: impl Fn(TcpStream) -> F + Send + 'static) -> Self
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let (host, placement, port) = (parties.server.clone(), parties.placement, next_port());
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = std::sync::mpsc::channel();
        thread::spawn(move || {
            host.run(|| {
                placement.enter().expect("a CPU for the server");
                runtime().block_on(async {
                    let listener = TcpListener::bind((IpAddr::from(Ipv6Addr::UNSPECIFIED), port)).await;
                    let listener = listener.expect("the server's port");
                    ready.send(()).expect("somebody waits");
                    tokio::select! {
                        () = accept(&listener, serve) => {}
                        _ = stopped => {}
                    }
                });
            });
        });
        is_ready.recv().expect("the server starts");
        Self { address: (parties.server.v4(), port).into(), _stop: stop }
    }
}

async fn accept<F>(listener: &TcpListener, serve: impl Fn(TcpStream) -> F)
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        if let Ok((stream, _peer)) = listener.accept().await
            && stream.set_nodelay(true).is_ok()
        {
            connections.spawn(serve(stream));
        }
        while connections.try_join_next().is_some() {}
    }
}

/// Runs `count` clients on one thread in the client's netns while `meanwhile` runs here.
pub(super) fn clients<T, F, M>(
    parties: &Parties<'_>,
    count: usize,
    client: impl Fn() -> F + Sync,
    meanwhile: impl FnOnce() -> M,
) -> (Vec<T>, M)
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    thread::scope(|scope| {
        let outcomes = scope.spawn(|| {
            parties.client.run(|| {
                parties.placement.enter().expect("a CPU for the client");
                runtime().block_on(async {
                    let mut clients = JoinSet::new();
                    (0..count).for_each(|_| drop(clients.spawn(client())));
                    clients.join_all().await
                })
            })
        });
        let meanwhile = meanwhile();
        (outcomes.join().expect("the clients' thread"), meanwhile)
    })
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime")
}
