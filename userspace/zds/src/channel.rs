//! One connected socket: hello, and a request with its ack.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
    time::Duration,
};

use futures::FutureExt as _;
use tokio::time::timeout;
use tokio_seqpacket::{UnixSeqpacket, ancillary::AncillaryMessageWriter};

use crate::{
    Workload, WorkloadUid,
    event::Cause,
    wire::{self, Ack, Request, TooLarge},
};

/// Longest message read, in bytes. A nack carries an error text of ztunnel's, which has no limit
/// there and may hold a backtrace.
const MAX_MESSAGE: usize = 16 * 1024;

/// Bytes for the control message with one descriptor (`CMSG_SPACE` is 24) and its alignment.
const CONTROL_BUFFER: usize = 64;

/// A request in its packet, with the netns that goes with it.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    bytes: Arc<[u8]>,
    netns: Option<Arc<OwnedFd>>,
}

impl Packet {
    pub(crate) fn add(workload: &Workload) -> Result<Self, TooLarge> {
        let Workload { uid, info, netns } = workload;
        let request = Request::Add { uid: uid.clone(), info: info.clone() };
        Ok(Self { netns: Some(Arc::clone(netns)), ..Self::bare(&request)? })
    }

    pub(crate) fn keep(uid: &WorkloadUid) -> Result<Self, TooLarge> {
        Self::bare(&Request::Keep { uid: uid.clone() })
    }

    pub(crate) fn del(uid: &WorkloadUid) -> Result<Self, TooLarge> {
        Self::bare(&Request::Del { uid: uid.clone() })
    }

    pub(crate) fn snapshot_sent() -> Result<Self, TooLarge> {
        Self::bare(&Request::SnapshotSent)
    }

    fn bare(request: &Request) -> Result<Self, TooLarge> {
        Ok(Self { bytes: wire::encode_request(request)?.into(), netns: None })
    }
}

#[derive(Debug)]
pub(crate) struct Channel {
    socket: UnixSeqpacket,
    buffer: Box<[u8]>,
    ack_timeout: Duration,
}

impl Channel {
    pub(crate) fn new(socket: UnixSeqpacket, ack_timeout: Duration) -> Self {
        Self { socket, buffer: vec![0; MAX_MESSAGE].into(), ack_timeout }
    }

    /// Waits for the client's first message and returns its version.
    pub(crate) async fn hello(&mut self, limit: Duration) -> Result<i32, Cause> {
        match timeout(limit, self.receive()).await {
            Ok(packet) => Ok(wire::decode_hello(packet?)?),
            Err(_elapsed) => Err(Cause::NoHello),
        }
    }

    /// Sends one request and waits for its ack. After an error, and if the future is dropped before
    /// its end, the channel must not be used again: the next ack might be this request's.
    pub(crate) async fn exchange(&mut self, packet: &Packet) -> Result<Ack, Cause> {
        // What is here before the request can not be its answer.
        if let Some(early) = self.receive().now_or_never() {
            early?;
            return Err(Cause::Unexpected);
        }
        let limit = self.ack_timeout;
        let answer = async {
            self.send(packet).await?;
            Ok(wire::decode_ack(self.receive().await?)?)
        };
        timeout(limit, answer).await.unwrap_or(Err(Cause::NoAck))
    }

    /// Ends when the peer does: by leaving, or by speaking without being asked. Cancel safe.
    pub(crate) async fn disturbed(&mut self) -> Cause {
        match self.receive().await {
            Ok(_packet) => Cause::Unexpected,
            Err(cause) => cause,
        }
    }

    async fn send(&self, packet: &Packet) -> Result<(), Cause> {
        let mut control = [0; CONTROL_BUFFER];
        let mut ancillary = AncillaryMessageWriter::new(&mut control);
        if let Some(netns) = &packet.netns {
            ancillary.add_fds([netns.as_fd()]).map_err(std::io::Error::from)?;
        }
        // A seqpacket send is all or nothing.
        self.socket.send_with_ancillary(&packet.bytes, &mut ancillary).await?;
        Ok(())
    }

    /// Descriptors that a peer attaches are not asked for, so the kernel closes them.
    async fn receive(&mut self) -> Result<&[u8], Cause> {
        let info = self.socket.recv(&mut self.buffer).await?;
        match info.bytes_read() {
            0 => Err(Cause::Closed),
            _ if info.truncated() => Err(Cause::Truncated),
            read => Ok(&self.buffer[..read]),
        }
    }
}
