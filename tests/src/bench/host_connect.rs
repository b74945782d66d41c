//! What connect(2) costs a process of the node, which Culvert's programs look at and let pass.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};

use super::{
    load::{Window, next_port},
    measure::{Metrics, PER_SECOND, metrics},
};
use crate::host::Host;

pub(super) fn measure(node: &Host, seconds: f64) -> anyhow::Result<Metrics> {
    let port = next_port();
    let listener = node.run(|| TcpListener::bind(("0.0.0.0", port)))?;
    let address = SocketAddr::from((node.v4(), port));
    let over = AtomicBool::new(false);
    let window = Window::of(seconds);
    let count = thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // The client may be gone already.
                listener.accept().map(drop).ok();
            }
        });
        let count = node.run(|| connects(address, window));
        over.store(true, Ordering::Relaxed);
        node.run(|| connect(address)).and(count)
    })?;
    Ok(metrics([(PER_SECOND, count as f64 / window.seconds())]))
}

fn connects(address: SocketAddr, window: Window) -> io::Result<usize> {
    let mut count = 0;
    loop {
        connect(address)?;
        if window.contains(std::time::Instant::now()) {
            count += 1;
        } else if window.is_over() {
            return Ok(count);
        }
    }
}

/// Closed by a RST, so that the port is free at once.
fn connect(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_linger(Some(Duration::ZERO))?;
    socket.connect(&address.into())
}
