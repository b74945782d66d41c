//! The ztunnels connected now, and requests to them.

use std::{collections::BTreeMap, future, sync::Arc};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, timeout_at},
};

use crate::{ConnectionId, Error, Workload, WorkloadUid, channel::Packet, suspects::Suspects};

/// A request on its way to a connection's task.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) verb: Verb,
    pub(crate) uid: WorkloadUid,
    pub(crate) packet: Packet,
    pub(crate) reply: oneshot::Sender<Result<(), Error>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Not sent any more once its caller has gone.
    Add,
    /// Sent in any case.
    Del,
}

/// The connections that count: said hello, introduced, alive.
///
/// A queue has no bound of its own: each request in it has a caller, and a connection that does not
/// answer is closed after one ack timeout.
#[derive(Clone, Debug, Default)]
pub struct Connected {
    queues: BTreeMap<ConnectionId, mpsc::UnboundedSender<Request>>,
    /// The newest there ever was.
    latest: Option<ConnectionId>,
}

impl Connected {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.queues.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    /// The one that gets the adds.
    pub fn newest(&self) -> Option<ConnectionId> {
        self.queues.last_key_value().map(|(connection, _)| *connection)
    }
}

/// The writing end, shared by the connections' tasks.
#[derive(Clone, Debug)]
pub(crate) struct Registry {
    connected: Arc<watch::Sender<Connected>>,
    pub(crate) suspects: Suspects,
}

impl Registry {
    pub(crate) fn new() -> (Self, Ztunnels) {
        let (sender, connected) = watch::channel(Connected::default());
        (Self { connected: Arc::new(sender), suspects: Suspects::default() }, Ztunnels { connected })
    }

    pub(crate) fn register(&self, connection: ConnectionId) -> Registration {
        let (sender, queue) = mpsc::unbounded_channel();
        self.connected.send_modify(|connected| {
            connected.queues.insert(connection, sender);
            connected.latest = connected.latest.max(Some(connection));
        });
        let succession =
            Succession { connected: self.connected.subscribe(), connection, latest: Some(connection) };
        Registration { registry: self.clone(), connection, queue, succession }
    }
}

/// Membership of one connection, for as long as this value lives. What is in the queue then is lost
/// to its callers, who turn to the next ztunnel.
#[derive(Debug)]
pub(crate) struct Registration {
    registry: Registry,
    connection: ConnectionId,
    pub(crate) queue: mpsc::UnboundedReceiver<Request>,
    pub(crate) succession: Succession,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.connected.send_modify(|connected| {
            connected.queues.remove(&self.connection);
        });
    }
}

/// Notices when a connection is the newest again.
#[derive(Debug)]
pub(crate) struct Succession {
    connected: watch::Receiver<Connected>,
    connection: ConnectionId,
    /// The newest known of when this connection last had all workloads.
    latest: Option<ConnectionId>,
}

impl Succession {
    /// Waits until the newer connections that were there since the last time have all gone.
    /// Cancel safe.
    pub(crate) async fn take_over(&mut self) {
        let (connection, known) = (self.connection, self.latest);
        let again = |now: &Connected| now.newest() == Some(connection) && now.latest > known;
        let latest = self.connected.wait_for(again).await.map(|now| now.latest);
        match latest {
            Ok(latest) => self.latest = latest,
            Err(_closed) => future::pending().await,
        }
    }
}

/// A workload is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked {
    /// By whom.
    pub connection: ConnectionId,
}

/// Handle for requests. Clones address the same server.
#[derive(Clone, Debug)]
pub struct Ztunnels {
    connected: watch::Receiver<Connected>,
}

impl Ztunnels {
    /// The connections, to look at (`borrow`) or to wait for (`wait_for`).
    pub fn connected(&self) -> watch::Receiver<Connected> {
        self.connected.clone()
    }

    /// Has the newest ztunnel serve `workload`; on `Ok` its sockets listen in the netns.
    ///
    /// Waits for a ztunnel if there is none, and turns to the next one when the connection is lost, all
    /// until `deadline`. After a missed ack only an older ztunnel is turned to: the one that missed it
    /// will connect again, and every try holds up all others by an ack timeout. A nack is final: trying
    /// again is up to the caller.
    ///
    /// Cancel safe: a dropped call is not sent if it has not been yet. If it has, its ack is awaited
    /// and discarded, and the workload is there until [`del`](Self::del). The same holds after
    /// [`Error::TimedOut`] and [`Error::Nacked`].
    pub async fn add(&self, workload: &Workload, deadline: Instant) -> Result<Acked, Error> {
        let packet = Packet::add(workload)?;
        // The answer should the deadline come now.
        let mut at_deadline = Error::NoZtunnel;
        let attempts = self.add_until_answered(&workload.uid, &packet, &mut at_deadline);
        let answer = timeout_at(deadline, attempts).await;
        answer.unwrap_or(None).unwrap_or(Err(at_deadline))
    }

    /// `None` when the server is gone.
    async fn add_until_answered(
        &self,
        uid: &WorkloadUid,
        packet: &Packet,
        at_deadline: &mut Error,
    ) -> Option<Result<Acked, Error>> {
        let mut connected = self.connected();
        loop {
            let newest = connected.wait_for(|connected| !connected.is_empty()).await.ok()?.newest()?;
            *at_deadline = Error::TimedOut { connection: newest };
            let missed = match self.request(newest, Verb::Add, uid, packet).await {
                Err(error @ (Error::TimedOut { .. } | Error::ConnectionLost { .. })) => {
                    let missed = matches!(error, Error::TimedOut { .. });
                    *at_deadline = error;
                    missed
                }
                answer => return Some(answer.map(|()| Acked { connection: newest })),
            };
            // It is about to go; until it has, it would be chosen again.
            let left = connected.wait_for(|connected| !connected.queues.contains_key(&newest)).await.ok()?;
            if missed && left.newest().is_none_or(|next| next > newest) {
                return Some(Err(Error::TimedOut { connection: newest }));
            }
        }
    }

    /// Has every connected ztunnel stop serving the workload, and waits for their answers.
    ///
    /// The requests are on their way at the first poll, even if the call is dropped after it. A
    /// connection that is lost, or closed for a missed ack, is no error: that ztunnel drops the
    /// workload at the end of its next snapshot. Deleting what ztunnel does not know succeeds.
    pub async fn del(&self, uid: &WorkloadUid) -> Result<(), Error> {
        let packet = Packet::del(uid)?;
        let all: Vec<_> = self.connected.borrow().queues.keys().copied().collect();
        let answers: Vec<_> =
            all.into_iter().map(|connection| self.request(connection, Verb::Del, uid, &packet)).collect();
        let answers = futures::future::join_all(answers).await;
        match answers.into_iter().find(|answer| matches!(answer, Err(Error::Nacked { .. }))) {
            Some(nack) => nack,
            None => Ok(()),
        }
    }

    /// Queues at the first poll and waits for the answer.
    async fn request(
        &self,
        connection: ConnectionId,
        verb: Verb,
        uid: &WorkloadUid,
        packet: &Packet,
    ) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        let request = Request { verb, uid: uid.clone(), packet: packet.clone(), reply };
        let sent =
            self.connected.borrow().queues.get(&connection).is_some_and(|queue| queue.send(request).is_ok());
        if !sent {
            return Err(Error::ConnectionLost { connection });
        }
        answer.await.unwrap_or(Err(Error::ConnectionLost { connection }))
    }
}
