//! One stream from client to server, as fast as it goes.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use anyhow::Context as _;

use super::{
    cpu::Cpu,
    load::{Parties, Window, next_port},
    measure::{CPU, Metrics, PER_SECOND, metrics},
};

/// Bytes of one write(2), and room for one read(2).
const CHUNK: usize = 256 << 10;
/// `PER_SECOND` and `CPU` count gigabytes.
const GIGABYTE: f64 = 1e9;

pub(super) fn measure(parties: &Parties<'_>, cpu: &Cpu, seconds: f64) -> anyhow::Result<Metrics> {
    let port = next_port();
    let listener = parties.server.run(|| TcpListener::bind(("::", port)))?;
    let received = AtomicU64::new(0);
    thread::scope(|scope| {
        let server = scope.spawn(|| -> std::io::Result<()> {
            parties.placement.enter()?;
            let (mut stream, mut chunk) = (listener.accept()?.0, vec![0; CHUNK]);
            loop {
                match stream.read(&mut chunk)? {
                    0 => return Ok(()),
                    length => received.fetch_add(length as u64, Ordering::Relaxed),
                };
            }
        });
        let mut stream = parties.client.run(|| TcpStream::connect((parties.server.v4(), port)))?;
        let window = Window::of(seconds);
        let client = scope.spawn(move || -> std::io::Result<()> {
            parties.placement.enter()?;
            let chunk = vec![b'.'; CHUNK];
            while !window.is_over() {
                stream.write_all(&chunk)?;
            }
            stream.shutdown(Shutdown::Write)
        });
        let sample = || (received.load(Ordering::Relaxed), cpu.time());
        let ((bytes_before, cpu_before), (bytes, cpu_after)) = window.observe(sample);
        let gigabytes = (bytes - bytes_before) as f64 / GIGABYTE;
        client.join().expect("the client's thread").context("client")?;
        server.join().expect("the server's thread").context("server")?;
        anyhow::ensure!(gigabytes > 0.0, "nothing arrived");
        Ok(metrics([
            (PER_SECOND, gigabytes / window.seconds()),
            (CPU, (cpu_after - cpu_before).as_secs_f64() * 1e6 / gigabytes),
        ]))
    })
}
