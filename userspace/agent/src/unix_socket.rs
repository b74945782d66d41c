//! A listening unix socket of ours, for one user only.

use std::{io, path::Path, time::Duration};

use axum::serve::Listener;
use culvert_zds::SocketFile;
use tokio::net::{UnixListener, UnixStream, unix::SocketAddr};

/// After a failing accept(2), which mostly means that descriptors have run out.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections of one user only, by SO_PEERCRED.
#[derive(Debug)]
pub struct OwnListener {
    listener: UnixListener,
    peer_uid: u32,
}

impl OwnListener {
    /// Listens at `path` in place of whatever was there, mode 0600. Peers must have `peer_uid`.
    pub fn listen(path: &Path, peer_uid: u32) -> io::Result<(Self, SocketFile)> {
        let (listener, file) = SocketFile::listen(path, |path| UnixListener::bind(path))?;
        Ok((Self { listener, peer_uid }, file))
    }
}

impl Listener for OwnListener {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => match stream.peer_cred() {
                    Ok(peer) if peer.uid() == self.peer_uid => return (stream, address),
                    Ok(peer) => {
                        tracing::warn!(
                            uid = peer.uid(),
                            pid = peer.pid(),
                            "connection of another user refused"
                        );
                    }
                    Err(error) => tracing::warn!(%error, "connection of an unknown user refused"),
                },
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
