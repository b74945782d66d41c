//! Listener 15006: what reaches the pod without a tunnel.

use std::net::SocketAddr;

use super::connection::{Connection, is_self_call};

pub(super) async fn serve(connection: Connection) {
    let destination = connection.destination;
    deliver(connection, destination).await;
}

/// Connects to the workload with the client's address and copies.
pub(super) async fn deliver(connection: Connection, destination: SocketAddr) {
    if is_self_call(destination.port()) {
        return connection.refuse("self call");
    }
    match connection.connect_as_client(destination).await {
        Ok(upstream) => connection.splice(upstream).await,
        Err(error) => connection.refuse(error),
    }
}
