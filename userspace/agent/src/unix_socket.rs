//! A listening unix socket: put into place in one step, root only, removed only by its maker.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use axum::serve::Listener;
use tokio::net::{UnixListener, UnixStream, unix::SocketAddr};

/// After a failing accept(2), which mostly means that descriptors have run out.
const PAUSE: Duration = Duration::from_millis(100);

/// Where a socket is, and which inode is ours.
#[derive(Clone, Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Binds under a temporary name in the same directory, mode 0600, and renames: whoever connects
    /// meets either what was there before or this socket, listening. Peers must have `peer_uid`.
    pub fn listen(path: &Path, peer_uid: u32) -> io::Result<(OwnListener, Self)> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let bound = tempfile::Builder::new()
            .prefix(".sock")
            .make_in(directory.unwrap_or(Path::new(".")), |temporary| UnixListener::bind(temporary))?;
        fs::set_permissions(bound.path(), Permissions::from_mode(0o600))?;
        let metadata = fs::symlink_metadata(bound.path())?;
        let file = Self { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino() };
        let listener = bound.persist(path).map_err(|failed| failed.error)?;
        Ok((OwnListener { listener, peer_uid }, file))
    }

    /// Whether new connections come to this listener: false once somebody has bound over it.
    pub fn is_ours(&self) -> bool {
        fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (self.device, self.inode))
    }

    /// Removes the file unless it is somebody else's by now.
    pub fn remove(&self) {
        if self.is_ours()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "socket not removed");
        }
    }
}

/// Accepts connections of one user only, by SO_PEERCRED.
#[derive(Debug)]
pub struct OwnListener {
    listener: UnixListener,
    peer_uid: u32,
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
