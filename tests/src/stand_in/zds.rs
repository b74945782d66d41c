//! The client side of ZDS.

use std::{collections::BTreeMap, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use culvert_zds::wire::{self, Ack, Request};
use tokio::time::sleep;
use tokio_seqpacket::{UnixSeqpacket, ancillary::OwnedAncillaryMessage};

use super::{
    Proxy,
    workload::{Listening, Workload},
};
use crate::event::Event;

/// Between two attempts to connect.
const RECONNECT: Duration = Duration::from_millis(20);
/// Bytes for control messages; a surplus of descriptors must be seen, not cut off.
const CONTROL: usize = 256;

/// Connects, again and again, and does what it is told. Returns only when the faults say so: until
/// then the workloads, and with them their connections, live.
pub(super) async fn run(proxy: Arc<Proxy>) -> anyhow::Result<()> {
    let shutdown = proxy.shutdown.clone();
    let mut client = Client { proxy, workloads: BTreeMap::new(), requests: 0 };
    match shutdown.run_until_cancelled(client.run()).await {
        Some(ended) => ended,
        None => std::future::pending().await,
    }
}

struct Client {
    proxy: Arc<Proxy>,
    /// Survives the connection: traffic goes on without an agent.
    workloads: BTreeMap<String, Served>,
    requests: u32,
}

struct Served {
    workload: Workload,
    /// Named since the last hello.
    named: bool,
}

impl Client {
    async fn run(&mut self) -> anyhow::Result<()> {
        loop {
            let Ok(socket) = UnixSeqpacket::connect(&self.proxy.options.socket).await else {
                sleep(RECONNECT).await;
                continue;
            };
            self.session(&socket).await?;
            sleep(RECONNECT).await;
        }
    }

    /// Until the server closes the connection.
    async fn session(&mut self, socket: &UnixSeqpacket) -> anyhow::Result<()> {
        for served in self.workloads.values_mut() {
            served.named = false;
        }
        if socket.send(&wire::encode_hello()).await.is_err() {
            return Ok(());
        }
        while let Some((request, netns)) = receive(socket).await? {
            let faults = &self.proxy.options.faults;
            self.requests += 1;
            if faults.die_after == Some(self.requests) {
                bail!("ending at request {}, as asked", self.requests);
            }
            let sane = self.requests <= faults.sane_for;
            let ignored = matches!(&request, Request::Add { uid, .. } if faults.ignore.iter().any(|own| own == uid.as_str()));
            let silent = ignored || faults.silent && !sane;
            let (garbage, delay) = (faults.garbage && !sane, if sane { 0 } else { faults.ack_delay });
            let (ack, opened) = self.answer(request, netns);
            if silent {
                continue;
            }
            sleep(Duration::from_millis(delay)).await;
            let packet = match garbage {
                true => b"\xff\xffgarbage".to_vec(),
                false => wire::encode_ack(&ack),
            };
            let sent = socket.send(&packet).await;
            if let Some((uid, listening)) = opened {
                let workload = listening.serve(&self.proxy);
                self.workloads.insert(uid, Served { workload, named: true });
            }
            if sent.is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The answer, and the sockets that begin to accept after it.
    fn answer(&mut self, request: Request, netns: Option<OwnedFd>) -> (Ack, Option<(String, Listening)>) {
        match request {
            Request::Add { uid, .. } => {
                let uid = uid.to_string();
                if let Some(text) = self.proxy.options.faults.refusal(&uid) {
                    return (Ack::Nack(text.to_owned()), None);
                }
                match self.add(&uid, netns) {
                    Ok(opened) => (Ack::Ok, opened.map(|listening| (uid, listening))),
                    Err(error) => (Ack::Nack(format!("{error:#}")), None),
                }
            }
            Request::Keep { uid } => {
                if let Some(served) = self.workloads.get_mut(uid.as_str()) {
                    served.named = true;
                }
                (Ack::Ok, None)
            }
            Request::Del { uid } => {
                if self.workloads.remove(uid.as_str()).is_some() {
                    self.proxy.report.tell(Event::Deleted { pod: uid.to_string() });
                }
                (Ack::Ok, None)
            }
            Request::SnapshotSent => {
                let unnamed = self.workloads.extract_if(.., |_, served| !served.named);
                for (pod, _served) in unnamed {
                    self.proxy.report.tell(Event::Deleted { pod });
                }
                self.proxy.report.tell(Event::Ready);
                (Ack::Ok, None)
            }
        }
    }

    fn add(&mut self, uid: &str, netns: Option<OwnedFd>) -> anyhow::Result<Option<Listening>> {
        let netns = netns.context("no netns came with the add")?;
        let netns = self.proxy.home.pod(netns)?;
        if let Some(served) = self.workloads.get_mut(uid)
            && served.workload.netns.is(&netns)
        {
            served.named = true;
            return Ok(None);
        }
        self.workloads.remove(uid);
        let listening = Listening::open(&self.proxy, uid, netns)?;
        self.proxy.report.tell(Event::Added { pod: uid.to_owned() });
        Ok(Some(listening))
    }
}

/// The next request; `None` when the server has closed.
async fn receive(socket: &UnixSeqpacket) -> anyhow::Result<Option<(Request, Option<OwnedFd>)>> {
    let (mut packet, mut control) = ([0; wire::MAX_REQUEST], [0; CONTROL]);
    let (info, ancillary) = match socket.recv_with_ancillary(&mut packet, &mut control).await {
        Ok(received) => received,
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut descriptors = Vec::new();
    for message in ancillary.into_messages() {
        if let OwnedAncillaryMessage::FileDescriptors(received) = message {
            descriptors.extend(received);
        }
    }
    if info.bytes_read() == 0 {
        return Ok(None);
    }
    ensure!(!info.truncated(), "request longer than {} bytes", wire::MAX_REQUEST);
    let request = wire::decode_request(&packet[..info.bytes_read()])?;
    ensure!(descriptors.len() == request.descriptors(), "{} descriptors with {request:?}", descriptors.len());
    Ok(Some((request, descriptors.pop())))
}
