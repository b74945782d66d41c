//! A listening unix socket as a file: put into place in one step, removed only by its maker.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use tracing::warn;

/// Where a socket is, and which inode is ours.
#[derive(Clone, Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Binds under a temporary name in the same directory, mode 0600, and renames: whoever connects
    /// meets either the old socket or the new one, listening. What was at `path` is replaced. `bind` makes
    /// a listener of any kind at the path that it is given.
    pub fn listen<L>(path: &Path, bind: impl Fn(&Path) -> io::Result<L>) -> io::Result<(L, Self)> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        // Short, the whole name has to fit into sun_path (108 bytes).
        let bound = tempfile::Builder::new()
            .prefix(".sock")
            .make_in(directory.unwrap_or(Path::new(".")), |temporary| bind(temporary))?;
        fs::set_permissions(bound.path(), Permissions::from_mode(0o600))?;
        let metadata = fs::symlink_metadata(bound.path())?;
        let file = Self { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino() };
        Ok((bound.persist(path).map_err(|failed| failed.error)?, file))
    }

    /// Where it is, or was.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether new connections to [`path`](Self::path) come to this listener: false once somebody has
    /// bound over it, or has removed it.
    pub fn is_ours(&self) -> bool {
        fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (self.device, self.inode))
    }

    /// Removes the file unless it is somebody else's by now. Unlink has no compare-and-remove: another
    /// process that renames its own into place within these two system calls loses it.
    pub fn remove(&self) {
        if self.is_ours()
            && let Err(error) = fs::remove_file(&self.path)
        {
            warn!(path = %self.path.display(), %error, "socket not removed");
        }
    }
}
