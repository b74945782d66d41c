//! A scripted ztunnel, and the owner of the workloads it is told of.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "test code outside #[test] functions")]
#![allow(dead_code, unreachable_pub, reason = "shared by several test binaries")]

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    sync::{Arc, Mutex},
    time::Duration,
};

use culvert_zds::{
    BoxError, Cause, ConnectionId, Entry, Error, Event, Introduction, Owner, Workload, WorkloadInfo,
    WorkloadUid,
    wire::{self, Ack, Request},
};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use tokio_seqpacket::{
    UnixSeqpacket,
    ancillary::{AncillaryMessageWriter, OwnedAncillaryMessage},
};

mod lab;

pub use lab::Lab;

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A deadline that fires soon, for tests in which nothing else ends the wait.
pub const SOON: Duration = Duration::from_millis(250);

async fn patiently<T>(what: impl Future<Output = T>) -> T {
    timeout(PATIENCE, what).await.expect("waited in vain")
}

/// tokio-seqpacket 0.9.1 aligns control buffers for sending, not for receiving.
#[repr(align(8))]
struct Control([u8; 256]);

/// The client.
pub struct Ztunnel {
    pub socket: UnixSeqpacket,
}

impl Ztunnel {
    pub async fn silent(lab: &Lab) -> Self {
        Self { socket: UnixSeqpacket::connect(&lab.path).await.unwrap() }
    }

    pub async fn hello(lab: &Lab) -> Self {
        let ztunnel = Self::silent(lab).await;
        ztunnel.send(&wire::encode_hello()).await;
        ztunnel
    }

    /// Connected, introduced and with an empty snapshot behind it.
    pub async fn ready(lab: &mut Lab) -> (Self, ConnectionId) {
        let ztunnel = Self::hello(lab).await;
        ztunnel.take(Request::SnapshotSent).await;
        let connection = lab.seen(|seen| seen.snapshot_sent()).await;
        (ztunnel, connection)
    }

    pub async fn send(&self, packet: &[u8]) {
        assert_eq!(patiently(self.socket.send(packet)).await.unwrap(), packet.len());
    }

    /// The next packet and its descriptors; `None` when the server has closed.
    pub async fn packet(&self) -> Option<(Request, Vec<OwnedFd>)> {
        let (mut buffer, mut control) = ([0; wire::MAX_REQUEST], Control([0; 256]));
        let received = patiently(self.socket.recv_with_ancillary(&mut buffer, &mut control.0)).await;
        let (info, ancillary) = match received {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return None,
            received => received.unwrap(),
        };
        assert!(!info.truncated() && !info.ancillary_truncated());
        let mut fds = Vec::new();
        for message in ancillary.into_messages() {
            match message {
                OwnedAncillaryMessage::FileDescriptors(received) => fds.extend(received),
                _ => panic!("ancillary data other than descriptors"),
            }
        }
        if info.bytes_read() == 0 {
            return None;
        }
        let request = wire::decode_request(&buffer[..info.bytes_read()]).unwrap();
        assert_eq!(fds.len(), request.descriptors(), "{request:?}");
        Some((request, fds))
    }

    pub async fn request(&self) -> Request {
        self.packet().await.expect("closed by the server").0
    }

    pub async fn expect(&self, request: Request) {
        assert_eq!(self.request().await, request);
    }

    pub async fn ack(&self) {
        self.send(&wire::encode_ack(&Ack::Ok)).await;
    }

    pub async fn nack(&self, message: &str) {
        self.send(&wire::encode_ack(&Ack::Nack(message.to_owned()))).await;
    }

    /// Expects and acks.
    pub async fn take(&self, request: Request) {
        self.expect(request).await;
        self.ack().await;
    }

    /// Expects and nacks.
    pub async fn refuse(&self, request: Request, message: &str) {
        self.expect(request).await;
        self.nack(message).await;
    }

    pub async fn closed(&self) {
        if let Some(packet) = self.packet().await {
            panic!("not closed: {packet:?}");
        }
    }

    /// Acks everything until the server closes; returns how many.
    pub fn serve(self) -> JoinHandle<usize> {
        tokio::spawn(async move {
            for count in 0.. {
                match self.packet().await {
                    Some(_) => self.ack().await,
                    None => return count,
                }
            }
            unreachable!()
        })
    }
}

/// What the owner was told.
#[derive(Debug, PartialEq)]
pub enum Seen {
    Rejected(ConnectionId, String),
    Connected(ConnectionId),
    SnapshotSent(ConnectionId, usize, usize, usize),
    TookOver(ConnectionId, usize, usize),
    Refused(ConnectionId, String, u32, bool),
    Recovered(ConnectionId, String, u32),
    Disconnected(ConnectionId, String),
    Introduced(ConnectionId, Result<(), String>),
    Ended(ConnectionId),
}

impl Seen {
    pub fn connected(&self) -> Option<ConnectionId> {
        match self {
            Self::Connected(connection) => Some(*connection),
            _ => None,
        }
    }

    pub fn snapshot_sent(&self) -> Option<ConnectionId> {
        match self {
            Self::SnapshotSent(connection, ..) => Some(*connection),
            _ => None,
        }
    }

    pub fn rejected(&self) -> Option<String> {
        match self {
            Self::Rejected(_, cause) => Some(cause.clone()),
            _ => None,
        }
    }

    pub fn disconnected(&self) -> Option<String> {
        match self {
            Self::Disconnected(_, cause) => Some(cause.clone()),
            _ => None,
        }
    }

    pub fn ended(&self) -> Option<ConnectionId> {
        match self {
            Self::Ended(connection) => Some(*connection),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Introduce {
    No,
    Yes,
    /// Whatever ztunnel says.
    Stubborn,
}

pub struct Node {
    entries: Mutex<BTreeMap<WorkloadUid, Entry>>,
    introduce: Introduce,
    seen: mpsc::UnboundedSender<Seen>,
}

impl Node {
    pub fn put(&self, uid: &str) -> Workload {
        let workload = workload(uid);
        self.put_entry(uid, Entry::Workload(workload.clone()));
        workload
    }

    pub fn put_entry(&self, uid: &str, entry: Entry) {
        self.entries.lock().unwrap().insert(uid.into(), entry);
    }

    pub fn take_away(&self, uid: &str) {
        self.entries.lock().unwrap().remove(&uid.into()).expect("was there");
    }

    fn tell(&self, seen: Seen) {
        self.seen.send(seen).ok();
    }
}

fn cause(cause: &Cause) -> String {
    match cause {
        Cause::Introduction(error) => format!("{cause}: {error}"),
        Cause::Io(error) if error.kind() == io::ErrorKind::ConnectionReset => Cause::Closed.to_string(),
        Cause::Io(error) if error.kind() == io::ErrorKind::BrokenPipe => Cause::Closed.to_string(),
        _ => cause.to_string(),
    }
}

impl Owner for Node {
    fn uids(&self) -> Vec<WorkloadUid> {
        self.entries.lock().unwrap().keys().cloned().collect()
    }

    fn entry(&self, uid: &WorkloadUid) -> Option<Entry> {
        self.entries.lock().unwrap().get(uid).cloned()
    }

    async fn introduce(&self, introduction: &mut Introduction<'_>) -> Result<(), BoxError> {
        if self.introduce != Introduce::No {
            let result = introduction.add(&workload("introduction")).await;
            let told = result.as_ref().map_err(Error::to_string).copied();
            self.tell(Seen::Introduced(introduction.connection(), told));
            if self.introduce == Introduce::Yes {
                result?;
            }
        }
        Ok(())
    }

    fn ended(&self, connection: ConnectionId) {
        self.tell(Seen::Ended(connection));
    }

    fn event(&self, event: Event<'_>) {
        self.tell(match event {
            Event::Rejected { connection, cause: why } => Seen::Rejected(connection, cause(why)),
            Event::Connected { connection, version } => {
                assert_eq!(version, wire::VERSION);
                Seen::Connected(connection)
            }
            Event::SnapshotSent { connection, added, kept, refused } => {
                Seen::SnapshotSent(connection, added, kept, refused)
            }
            Event::Refused { connection, uid, attempt, retry_in, .. } => {
                Seen::Refused(connection, uid.to_string(), attempt, retry_in.is_some())
            }
            Event::Recovered { connection, uid, refusals } => {
                Seen::Recovered(connection, uid.to_string(), refusals)
            }
            Event::Disconnected { connection, cause: why } => Seen::Disconnected(connection, cause(why)),
            Event::TookOver { connection, added, refused } => Seen::TookOver(connection, added, refused),
            other => panic!("{other:?}"),
        });
    }
}

pub fn info(uid: &str) -> WorkloadInfo {
    WorkloadInfo {
        name: format!("pod-{uid}"),
        namespace: "default".to_owned(),
        service_account: "sa".to_owned(),
    }
}

/// A stand-in for a netns: the server looks at no descriptor.
pub fn workload(uid: &str) -> Workload {
    let netns = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
    Workload { uid: uid.into(), info: info(uid), netns }
}

pub fn inode(fd: &OwnedFd) -> u64 {
    File::from(fd.as_fd().try_clone_to_owned().unwrap()).metadata().unwrap().ino()
}

pub fn add(uid: &str) -> Request {
    Request::Add { uid: uid.into(), info: info(uid) }
}

pub fn del(uid: &str) -> Request {
    Request::Del { uid: uid.into() }
}

pub fn keep(uid: &str) -> Request {
    Request::Keep { uid: uid.into() }
}

/// Joins a spawned call.
pub async fn joined<T>(call: JoinHandle<T>) -> T {
    patiently(call).await.unwrap()
}

/// Sends a packet with descriptors the protocol has no place for.
pub async fn send_with_descriptor(ztunnel: &Ztunnel, packet: &[u8]) {
    let (file, mut control) = (tempfile::tempfile().unwrap(), [0; 64]);
    let mut ancillary = AncillaryMessageWriter::new(&mut control);
    ancillary.add_fds([file.as_fd()]).map_err(io::Error::from).unwrap();
    ztunnel.socket.send_with_ancillary(packet, &mut ancillary).await.unwrap();
}
