//! The lab of the demo, and what can be observed in it.

use std::{
    collections::BTreeSet,
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use culvert_abi::{
    Counters,
    ztunnel::{HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT},
};
use culvert_dataplane::Restored;

use super::{
    judge::{Expected, Observed, Sender, Syn, Told},
    leg::{Action, Actor, Leg, SERVED},
};
use crate::{
    address::{Family, IntoAddress as _},
    frame::Frames,
    host::Host,
    lab::Lab,
    pod::Pod,
    server::{Accepted, Server},
    ztunnel::Behaviour,
};

/// Addresses of the second pod of a lab: ztunnel has to know before it starts.
const GREEN: [&str; 2] = ["10.244.0.3", "fd00:244::3"];
/// Port of the third one.
const PLAIN: [&str; 2] = ["10.244.0.4:80", "[fd00:244::4]:80"];
/// No interface has these addresses.
const SERVICE: [&str; 2] = ["10.96.0.10:80", "[fd00:96::10]:80"];
/// How long ztunnel may take to close what the demo left open.
const DRAIN: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// Two captured pods, one that is not, a server in each, a service.
pub(super) struct Scene {
    pub(super) lab: Lab,
    pub(super) blue: Pod,
    pub(super) green: Pod,
    pub(super) plain: Pod,
    servers: [Server; 3],
}

/// What the lab knew before a leg.
struct Before {
    accepted: [usize; 3],
    counters: [Counters; 2],
}

impl Scene {
    /// Panics, as the lab does, when something of it cannot be made.
    pub(super) fn start() -> Self {
        let services = SERVICE.iter().zip(PLAIN);
        let behaviour = Behaviour {
            tunnel: GREEN.iter().map(|address| address.parse().expect("an address")).collect(),
            services: services.map(|(vip, plain)| (vip.into_address(), plain.into_address())).collect(),
            ..Behaviour::default()
        };
        let lab = Lab::builder().ztunnel(behaviour).start();
        let (blue, green, plain) = (lab.pod("blue"), lab.pod("green"), lab.pod("plain"));
        let (blue, green) = (blue.captured(), green.captured());
        let servers = [&blue, &green, &plain].map(|pod| pod.serve((Family::V6.any(), SERVED)));
        Self { lab, blue, green, plain, servers }
    }

    pub(super) fn ztunnel_is_real(&self) -> bool {
        self.lab.ztunnel().is_real()
    }

    /// Does it, and looks at everything that could have noticed.
    pub(super) fn perform(&self, leg: &Leg, family: Family) -> Observed {
        let words = format!("{} says hello by {family:?}", leg.action.describe());
        let before = self.before();
        self.lab.ztunnel().forget();
        let wire = self.lab.wire();
        let begin = Instant::now();
        let (told, client) = self.act(leg.action, family, words.as_bytes());
        let took = begin.elapsed();
        let frames = wire.stop();
        let (reported, destinations) = self.ztunnels_account();
        Observed {
            told,
            took,
            reported,
            destinations,
            counted: self.counted_since(&before),
            accepted: self.accepted_since(&before),
            syns: syns(&frames, client),
            in_clear: frames.contains_payload(words.as_bytes()),
        }
    }

    /// What is to come of it, with addresses.
    pub(super) fn expectation(&self, leg: &Leg, family: Family) -> Expected {
        let endpoint = self.endpoint(leg.action, family);
        Expected {
            told: leg.told,
            listeners: leg.listeners.to_vec(),
            destination: self.destination(leg.action, family),
            endpoint,
            client: match leg.action {
                Action::Connect(from, ..) | Action::ConnectToService(from) if leg.told == Told::Answered => {
                    Some(self.host(from).address(family))
                }
                _ => None,
            },
            syns: leg
                .syn
                .map(|(sender, port)| Syn { sender, to: (endpoint.ip(), port).into() })
                .into_iter()
                .collect(),
            secret: leg.syn.is_none() || (leg.tunneled && self.ztunnel_is_real()),
        }
    }

    /// Hands the pods back as they were.
    pub(super) fn release(&self) -> anyhow::Result<()> {
        for pod in [&self.blue, &self.green] {
            let mut restored =
                pod.release().map_err(|error| anyhow::anyhow!("{} is not released: {error}", pod.name()))?;
            let deadline = Instant::now() + DRAIN;
            while let Restored::Draining(open) = restored {
                if Instant::now() > deadline {
                    bail!("{open} captured connections of {} do not end", pod.name());
                }
                std::thread::sleep(PAUSE);
                restored = pod.restore().map_err(|error| anyhow::anyhow!("{}: {error}", pod.name()))?;
            }
        }
        let pins = self.lab.config().bpffs.join("culvert/v1/pods");
        let left = pins.read_dir().with_context(|| format!("cannot list {}", pins.display()))?.count();
        if left > 0 {
            bail!("{left} links of pods are still pinned");
        }
        Ok(())
    }

    fn act(&self, action: Action, family: Family, words: &[u8]) -> (Told, Option<SocketAddr>) {
        let from = match action {
            Action::Listen(on, port) => {
                let listening = self.host(on).listen((family.any(), port)).reuse_port().try_serve();
                return (listening.map_or_else(|error| told(&error), |_| Told::Listening), None);
            }
            Action::Connect(from, ..) | Action::ConnectToService(from) => self.host(from),
        };
        let mut connection = match from.connect(self.destination(action, family)) {
            Ok(connection) => connection,
            Err(error) => return (told(&error), None),
        };
        let told = match connection.try_say(words) {
            Ok(answer) if answer == words => Told::Answered,
            Ok(_) => Told::Failed(None),
            Err(error) => told(&error),
        };
        (told, Some(connection.local_addr()))
    }

    fn destination(&self, action: Action, family: Family) -> SocketAddr {
        let [v4, v6] = SERVICE;
        match (action, family) {
            (Action::ConnectToService(_), Family::V4) => v4.into_address(),
            (Action::ConnectToService(_), Family::V6) => v6.into_address(),
            _ => self.endpoint(action, family),
        }
    }

    fn endpoint(&self, action: Action, family: Family) -> SocketAddr {
        match action {
            Action::Connect(_, to, port) | Action::Listen(to, port) => self.host(to).at(family, port),
            Action::ConnectToService(_) => self.plain.at(family, SERVED),
        }
    }

    fn host(&self, actor: Actor) -> &Host {
        match actor {
            Actor::Blue => &self.blue,
            Actor::Green => &self.green,
            Actor::Plain => &self.plain,
            Actor::Node => self.lab.node(),
        }
    }

    fn before(&self) -> Before {
        Before {
            accepted: self.servers.each_ref().map(|server| server.accepted().len()),
            counters: [self.blue.counters(), self.green.counters()],
        }
    }

    fn accepted_since(&self, before: &Before) -> Vec<Accepted> {
        let servers = self.servers.iter().zip(before.accepted);
        servers.flat_map(|(server, known)| server.accepted().split_off(known)).collect()
    }

    /// The listener of each connection that ztunnel accepted, by the kernel's account.
    fn counted_since(&self, before: &Before) -> Vec<u16> {
        let mut listeners = Vec::new();
        for (pod, before) in [&self.blue, &self.green].into_iter().zip(&before.counters) {
            let now = pod.counters();
            for (port, count) in [
                (OUTBOUND_PORT, now.accepted_outbound - before.accepted_outbound),
                (INBOUND_PORT, now.accepted_inbound - before.accepted_inbound),
                (HBONE_PORT, now.accepted_hbone - before.accepted_hbone),
            ] {
                listeners.extend((0..count).map(|_| port));
            }
        }
        listeners.sort_unstable();
        listeners
    }

    /// Listeners and original destinations. The real ztunnel logs a connection when it is over.
    fn ztunnels_account(&self) -> (Option<Vec<u16>>, Vec<SocketAddr>) {
        if self.ztunnel_is_real() {
            return (None, Vec::new());
        }
        let accepted = self.lab.ztunnel().saw().accepted();
        let mut listeners: Vec<_> = accepted.iter().map(|one| one.listener).collect();
        listeners.sort_unstable();
        let direct = accepted.iter().filter(|one| one.listener != HBONE_PORT);
        (Some(listeners), direct.map(|one| one.destination).collect())
    }
}

fn told(error: &io::Error) -> Told {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Told::Refused,
        io::ErrorKind::AddrInUse => Told::AddressInUse,
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            Told::Closed
        }
        _ => Told::Failed(error.raw_os_error()),
    }
}

/// A client that was refused has no address any more; every SYN is taken for its own then.
fn syns(frames: &Frames, client: Option<SocketAddr>) -> BTreeSet<Syn> {
    let syns = frames.iter().filter(|frame| frame.is_syn());
    syns.map(|frame| {
        let own = client.is_none_or(|client| frame.source == client);
        let sender = if own { Sender::Client } else { Sender::Ztunnel };
        Syn { sender, to: frame.destination }
    })
    .collect()
}
