//! The plugin's end of the socket: one connection a request, one deadline for all of it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Method, Request, StatusCode,
    client::conn::http1,
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::{net::UnixStream, time};

use crate::{
    answer::{Answer, Outcome, Refusal, Status, StepTime},
    event::{AddEvent, Attachment, GcRequest, StatusRequest},
    log::Batch,
};

mod error;

pub use error::{Absence, Error};

/// Longest answer that is read, as in Istio's plugin.
const ANSWER_LIMIT: usize = 1 << 20;
/// How long to wait when the agent's queue of connections is full. Unix sockets tell no other way.
const QUEUE_FULL: Duration = Duration::from_millis(5);

/// Asks one agent.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    deadline: time::Instant,
    server_uid: u32,
}

impl Client {
    /// A client of the agent that listens at `socket`. Each request ends at `deadline`: connecting,
    /// sending and reading together.
    pub fn new(socket: impl Into<PathBuf>, deadline: std::time::Instant) -> Self {
        Self { socket: socket.into(), deadline: deadline.into(), server_uid: 0 }
    }

    /// Takes another user than root for the agent. Whoever can bind the socket decides which pods are
    /// captured.
    #[must_use]
    pub fn server_uid(mut self, uid: u32) -> Self {
        self.server_uid = uid;
        self
    }

    /// Where the agent should listen.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks for a pod's enrollment. The steps of the answer begin with `connect` and end with `reply`:
    /// what sending, waiting and reading took beyond the agent's own steps.
    pub async fn add(&self, event: &AddEvent) -> Result<Answer, Error> {
        let start = time::Instant::now();
        let (body, connect) = self.post_timed("/cmdadd", event).await?;
        let total = start.elapsed();
        // Istio's agent answers with an empty body: 200 alone says enrolled.
        let Answer { outcome, mut steps } = answer(&body).unwrap_or(Answer::new(Outcome::Enrolled));
        let agent = Duration::from_micros(steps.iter().map(|step| step.us).sum());
        steps.insert(0, StepTime::new("connect", connect));
        steps.push(StepTime::new("reply", total.saturating_sub(connect).saturating_sub(agent)));
        Ok(Answer { outcome, steps })
    }

    /// Tells that a container's attachment is gone.
    pub async fn del(&self, attachment: &Attachment) -> Result<Outcome, Error> {
        let body = self.post("/cmddel", attachment).await?;
        Ok(answer(&body).map_or(Outcome::Unknown, |answer| answer.outcome))
    }

    /// Asks whether an attachment is still captured. Of the errors, only [`Error::Refused`] with code
    /// 101 says that it is not.
    pub async fn check(&self, attachment: &Attachment) -> Result<Outcome, Error> {
        let body = self.post("/check", attachment).await?;
        Ok(answer(&body).map_or(Outcome::Unknown, |answer| answer.outcome))
    }

    /// Tells which attachments of a network are valid.
    pub async fn gc(&self, request: &GcRequest) -> Result<(), Error> {
        self.post("/gc", request).await.map(drop)
    }

    /// Asks whether an ADD would succeed now.
    pub async fn status(&self, request: &StatusRequest) -> Result<Status, Error> {
        let answer = self.post("/status", request).await?;
        serde_json::from_slice(&answer)
            .map_err(|error| Error::Foreign { status: 200, text: error.to_string() })
    }

    /// Hands over log lines.
    pub async fn log(&self, lines: &Batch) -> Result<(), Error> {
        self.post("/log", lines).await.map(drop)
    }

    async fn post(&self, endpoint: &'static str, body: &impl Serialize) -> Result<Bytes, Error> {
        self.post_timed(endpoint, body).await.map(|(answer, _)| answer)
    }

    /// The answer, and what connecting took.
    async fn post_timed(
        &self,
        endpoint: &'static str,
        body: &impl Serialize,
    ) -> Result<(Bytes, Duration), Error> {
        let body = serde_json::to_vec(body).map_err(|error| Error::Lost(Box::new(error)))?;
        match time::timeout_at(self.deadline, self.exchange(endpoint, body.into())).await {
            Ok(answer) => answer,
            Err(time::error::Elapsed { .. }) => Err(Error::TimedOut { path: self.socket.clone() }),
        }
    }

    async fn exchange(&self, endpoint: &'static str, body: Bytes) -> Result<(Bytes, Duration), Error> {
        let start = time::Instant::now();
        let stream = self.connect().await?;
        let connect = start.elapsed();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(endpoint)
            .header(HOST, "unix")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(lost)?;
        let answer = async move {
            let (head, body) = sender.send_request(request).await.map_err(lost)?.into_parts();
            let body = Limited::new(body, ANSWER_LIMIT).collect().await.map_err(Error::Lost)?;
            Ok((head.status, body.to_bytes()))
        };
        // The connection is driven by this very future: nothing is left running when it is dropped. A
        // connection that fails also fails the answer.
        let mut answer = pin!(answer);
        let mut connection = pin!(connection);
        let (status, body) = tokio::select! {
            answer = &mut answer => answer?,
            _ = &mut connection => answer.await?,
        };
        if status == StatusCode::OK {
            return Ok((body, connect));
        }
        Err(match Refusal::decode(&body) {
            Some(refusal) => Error::Refused(refusal),
            None => Error::Foreign {
                status: status.as_u16(),
                text: String::from_utf8_lossy(&body).trim().to_owned(),
            },
        })
    }

    async fn connect(&self) -> Result<UnixStream, Error> {
        let stream = loop {
            match UnixStream::connect(&self.socket).await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => time::sleep(QUEUE_FULL).await,
                result => break result.map_err(|error| self.absence(error))?,
            }
        };
        match stream.peer_cred() {
            Ok(peer) if peer.uid() == self.server_uid => Ok(stream),
            Ok(peer) => {
                Err(self.unreachable(Absence::NotRoot { uid: peer.uid(), expected: self.server_uid }))
            }
            Err(error) => Err(self.unreachable(Absence::Other(error))),
        }
    }

    fn absence(&self, error: io::Error) -> Error {
        use std::os::unix::fs::FileTypeExt as _;
        self.unreachable(match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Absence::Missing,
            io::ErrorKind::PermissionDenied => Absence::Permission,
            // Linux says the same of a socket without a listener and of any other file.
            io::ErrorKind::ConnectionRefused => match fs::metadata(&self.socket) {
                Ok(metadata) if !metadata.file_type().is_socket() => Absence::NotASocket,
                _ => Absence::Refused,
            },
            _ => Absence::Other(error),
        })
    }

    fn unreachable(&self, why: Absence) -> Error {
        Error::Unreachable { path: self.socket.clone(), why }
    }
}

fn answer(body: &[u8]) -> Option<Answer> {
    serde_json::from_slice(body).ok()
}

fn lost(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Lost(Box::new(error))
}
