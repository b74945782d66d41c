//! One agent on a node: whoever holds the lock file.
//!
//! The kernel releases the lock with the process, whatever ended it. A new agent that finds it taken asks the
//! holder for it (`POST /hand-over` on `admin.sock`). The old one then stops accepting, finishes the ADDs
//! under way, releases ZDS and the lock, and stands by: should the new one end, it takes the node back.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Empty;
use hyper::{Request, StatusCode, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use tokio::{
    net::UnixStream,
    time::{Instant, sleep, timeout},
};

/// A holder finishes its ADDs before it hands over.
const HAND_OVER: Duration = Duration::from_secs(40);
const ASKING: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_millis(10);
const LATER: Duration = Duration::from_millis(500);
const STANDBY: Duration = Duration::from_secs(2);

/// Why this process does not own the node.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another agent runs.
    #[error("another agent holds {path}")]
    Taken {
        /// The lock file.
        path: PathBuf,
    },
    /// The file cannot be used.
    #[error("cannot lock {path}")]
    Io {
        /// The lock file.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
}

/// Ownership of the node, until dropped.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

impl Lock {
    /// Takes the lock, asking its holder for it.
    pub async fn acquire(run_directory: &Path) -> Result<Self, Error> {
        let deadline = Instant::now() + HAND_OVER;
        let mut is_asked = false;
        loop {
            let taken = match Self::take(run_directory) {
                Err(error @ Error::Taken { .. }) if Instant::now() < deadline => error,
                result => return result,
            };
            if !is_asked {
                tracing::info!("{taken}; asking it to hand over");
                match timeout(ASKING, ask(&run_directory.join("admin.sock"))).await {
                    Ok(Ok(())) => is_asked = true,
                    // It may be starting, or ending.
                    Ok(Err(error)) => tracing::info!(error, "it cannot be asked yet"),
                    Err(tokio::time::error::Elapsed { .. }) => tracing::info!("it does not answer"),
                }
            }
            sleep(if is_asked { SOON } else { LATER }).await;
        }
    }

    /// Takes the lock when the agent that it was handed to is no more.
    pub async fn take_back(run_directory: &Path) -> Result<Self, Error> {
        loop {
            // First of all the other one has to get it.
            sleep(STANDBY).await;
            match Self::take(run_directory) {
                Err(Error::Taken { .. }) => {}
                result => return result,
            }
        }
    }

    /// Takes the lock of a run directory, or says who is in the way.
    pub fn take(run_directory: &Path) -> Result<Self, Error> {
        let path = run_directory.join("lock");
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(|source| Error::Io { path: path.clone(), source })?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => Ok(Self { _file: file }),
            Err((_, Errno::EWOULDBLOCK)) => Err(Error::Taken { path }),
            Err((_, errno)) => Err(Error::Io { path, source: errno.into() }),
        }
    }
}

async fn ask(admin: &Path) -> Result<(), String> {
    let stream = UnixStream::connect(admin).await.map_err(|error| error.to_string())?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    let request = Request::post("/hand-over").header(HOST, "unix").body(Empty::<Bytes>::new());
    let request = request.map_err(|error| error.to_string())?;
    let answer = sender.send_request(request);
    let status = tokio::select! {
        answer = answer => answer.map_err(|error| error.to_string())?.status(),
        ended = connection => return Err(format!("the connection ended: {ended:?}")),
    };
    if status == StatusCode::ACCEPTED { Ok(()) } else { Err(format!("it answered {status}")) }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn a_second_agent_is_told_and_the_lock_ends_with_its_holder() {
        let directory = tempfile::tempdir().unwrap();
        let first = Lock::take(directory.path()).unwrap();
        let second = Lock::take(directory.path()).unwrap_err();
        assert!(matches!(second, Error::Taken { .. }), "{second}");
        drop(first);
        Lock::take(directory.path()).unwrap();
    }

    #[tokio::test]
    async fn a_holder_that_is_asked_hands_over() {
        use axum::{Router, http::StatusCode, routing::post};
        use nix::unistd::Uid;

        let directory = tempfile::tempdir().unwrap();
        let held = Arc::new(Mutex::new(Some(Lock::take(directory.path()).unwrap())));
        let admin = directory.path().join("admin.sock");
        let (listener, _file) =
            crate::unix_socket::OwnListener::listen(&admin, Uid::effective().as_raw()).unwrap();
        let router = Router::new().route(
            "/hand-over",
            post(async move || {
                drop(held.lock().unwrap().take());
                StatusCode::ACCEPTED
            }),
        );
        let serving = tokio::spawn(async move { axum::serve(listener, router).await });
        let new = timeout(HAND_OVER, Lock::acquire(directory.path())).await.unwrap().unwrap();
        serving.abort();
        assert!(timeout(STANDBY * 2, Lock::take_back(directory.path())).await.is_err());
        drop(new);
        timeout(STANDBY * 2, Lock::take_back(directory.path())).await.unwrap().unwrap();
    }
}
