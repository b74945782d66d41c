//! Listener 15008: HTTP/1.1 CONNECT in clear, where ztunnel has HTTP/2 in mTLS.

use std::{io, net::SocketAddr};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{
    connection::{Connection, is_self_call},
    inbound,
};

/// Longest request or response head.
const HEAD: usize = 256;
const ACCEPTED: &str = "HTTP/1.1 200 OK\r\n\r\n";

/// Client: asks for `destination` on a connection to a peer's 15008.
pub(super) async fn request(mut upstream: TcpStream, destination: SocketAddr) -> io::Result<TcpStream> {
    let request = format!("CONNECT {destination} HTTP/1.1\r\nHost: {destination}\r\n\r\n");
    upstream.write_all(request.as_bytes()).await?;
    match head(&mut upstream).await? {
        head if head == ACCEPTED => Ok(upstream),
        head => Err(io::Error::other(format!("tunnel refused: {head:?}"))),
    }
}

/// Server: reads the request, then as inbound.
pub(super) async fn serve(mut connection: Connection) {
    let head = match head(&mut connection.stream).await {
        Ok(head) => head,
        Err(error) => return connection.refuse(error),
    };
    let destination = head.split(' ').nth(1).and_then(|authority| authority.parse::<SocketAddr>().ok());
    let Some(destination) = destination.filter(|_| head.starts_with("CONNECT ")) else {
        connection.stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.ok();
        return connection.refuse("no CONNECT to an address");
    };
    if is_self_call(destination.port()) {
        connection.stream.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").await.ok();
        return connection.refuse("self call");
    }
    match connection.stream.write_all(ACCEPTED.as_bytes()).await {
        Ok(()) => inbound::deliver(connection, destination).await,
        Err(error) => connection.refuse(error),
    }
}

/// Up to the empty line and not a byte further: what follows belongs to the tunnel.
async fn head(stream: &mut TcpStream) -> io::Result<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if head.len() == HEAD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        head.push(char::from(stream.read_u8().await?));
    }
    Ok(head)
}
