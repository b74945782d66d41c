//! Listener 15001: what the workload connects to.

use std::net::SocketAddr;

use culvert_abi::ztunnel::HBONE_PORT;

use super::{
    connection::{Connection, is_self_call},
    tunnel,
};

pub(super) async fn serve(connection: Connection) {
    let destination = connection.destination;
    if destination.ip().is_loopback() && is_self_call(destination.port()) {
        return connection.refuse("self call");
    }
    let services = &connection.proxy.options.service;
    let service = services.iter().find(|(address, _)| *address == destination);
    let destination = service.map_or(destination, |(_, endpoint)| *endpoint);
    let upstream = if connection.proxy.options.tunnel.contains(&destination.ip()) {
        match connection.connect(SocketAddr::new(destination.ip(), HBONE_PORT)).await {
            Ok(upstream) => tunnel::request(upstream, destination).await,
            Err(error) => Err(error),
        }
    } else {
        connection.connect(destination).await
    };
    match upstream {
        Ok(upstream) => connection.splice(upstream).await,
        Err(error) => connection.refuse(error),
    }
}
