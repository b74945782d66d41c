//! Requests on connections that stay open: each client sends the next when it has its answer.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout_at,
};

use super::{
    cpu::Cpu,
    load::{MESSAGE, Parties, Server, Window, clients},
    measure::{CPU, Metrics, OTHERS, P50, P99, PER_SECOND, metrics, percentile},
};

/// How long an answer may take after the window is over.
const GRACE: Duration = Duration::from_secs(5);

pub(super) fn measure(
    parties: &Parties<'_>,
    cpu: &Cpu,
    connections: usize,
    seconds: f64,
) -> anyhow::Result<Metrics> {
    let server = Server::start(parties, echo);
    let (address, window) = (server.address, Window::of(seconds));
    let client = || async move {
        let limit = (window.until + GRACE).into();
        timeout_at(limit, ask(address, window))
            .await
            .unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
    };
    let (samples, (used, others)) = clients(parties, connections, client, || window.cpu_time(cpu));
    let mut samples = samples.into_iter().collect::<io::Result<Vec<_>>>()?.concat();
    samples.sort_by(f64::total_cmp);
    let count = samples.len() as f64;
    anyhow::ensure!(count > 0.0, "no request was answered");
    Ok(metrics([
        (PER_SECOND, count / window.seconds()),
        (P50, percentile(&samples, 0.5)),
        (P99, percentile(&samples, 0.99)),
        (CPU, used.as_secs_f64() * 1e6 / count),
        (OTHERS, others),
    ]))
}

/// Latencies in microseconds of what was answered inside the window.
async fn ask(server: SocketAddr, window: Window) -> io::Result<Vec<f64>> {
    let mut stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let (request, mut response) = ([b'?'; MESSAGE], [0; MESSAGE]);
    let mut samples = Vec::with_capacity(1 << 16);
    loop {
        let asked = Instant::now();
        stream.write_all(&request).await?;
        stream.read_exact(&mut response).await?;
        let answered = Instant::now();
        if window.contains(answered) {
            samples.push((answered - asked).as_secs_f64() * 1e6);
        } else if window.is_over() {
            return Ok(samples);
        }
    }
}

async fn echo(mut stream: TcpStream) -> io::Result<()> {
    let mut message = [0; MESSAGE];
    loop {
        stream.read_exact(&mut message).await?;
        stream.write_all(&message).await?;
    }
}
