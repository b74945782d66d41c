//! Whether what came of a leg is what was expected. Pure.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use crate::server::Accepted;

/// A SYN that nobody answers is repeated after a second: less means that a refusal came at once. An
/// answer may take as long as the machine is busy.
const AT_ONCE: Duration = Duration::from_secs(1);

/// What the client was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// The server's echo came back.
    Answered,
    /// ECONNREFUSED.
    Refused,
    /// Connected, then the end: ztunnel found nobody behind.
    Closed,
    /// EADDRINUSE.
    AddressInUse,
    /// An error that no leg expects, by number if it has one.
    Failed(Option<i32>),
    /// A listener on ztunnel's port.
    Listening,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered => f.write_str("answered"),
            Self::Refused => f.write_str("refused"),
            Self::Closed => f.write_str("closed"),
            Self::AddressInUse => f.write_str("EADDRINUSE"),
            Self::Failed(Some(number)) => write!(f, "errno {number}"),
            Self::Failed(None) => f.write_str("failed"),
            Self::Listening => f.write_str("it listens"),
        }
    }
}

/// Whose connection a SYN belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sender {
    /// The workload's, or the process's of the node.
    Client,
    /// Another socket's: ztunnel's.
    Ztunnel,
}

/// A SYN on a wire, whatever wire, however often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Syn {
    pub(super) sender: Sender,
    pub(super) to: SocketAddr,
}

impl fmt::Display for Syn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sender = match self.sender {
            Sender::Client => "client",
            Sender::Ztunnel => "ztunnel",
        };
        write!(f, "{sender}'s SYN to {}", self.to)
    }
}

/// What is to come of a leg.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    pub(super) told: Told,
    /// Ascending.
    pub(super) listeners: Vec<u16>,
    /// Where the client wanted to go.
    pub(super) destination: SocketAddr,
    /// The server's address: the destination, or what is behind it.
    pub(super) endpoint: SocketAddr,
    /// The client's address in the server's eyes; `None`: no server is reached.
    pub(super) client: Option<IpAddr>,
    pub(super) syns: BTreeSet<Syn>,
    /// No wire may carry what the client says.
    pub(super) secret: bool,
}

/// What came of it.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    pub(super) told: Told,
    pub(super) took: Duration,
    /// By ztunnel's account, ascending; `None` if it gives none.
    pub(super) reported: Option<Vec<u16>>,
    /// By the pods' counters, ascending.
    pub(super) counted: Vec<u16>,
    /// Original destinations of what 15001 and 15006 accepted, by ztunnel's account.
    pub(super) destinations: Vec<SocketAddr>,
    /// What servers accepted.
    pub(super) accepted: Vec<Accepted>,
    pub(super) syns: BTreeSet<Syn>,
    /// A wire carried what the client said.
    pub(super) in_clear: bool,
}

impl Observed {
    /// Ports of ztunnel that took it.
    pub(super) fn listeners(&self) -> &[u16] {
        self.reported.as_deref().unwrap_or(&self.counted)
    }
}

/// What is wrong, a clause each.
pub(super) fn judge(expected: &Expected, observed: &Observed) -> Vec<String> {
    let mut wrong = Vec::new();
    if observed.told != expected.told {
        wrong.push(format!("the client was to be told \"{}\", not \"{}\"", expected.told, observed.told));
    } else if observed.told != Told::Answered && observed.took > AT_ONCE {
        wrong.push(format!("it took {:?}, more than {AT_ONCE:?}", observed.took));
    }
    if let Some(reported) = &observed.reported
        && *reported != expected.listeners
    {
        wrong.push(format!("ztunnel was to accept on {:?}, not on {reported:?}", expected.listeners));
    }
    if observed.counted != expected.listeners {
        let counted = &observed.counted;
        wrong.push(format!("the pods' counters were to show {:?}, not {counted:?}", expected.listeners));
    }
    if let Some(other) = observed.destinations.iter().find(|found| **found != expected.destination) {
        wrong.push(format!("ztunnel took {other} for the destination, not {}", expected.destination));
    }
    let reached = expected.client.map(|client| (client, expected.endpoint));
    let accepted: Vec<_> = observed.accepted.iter().map(|one| (one.peer.ip(), one.local)).collect();
    if accepted != reached.into_iter().collect::<Vec<_>>() {
        wrong.push(format!("servers were to see {reached:?}, not {accepted:?}"));
    }
    if observed.syns != expected.syns {
        wrong.push(format!("wires were to carry {}, not {}", list(&expected.syns), list(&observed.syns)));
    }
    if observed.in_clear && expected.secret {
        wrong.push("a wire carried in clear what the client said".to_owned());
    }
    wrong
}

fn list(syns: &BTreeSet<Syn>) -> String {
    if syns.is_empty() {
        return "nothing".to_owned();
    }
    syns.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn syn(sender: Sender) -> Syn {
        Syn { sender, to: address("10.244.0.4:80") }
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn expected() -> Expected {
        Expected {
            told: Told::Answered,
            listeners: vec![15001],
            destination: address("10.96.0.10:80"),
            endpoint: address("10.244.0.4:80"),
            client: Some(address("10.244.0.2:0").ip()),
            syns: BTreeSet::from([syn(Sender::Ztunnel)]),
            secret: false,
        }
    }

    fn observed() -> Observed {
        Observed {
            told: Told::Answered,
            took: Duration::from_millis(1),
            reported: Some(vec![15001]),
            counted: vec![15001],
            destinations: vec![address("10.96.0.10:80")],
            accepted: vec![Accepted { peer: address("10.244.0.2:4711"), local: address("10.244.0.4:80") }],
            syns: BTreeSet::from([syn(Sender::Ztunnel)]),
            in_clear: true,
        }
    }

    #[test]
    fn what_is_as_expected_is_not_wrong() {
        assert_eq!(judge(&expected(), &observed()), [""; 0]);
        let silent = Observed { reported: None, destinations: vec![], ..observed() };
        assert_eq!(judge(&expected(), &silent), [""; 0]);
    }

    #[test]
    fn each_difference_is_named() {
        let good = observed;
        let stranger = Accepted { peer: address("10.244.0.9:1"), ..good().accepted[0] };
        let leak = syn(Sender::Client);
        let stray = Syn { to: address("10.96.0.10:80"), ..syn(Sender::Ztunnel) };
        let elsewhere = Accepted { local: address("10.244.0.3:80"), ..good().accepted[0] };
        for (bad, word) in [
            (Observed { told: Told::Refused, ..good() }, "refused"),
            (Observed { told: Told::Failed(Some(110)), ..good() }, "errno 110"),
            (Observed { reported: Some(vec![]), ..good() }, "accept on [15001], not on []"),
            (Observed { reported: Some(vec![15001, 15001]), ..good() }, "accept on"),
            (Observed { counted: vec![15006], ..good() }, "counters"),
            (Observed { reported: None, counted: vec![], ..good() }, "counters"),
            (Observed { destinations: vec![address("10.244.0.4:15001")], ..good() }, "destination"),
            (Observed { accepted: vec![], ..good() }, "servers"),
            (Observed { accepted: vec![stranger], ..good() }, "servers"),
            (Observed { accepted: vec![elsewhere], ..good() }, "servers"),
            (Observed { accepted: [good().accepted, good().accepted].concat(), ..good() }, "servers"),
            (Observed { syns: BTreeSet::new(), ..good() }, "not nothing"),
            (Observed { syns: BTreeSet::from([leak]), ..good() }, "client's SYN to"),
            (Observed { syns: BTreeSet::from([stray]), ..good() }, "SYN to 10.96.0.10:80"),
        ] {
            let wrong = judge(&expected(), &bad);
            assert!(wrong.len() == 1 && wrong[0].contains(word), "{word}: {wrong:?}");
        }
    }

    #[test]
    fn a_secret_on_a_wire_is_wrong() {
        let secret = Expected { secret: true, ..expected() };
        assert_eq!(judge(&secret, &observed()).len(), 1);
        assert_eq!(judge(&secret, &Observed { in_clear: false, ..observed() }), [""; 0]);
    }

    #[test]
    fn a_late_refusal_is_wrong_and_a_late_answer_is_not() {
        let took = Duration::from_millis(1001);
        assert_eq!(judge(&expected(), &Observed { took, ..observed() }), [""; 0]);
        let closed = Expected { told: Told::Closed, ..expected() };
        let wrong = judge(&closed, &Observed { told: Told::Closed, took, ..observed() });
        assert!(wrong.len() == 1 && wrong[0].contains("it took 1.001s"), "{wrong:?}");
    }

    #[test]
    fn a_refused_client_must_not_have_reached_anybody() {
        let refused = Expected { told: Told::Refused, listeners: vec![], client: None, ..expected() };
        let reached = Observed { told: Told::Refused, reported: Some(vec![]), counted: vec![], ..observed() };
        let wrong = judge(&refused, &reached);
        assert!(wrong.len() == 1 && wrong[0].contains("servers"), "{wrong:?}");
    }
}
