//! Bytes from one connection to the other, both ways, each direction ended on its own.

use std::io;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
};

/// A buffer starts at `SMALL`, for the many connections that never need more, and grows to `LARGE`.
const SMALL: usize = 8 << 10;
const LARGE: usize = 256 << 10;

/// Until both sides have ended; how many bytes went each way.
pub(super) async fn both_ways(
    downstream: &mut TcpStream,
    upstream: &mut TcpStream,
) -> io::Result<(u64, u64)> {
    let (from_client, to_client) = downstream.split();
    let (from_server, to_server) = upstream.split();
    tokio::try_join!(one_way(from_client, to_server), one_way(from_server, to_client))
}

async fn one_way(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> io::Result<u64> {
    let mut buffer = vec![0; SMALL];
    let mut copied = 0;
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            // The other side may have gone entirely.
            to.shutdown().await.ok();
            return Ok(copied);
        }
        to.write_all(&buffer[..read]).await?;
        copied += read as u64;
        if read == buffer.len() && read < LARGE {
            buffer.resize(read * 2, 0);
        }
    }
}
