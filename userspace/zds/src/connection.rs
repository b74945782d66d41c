//! The life of one connection: hello, introduction, snapshot, live requests.

use std::convert::Infallible;

use tokio::time::timeout;
use tokio_seqpacket::UnixSeqpacket;

use crate::{
    Config, ConnectionId, Error, WorkloadUid,
    channel::{Channel, Packet},
    event::{Cause, Event, report},
    owner::{Entry, Introduction, Owner},
    retry::Retries,
    suspects::Suspects,
    wire::Ack,
    ztunnels::{Registration, Registry, Request, Verb},
};

/// Runs until the connection ends. Dropping the future ends it too.
pub(crate) async fn run<O: Owner>(
    connection: ConnectionId,
    socket: UnixSeqpacket,
    config: &Config,
    owner: &O,
    registry: &Registry,
) {
    let rejected = |cause: Cause| report(owner, Event::Rejected { connection, cause: &cause });
    let mut channel = match welcome(socket, config) {
        Ok(channel) => channel,
        Err(cause) => return rejected(cause),
    };
    let version = match channel.hello(config.hello_timeout).await {
        Ok(version) => version,
        Err(cause) => return rejected(cause),
    };
    let _ended = Ended { owner, connection };
    if let Err(cause) = introduce(connection, &mut channel, config, owner).await {
        return rejected(cause);
    }
    // Before the first look at the owner's workloads: what is added or deleted after that look
    // comes through the queue.
    let mut registration = registry.register(connection);
    report(owner, Event::Connected { connection, version });
    let mut live = Live {
        connection,
        channel: &mut channel,
        owner,
        registration: &mut registration,
        suspects: &registry.suspects,
        retries: Retries::new(config.retry),
    };
    let Err(cause) = live.serve().await;
    drop(registration);
    report(owner, Event::Disconnected { connection, cause: &cause });
}

fn welcome(socket: UnixSeqpacket, config: &Config) -> Result<Channel, Cause> {
    let uid = socket.peer_cred()?.uid();
    match config.peer_uid {
        Some(expected) if uid != expected => Err(Cause::PeerUid { uid, expected }),
        _ => Ok(Channel::new(socket, config.ack_timeout)),
    }
}

async fn introduce<O: Owner>(
    connection: ConnectionId,
    channel: &mut Channel,
    config: &Config,
    owner: &O,
) -> Result<(), Cause> {
    let mut introduction = Introduction::new(connection, channel);
    match timeout(config.introduction_timeout, owner.introduce(&mut introduction)).await {
        Ok(verdict) => introduction.finish(verdict),
        Err(_elapsed) => Err(Cause::IntroductionTimeout),
    }
}

/// Tells the owner, also when the task is dropped.
struct Ended<'a, O: Owner> {
    owner: &'a O,
    connection: ConnectionId,
}

impl<O: Owner> Drop for Ended<'_, O> {
    fn drop(&mut self) {
        self.owner.ended(self.connection);
    }
}

/// A connection that counts.
struct Live<'a, O: Owner> {
    connection: ConnectionId,
    channel: &'a mut Channel,
    owner: &'a O,
    registration: &'a mut Registration,
    suspects: &'a Suspects,
    retries: Retries,
}

/// What came of offering a workload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Offered {
    Added,
    Kept,
    Refused,
    /// The owner has it no more, or has nothing to send.
    Nothing,
}

#[derive(Default)]
struct Offers {
    added: usize,
    kept: usize,
    refused: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Snapshot,
    /// No keep is sent any more.
    AfterSnapshot,
}

impl<O: Owner> Live<'_, O> {
    async fn serve(&mut self) -> Result<Infallible, Cause> {
        self.snapshot().await?;
        loop {
            tokio::select! {
                biased;
                cause = self.channel.disturbed() => return Err(cause),
                uid = self.retries.due() => {
                    self.offer(&uid, Phase::AfterSnapshot).await?;
                }
                () = self.registration.succession.take_over() => self.catch_up().await?,
                Some(request) = self.registration.queue.recv() => self.answer(request).await?,
            }
        }
    }

    async fn snapshot(&mut self) -> Result<(), Cause> {
        let Offers { added, kept, refused } = self.offer_all(Phase::Snapshot).await?;
        let packet = Packet::snapshot_sent().map_err(|error| Cause::SnapshotRefused(error.to_string()))?;
        match self.channel.exchange(&packet).await? {
            Ack::Ok => {
                let connection = self.connection;
                report(self.owner, Event::SnapshotSent { connection, added, kept, refused });
                Ok(())
            }
            Ack::Nack(message) => Err(Cause::SnapshotRefused(message)),
        }
    }

    /// This ztunnel has not heard of what was added while there was a newer one. What it serves
    /// already it acks without doing anything (`statemanager.rs`, `add_workload_inner`).
    async fn catch_up(&mut self) -> Result<(), Cause> {
        let Offers { added, kept: _, refused } = self.offer_all(Phase::AfterSnapshot).await?;
        report(self.owner, Event::TookOver { connection: self.connection, added, refused });
        Ok(())
    }

    /// Live requests take turns with the workloads, so that neither waits for all of the other.
    async fn offer_all(&mut self, phase: Phase) -> Result<Offers, Cause> {
        let mut offers = Offers::default();
        for uid in self.owner.uids() {
            if let Ok(request) = self.registration.queue.try_recv() {
                self.answer(request).await?;
            }
            match self.offer(&uid, phase).await? {
                Offered::Added => offers.added += 1,
                Offered::Kept => offers.kept += 1,
                Offered::Refused => offers.refused += 1,
                Offered::Nothing => {}
            }
        }
        Ok(offers)
    }

    /// Sends a workload as the owner has it now. Refused adds are due again later.
    async fn offer(&mut self, uid: &WorkloadUid, phase: Phase) -> Result<Offered, Cause> {
        let (connection, entry) = (self.connection, self.owner.entry(uid));
        let misses = self.suspects.misses(uid).filter(|_| phase == Phase::Snapshot);
        let (packet, offered) = match (&entry, phase) {
            // Its turn comes when everybody else is served. What ztunnel serves already it keeps.
            (Some(Entry::Workload(_)), _) if misses.is_some() => {
                self.retries.postpone(uid, misses.unwrap_or_default());
                (Packet::keep(uid), Offered::Kept)
            }
            (Some(Entry::Workload(workload)), _) => (Packet::add(workload), Offered::Added),
            (Some(Entry::Keep), Phase::Snapshot) => (Packet::keep(uid), Offered::Kept),
            (Some(Entry::Keep), Phase::AfterSnapshot) | (None, _) => {
                self.suspects.clear(uid);
                self.retries.settle(uid);
                return Ok(Offered::Nothing);
            }
        };
        let error = match packet {
            Ok(packet) => match self.exchange(uid, &packet).await? {
                Ack::Ok if offered == Offered::Kept => return Ok(offered),
                Ack::Ok => {
                    self.suspects.clear(uid);
                    if let Some(refusals) = self.retries.settle(uid) {
                        report(self.owner, Event::Recovered { connection, uid, refusals });
                    }
                    return Ok(offered);
                }
                Ack::Nack(message) => Error::Nacked { connection, message },
            },
            Err(too_large) => too_large.into(),
        };
        let (attempt, retry_in) = match (&error, offered) {
            (Error::Nacked { .. }, Offered::Added) => {
                let (attempt, pause) = self.retries.refuse(uid);
                (attempt, Some(pause))
            }
            _ => (self.retries.settle(uid).unwrap_or_default() + 1, None),
        };
        report(self.owner, Event::Refused { connection, uid, error: &error, attempt, retry_in });
        Ok(Offered::Refused)
    }

    /// An add, and who it was for if it is not answered.
    async fn exchange(&mut self, uid: &WorkloadUid, packet: &Packet) -> Result<Ack, Cause> {
        let answer = self.channel.exchange(packet).await;
        if let Err(Cause::NoAck) = answer {
            self.suspects.missed(uid);
        }
        answer
    }

    /// Serves one request of [`Ztunnels`](crate::Ztunnels).
    async fn answer(&mut self, request: Request) -> Result<(), Cause> {
        let Request { verb, uid, packet, reply } = request;
        if verb == Verb::Add && reply.is_closed() {
            return Ok(());
        }
        let connection = self.connection;
        let exchanged = match verb {
            Verb::Add => self.exchange(&uid, &packet).await,
            Verb::Del => self.channel.exchange(&packet).await,
        };
        let (answer, outcome) = match exchanged {
            Ok(Ack::Ok) => {
                self.suspects.clear(&uid);
                self.retries.settle(&uid);
                (Ok(()), Ok(()))
            }
            Ok(Ack::Nack(message)) => (Err(Error::Nacked { connection, message }), Ok(())),
            Err(cause @ Cause::NoAck) => (Err(Error::TimedOut { connection }), Err(cause)),
            Err(cause) => (Err(Error::ConnectionLost { connection }), Err(cause)),
        };
        // A caller that has gone does not want to know.
        reply.send(answer).ok();
        outcome
    }
}
