//! Message ↔ packet, both directions, as pure functions.
//!
//! The server encodes requests and decodes hello and ack; the other half is for clients, that is
//! stand-ins for ztunnel in tests. Decoding never panics, whatever the bytes.

use prost::Message as _;

use crate::{WorkloadInfo, WorkloadUid};
use proto::{workload_request, workload_response};

#[allow(unreachable_pub, reason = "generated")]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/istio.workload.zds.rs"));
}

/// Longest request in bytes: ztunnel reads into a buffer of this size and takes truncation for a
/// protocol error (`protocol.rs`, `read_message`).
pub const MAX_REQUEST: usize = 1024;

/// Protocol version of this server and of ztunnel.
pub const VERSION: i32 = proto::Version::V1 as i32;

/// What the server asks of ztunnel; each is answered by one [`Ack`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Listen in the netns that comes with this packet. Acked once ztunnel's sockets listen.
    Add {
        /// Key of the workload.
        uid: WorkloadUid,
        /// Its identity.
        info: WorkloadInfo,
    },
    /// Before the end of the snapshot: leave this workload as it is. ztunnel ends its process if
    /// one comes later (`statemanager.rs`, `process_msg`).
    Keep {
        /// Key of the workload.
        uid: WorkloadUid,
    },
    /// Stop serving the workload. Unknown ones are acked too.
    Del {
        /// Key of the workload.
        uid: WorkloadUid,
    },
    /// The snapshot is complete: drop what was not named in it.
    SnapshotSent,
}

impl Request {
    /// How many file descriptors go with the packet: exactly this many, or ztunnel refuses it and
    /// disconnects (`protocol.rs`, `get_workload_data`).
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Add { .. } => 1,
            Self::Keep { .. } | Self::Del { .. } | Self::SnapshotSent => 0,
        }
    }
}

/// ztunnel's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ack {
    /// Done.
    Ok,
    /// Refused; the text is ztunnel's and is not empty.
    Nack(String),
}

/// A request over [`MAX_REQUEST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request of {size} bytes is longer than ztunnel reads ({MAX_REQUEST})")]
pub struct TooLarge {
    /// Encoded size in bytes.
    pub size: usize,
}

/// A packet that is not the message expected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DecodeError {
    /// Not protobuf, or a field of another type.
    #[error("malformed message")]
    Malformed(#[from] prost::DecodeError),
    /// The message says nothing, or something this version does not know.
    #[error("message without a known payload")]
    NoPayload,
    /// An add without workload_info.
    #[error("add without workload_info")]
    NoInfo,
    /// A hello without a version.
    #[error("hello without a version")]
    NoVersion,
}

/// Server: request to packet.
pub fn encode_request(request: &Request) -> Result<Vec<u8>, TooLarge> {
    let payload = match request {
        Request::Add { uid, info } => workload_request::Payload::Add(proto::AddWorkload {
            uid: uid.to_string(),
            workload_info: Some(proto::WorkloadInfo {
                name: info.name.clone(),
                namespace: info.namespace.clone(),
                service_account: info.service_account.clone(),
            }),
        }),
        Request::Keep { uid } => {
            workload_request::Payload::Keep(proto::KeepWorkload { uid: uid.to_string() })
        }
        Request::Del { uid } => workload_request::Payload::Del(proto::DelWorkload { uid: uid.to_string() }),
        Request::SnapshotSent => workload_request::Payload::SnapshotSent(proto::SnapshotSent {}),
    };
    let message = proto::WorkloadRequest { payload: Some(payload) };
    match message.encoded_len() {
        0..=MAX_REQUEST => Ok(message.encode_to_vec()),
        size => Err(TooLarge { size }),
    }
}

/// Client: packet to request. Compare the descriptors received with [`Request::descriptors`].
pub fn decode_request(packet: &[u8]) -> Result<Request, DecodeError> {
    let message = proto::WorkloadRequest::decode(packet)?;
    Ok(match message.payload.ok_or(DecodeError::NoPayload)? {
        workload_request::Payload::Add(proto::AddWorkload { uid, workload_info }) => {
            let proto::WorkloadInfo { name, namespace, service_account } =
                workload_info.ok_or(DecodeError::NoInfo)?;
            Request::Add { uid: uid.into(), info: WorkloadInfo { name, namespace, service_account } }
        }
        workload_request::Payload::Keep(proto::KeepWorkload { uid }) => Request::Keep { uid: uid.into() },
        workload_request::Payload::Del(proto::DelWorkload { uid }) => Request::Del { uid: uid.into() },
        workload_request::Payload::SnapshotSent(proto::SnapshotSent {}) => Request::SnapshotSent,
    })
}

/// Client: the packet that opens a connection.
pub fn encode_hello() -> Vec<u8> {
    proto::ZdsHello { version: VERSION }.encode_to_vec()
}

/// Server: packet to the client's version. Versions after [`VERSION`] are taken as well: the client
/// gets no answer by which it could step down, and Istio's server takes them.
pub fn decode_hello(packet: &[u8]) -> Result<i32, DecodeError> {
    match proto::ZdsHello::decode(packet)?.version {
        version if version >= VERSION => Ok(version),
        _ => Err(DecodeError::NoVersion),
    }
}

/// Client: answer to packet. A nack with an empty text would be read as success.
pub fn encode_ack(ack: &Ack) -> Vec<u8> {
    let error = match ack {
        Ack::Ok => String::new(),
        Ack::Nack(message) => message.clone(),
    };
    let payload = Some(workload_response::Payload::Ack(proto::Ack { error }));
    proto::WorkloadResponse { payload }.encode_to_vec()
}

/// Server: packet to answer.
pub fn decode_ack(packet: &[u8]) -> Result<Ack, DecodeError> {
    let message = proto::WorkloadResponse::decode(packet)?;
    let workload_response::Payload::Ack(proto::Ack { error }) =
        message.payload.ok_or(DecodeError::NoPayload)?;
    Ok(if error.is_empty() { Ack::Ok } else { Ack::Nack(error) })
}

#[cfg(test)]
mod tests;
