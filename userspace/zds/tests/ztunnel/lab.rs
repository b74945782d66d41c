//! A server with its owner, in a directory of its own.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use culvert_zds::{Acked, Backoff, Config, Error, Server, Ztunnels};
use tempfile::TempDir;
use tokio::{sync::mpsc, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{Introduce, Node, PATIENCE, Seen, patiently};

/// A running server.
pub struct Lab {
    pub path: PathBuf,
    pub ztunnels: Ztunnels,
    pub node: Arc<Node>,
    pub shutdown: CancellationToken,
    pub server: JoinHandle<()>,
    seen: mpsc::UnboundedReceiver<Seen>,
    pub directory: TempDir,
}

impl Lab {
    pub fn new() -> Self {
        Self::with(|_config| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Self {
        Self::build(Introduce::No, change)
    }

    /// Its owner introduces every connection.
    pub fn introducing(change: impl FnOnce(&mut Config)) -> Self {
        Self::build(Introduce::Yes, change)
    }

    pub fn build(introduce: Introduce, change: impl FnOnce(&mut Config)) -> Self {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("ztunnel.sock");
        let mut config = Config {
            peer_uid: None,
            accept_interval: Duration::ZERO,
            retry: Backoff { initial: Duration::from_millis(5), max: Duration::from_millis(20) },
            hello_timeout: PATIENCE,
            introduction_timeout: PATIENCE,
            ack_timeout: PATIENCE,
            ..Config::new(&path)
        };
        change(&mut config);
        let (tell, seen) = mpsc::unbounded_channel();
        let node = Arc::new(Node { entries: Mutex::default(), introduce, seen: tell });
        let server = Server::bind(config).unwrap();
        let (ztunnels, shutdown) = (server.ztunnels(), CancellationToken::new());
        let server = tokio::spawn(server.run(Arc::clone(&node), shutdown.clone()));
        Self { path, ztunnels, node, shutdown, server, seen, directory }
    }

    /// Waits for something the owner is told, passing over the rest.
    pub async fn seen<T>(&mut self, select: impl Fn(&Seen) -> Option<T>) -> T {
        loop {
            let seen = patiently(self.seen.recv()).await.unwrap();
            if let Some(found) = select(&seen) {
                return found;
            }
        }
    }

    pub async fn saw(&mut self, expected: Seen) {
        self.seen(|seen| (*seen == expected).then_some(())).await;
    }

    pub fn add(&self, uid: &str) -> JoinHandle<Result<Acked, Error>> {
        self.add_within(uid, PATIENCE)
    }

    /// Puts the workload on the node and adds it.
    pub fn add_within(&self, uid: &str, limit: Duration) -> JoinHandle<Result<Acked, Error>> {
        let (ztunnels, workload) = (self.ztunnels.clone(), self.node.put(uid));
        tokio::spawn(async move { ztunnels.add(&workload, Instant::now() + limit).await })
    }

    /// Takes the workload from the node, if it is there, and deletes it.
    pub fn del(&self, uid: &str) -> JoinHandle<Result<(), Error>> {
        self.node.entries.lock().unwrap().remove(&uid.into());
        let (ztunnels, uid) = (self.ztunnels.clone(), uid.into());
        tokio::spawn(async move { ztunnels.del(&uid).await })
    }

    pub async fn connected(&self, count: usize) {
        patiently(self.ztunnels.connected().wait_for(|connected| connected.len() == count)).await.unwrap();
    }
}
