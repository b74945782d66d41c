//! New connections with one request each.
//!
//! The server closes first, so that no client's port and no port of ztunnel's stays in TIME_WAIT.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::{
    cpu::Cpu,
    load::{MESSAGE, Parties, Server, Window, clients},
    measure::{CPU, FAILED, Metrics, PER_SECOND, metrics},
};

/// Clients at work at the same time.
pub(super) const AT_ONCE: usize = 8;
const LIMIT: Duration = Duration::from_secs(3);

pub(super) fn measure(parties: &Parties<'_>, cpu: &Cpu, seconds: f64) -> anyhow::Result<Metrics> {
    let server = Server::start(parties, answer_once);
    let (address, window) = (server.address, Window::of(seconds));
    let (outcomes, (used, _others)) =
        clients(parties, AT_ONCE, || connect_again_and_again(address, window), || window.cpu_time(cpu));
    let done = outcomes.iter().map(|outcome| outcome.done).sum::<usize>() as f64;
    let failed: usize = outcomes.iter().map(|outcome| outcome.failed).sum();
    if let Some(error) = outcomes.into_iter().find_map(|outcome| outcome.error) {
        tracing::warn!(failed, %error, "connections failed; this is the first error");
    }
    anyhow::ensure!(done > 0.0, "no connection succeeded");
    Ok(metrics([
        (PER_SECOND, done / window.seconds()),
        (CPU, used.as_secs_f64() * 1e6 / done),
        (FAILED, failed as f64),
    ]))
}

#[derive(Default)]
struct Outcome {
    done: usize,
    failed: usize,
    error: Option<io::Error>,
}

async fn connect_again_and_again(server: SocketAddr, window: Window) -> Outcome {
    let mut outcome = Outcome::default();
    while !window.is_over() {
        let asked = timeout(LIMIT, ask_once(server)).await;
        match asked.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into())) {
            Ok(()) if window.contains(Instant::now()) => outcome.done += 1,
            Ok(()) => {}
            Err(error) => {
                outcome.failed += 1;
                outcome.error.get_or_insert(error);
            }
        }
    }
    outcome
}

async fn ask_once(server: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&[b'?'; MESSAGE]).await?;
    let mut response = [0; MESSAGE];
    stream.read_exact(&mut response).await?;
    match stream.read(&mut response).await? {
        0 => Ok(()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

async fn answer_once(mut stream: TcpStream) -> io::Result<()> {
    let mut message = [0; MESSAGE];
    stream.read_exact(&mut message).await?;
    stream.write_all(&message).await
}
