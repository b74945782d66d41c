//! What a ztunnel saw, to ask questions of.

use std::net::SocketAddr;

use crate::event::Event;

/// A connection that ztunnel accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Name of the pod.
    pub pod: String,
    /// Number of the connection.
    pub connection: u64,
    /// Port of the listener.
    pub listener: u16,
    /// Who connected.
    pub peer: SocketAddr,
    /// The original destination.
    pub destination: SocketAddr,
}

/// Events in their order.
#[derive(Clone, Debug)]
pub struct Saw(Vec<Event>);

impl Saw {
    pub(crate) fn new(events: Vec<Event>) -> Self {
        Self(events)
    }

    /// All of them.
    pub fn events(&self) -> &[Event] {
        &self.0
    }

    /// Every accepted connection, in order.
    pub fn accepted(&self) -> Vec<Accepted> {
        let accepted = |event: &Event| match event {
            Event::Accepted { pod, connection, listener, peer, destination } => Some(Accepted {
                pod: pod.clone(),
                connection: *connection,
                listener: *listener,
                peer: *peer,
                destination: *destination,
            }),
            _ => None,
        };
        self.0.iter().filter_map(accepted).collect()
    }

    /// The connections that one kind of listener accepted, in all pods.
    pub fn accepted_on(&self, listener: u16) -> Vec<Accepted> {
        self.accepted().into_iter().filter(|accepted| accepted.listener == listener).collect()
    }

    /// Whether an accepted connection was closed without reaching anything, and why.
    pub fn refusal_of(&self, accepted: &Accepted) -> Option<String> {
        self.0.iter().find_map(|event| match event {
            Event::Refused { pod, connection, reason }
                if *pod == accepted.pod && *connection == accepted.connection =>
            {
                Some(reason.clone())
            }
            _ => None,
        })
    }

    /// Local and remote address of the connection that ztunnel made for an accepted one.
    pub fn upstream_of(&self, accepted: &Accepted) -> Option<(SocketAddr, SocketAddr)> {
        self.0.iter().find_map(|event| match event {
            Event::Upstream { pod, connection, local, remote }
                if *pod == accepted.pod && *connection == accepted.connection =>
            {
                Some((*local, *remote))
            }
            _ => None,
        })
    }
}
