//! The legs: who connects to whom, and what is to come of it.

use super::judge::{Sender, Told};

/// Port of the servers.
pub(super) const SERVED: u16 = 80;
/// A port nobody listens on.
const CLOSED: u16 = 81;

/// Who takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Actor {
    /// A captured pod.
    Blue,
    /// Another.
    Green,
    /// A pod that is not captured.
    Plain,
    /// A process of the node, as kubelet is.
    Node,
}

impl Actor {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Blue => "blue",
            Self::Green => "green",
            Self::Plain => "plain",
            Self::Node => "node",
        }
    }
}

/// What is done.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    /// To a port of this pod.
    Connect(Actor, Actor, u16),
    /// To the service, whose one endpoint is [`Actor::Plain`].
    ConnectToService(Actor),
    /// As root, with SO_REUSEPORT: without Culvert it would share ztunnel's port.
    Listen(Actor, u16),
}

impl Action {
    pub(super) fn describe(self) -> String {
        match self {
            Self::Connect(from, to, port) => format!("{} -> {}:{port}", from.name(), to.name()),
            Self::ConnectToService(from) => format!("{} -> service:{SERVED}", from.name()),
            Self::Listen(on, port) => format!("{} listens on {port}", on.name()),
        }
    }
}

/// One row of the table for each family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    pub(super) title: &'static str,
    pub(super) action: Action,
    pub(super) told: Told,
    /// Ports of ztunnel that accept a connection, ascending.
    pub(super) listeners: &'static [u16],
    /// Whose SYN wires carry, and to which port of the endpoint.
    pub(super) syn: Option<(Sender, u16)>,
    /// Between ztunnels: the real one encrypts.
    pub(super) tunneled: bool,
}

const REACHED: Leg = Leg {
    title: "",
    action: Action::ConnectToService(Actor::Blue),
    told: Told::Answered,
    listeners: &[],
    syn: None,
    tunneled: false,
};

/// With ztunnel up.
pub(super) const SERVING: [Leg; 9] = [
    Leg {
        title: "captured pod to captured pod: ztunnel to ztunnel, by a tunnel",
        action: Action::Connect(Actor::Blue, Actor::Green, SERVED),
        listeners: &[15001, 15008],
        syn: Some((Sender::Ztunnel, 15008)),
        tunneled: true,
        ..REACHED
    },
    Leg {
        title: "captured pod to one that is not",
        action: Action::Connect(Actor::Blue, Actor::Plain, SERVED),
        listeners: &[15001],
        syn: Some((Sender::Ztunnel, SERVED)),
        ..REACHED
    },
    Leg {
        title: "captured pod to a service's address",
        action: Action::ConnectToService(Actor::Blue),
        listeners: &[15001],
        syn: Some((Sender::Ztunnel, SERVED)),
        ..REACHED
    },
    Leg {
        title: "a pod that is not captured to one that is: the server sees the client's own address",
        action: Action::Connect(Actor::Plain, Actor::Green, SERVED),
        listeners: &[15006],
        syn: Some((Sender::Client, SERVED)),
        ..REACHED
    },
    Leg {
        title: "kubelet's probe: past ztunnel, from the node's own address",
        action: Action::Connect(Actor::Node, Actor::Green, SERVED),
        syn: Some((Sender::Client, SERVED)),
        ..REACHED
    },
    Leg {
        title: "captured pod to itself: past ztunnel, inside the pod",
        action: Action::Connect(Actor::Blue, Actor::Blue, SERVED),
        ..REACHED
    },
    Leg {
        title: "captured pod to a closed port: told at once",
        action: Action::Connect(Actor::Blue, Actor::Plain, CLOSED),
        told: Told::Closed,
        listeners: &[15001],
        syn: Some((Sender::Ztunnel, CLOSED)),
        ..REACHED
    },
    Leg {
        title: "to a closed port of a captured pod: told at once",
        action: Action::Connect(Actor::Plain, Actor::Green, CLOSED),
        told: Told::Closed,
        listeners: &[15006],
        syn: Some((Sender::Client, CLOSED)),
        ..REACHED
    },
    Leg {
        title: "a workload, as root and with SO_REUSEPORT, tries to share ztunnel's port",
        action: Action::Listen(Actor::Blue, 15001),
        told: Told::AddressInUse,
        ..REACHED
    },
];

/// With ztunnel killed.
pub(super) const WITHOUT_ZTUNNEL: [Leg; 3] = [
    Leg {
        title: "ztunnel is killed. Outbound: refused, and nothing leaves the pod",
        action: Action::Connect(Actor::Blue, Actor::Plain, SERVED),
        told: Told::Refused,
        ..REACHED
    },
    Leg {
        title: "ztunnel is killed. Inbound: refused, never delivered past it",
        action: Action::Connect(Actor::Plain, Actor::Green, SERVED),
        told: Told::Refused,
        syn: Some((Sender::Client, SERVED)),
        ..REACHED
    },
    Leg {
        title: "ztunnel is killed. kubelet's probe still works",
        action: Action::Connect(Actor::Node, Actor::Green, SERVED),
        syn: Some((Sender::Client, SERVED)),
        ..REACHED
    },
];

/// After its restart.
pub(super) const RESTARTED: [Leg; 1] =
    [Leg { title: "ztunnel is back: as before, and nobody touched the pods", ..SERVING[0] }];
