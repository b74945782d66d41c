//! What the server asks of, and tells, the one who runs it.

use crate::{
    ConnectionId, Error, Workload, WorkloadUid,
    channel::{Channel, Packet},
    event::{Cause, Event},
    wire::Ack,
};

/// An error of the owner's.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How a workload stands at the moment it is its turn in a snapshot.
#[derive(Clone, Debug)]
pub enum Entry {
    /// Sent as an add.
    Workload(Workload),
    /// Its netns is not known (yet): ztunnel is told to leave it as it is, if it has it. An add
    /// follows by [`Ztunnels::add`](crate::Ztunnels::add) when the netns is found.
    Keep,
}

/// The owner of the workloads. Called on the connections' tasks: methods must not block.
pub trait Owner: Send + Sync + 'static {
    /// Every workload there is, the start of a snapshot.
    fn uids(&self) -> Vec<WorkloadUid>;

    /// One workload, asked for when it is about to be sent; `None` if it is gone since
    /// [`uids`](Self::uids).
    fn entry(&self, uid: &WorkloadUid) -> Option<Entry>;

    /// Gets to know a ztunnel before it is told of any workload. On an error, on a nack or after
    /// [`Config::introduction_timeout`](crate::Config::introduction_timeout) (the future is dropped
    /// then) the connection is closed and never used.
    ///
    /// Workloads added here are private to the connection. ztunnel keeps them until it connects
    /// again, so give every connection a uid of its own.
    fn introduce(
        &self,
        _introduction: &mut Introduction<'_>,
    ) -> impl Future<Output = Result<(), BoxError>> + Send {
        async { Ok(()) }
    }

    /// The connection is over. Called exactly once for each connection whose
    /// [`introduce`](Self::introduce) was called, whatever came of it, also at shutdown.
    fn ended(&self, _connection: ConnectionId) {}

    /// For counting; the log line is written already.
    fn event(&self, _event: Event<'_>) {}
}

/// A connection that said hello and does not count yet.
#[derive(Debug)]
pub struct Introduction<'a> {
    connection: ConnectionId,
    channel: &'a mut Channel,
    /// First failure, so that an owner can not go on over it.
    failure: Option<Cause>,
}

impl<'a> Introduction<'a> {
    pub(crate) fn new(connection: ConnectionId, channel: &'a mut Channel) -> Self {
        Self { connection, channel, failure: None }
    }

    /// The connection, as later named by [`Owner::ended`] and [`Acked`](crate::Acked).
    pub fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// Adds a workload on this connection only and waits for ztunnel's ack, at most
    /// [`Config::ack_timeout`](crate::Config::ack_timeout). An error after sending is the end of the
    /// connection, whatever [`Owner::introduce`] returns.
    /// Not cancel safe: a dropped call is the end of the connection too.
    pub async fn add(&mut self, workload: &Workload) -> Result<(), Error> {
        let connection = self.connection;
        if self.failure.is_some() {
            return Err(Error::ConnectionLost { connection });
        }
        let packet = Packet::add(workload)?;
        // Replaced below unless this call is dropped while its answer is outstanding.
        self.failure = Some(Cause::NoAck);
        match self.channel.exchange(&packet).await {
            Ok(Ack::Ok) => {
                self.failure = None;
                Ok(())
            }
            Ok(Ack::Nack(message)) => {
                let nack = Error::Nacked { connection, message: message.clone() };
                self.failure = Some(Cause::Introduction(nack.into()));
                Err(Error::Nacked { connection, message })
            }
            Err(cause) => {
                let error = match cause {
                    Cause::NoAck => Error::TimedOut { connection },
                    _ => Error::ConnectionLost { connection },
                };
                self.failure = Some(cause);
                Err(error)
            }
        }
    }

    /// The verdict over the connection, given the owner's.
    pub(crate) fn finish(self, owner: Result<(), BoxError>) -> Result<(), Cause> {
        match self.failure {
            Some(cause) => Err(cause),
            None => owner.map_err(Cause::Introduction),
        }
    }
}
