//! A pod: a host on the node's bridge that can be captured.

use std::{collections::BTreeMap, net::IpAddr, ops::Deref, sync::Arc};

use culvert_abi::{Counter, Counters};
use culvert_dataplane::{Dataplane, Error, Options, Restored};
use culvert_zds::{Workload, WorkloadInfo};

use crate::{
    agent::{self, Agent},
    host::Host,
    ip,
};

/// Why a pod could not be captured.
#[derive(Debug)]
pub enum CaptureError {
    /// The dataplane's answer.
    Dataplane(Error),
    /// ztunnel's answer.
    Ztunnel(culvert_zds::Error),
}

impl std::fmt::Display for CaptureError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut error: Option<&dyn std::error::Error> = match self {
            Self::Dataplane(error) => Some(error),
            Self::Ztunnel(error) => Some(error),
        };
        while let Some(cause) = error {
            write!(f, "{cause}; ")?;
            error = cause.source();
        }
        Ok(())
    }
}

impl From<Error> for CaptureError {
    fn from(error: Error) -> Self {
        Self::Dataplane(error)
    }
}

impl From<culvert_zds::Error> for CaptureError {
    fn from(error: culvert_zds::Error) -> Self {
        Self::Ztunnel(error)
    }
}

/// A pod. Clones are the same pod; it lives as long as the lab, or until [`delete`](Pod::delete).
#[derive(Clone, Debug)]
pub struct Pod {
    host: Host,
    number: u16,
    agent: Arc<Agent>,
}

impl Deref for Pod {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl Pod {
    pub(crate) fn new(host: Host, number: u16, agent: Arc<Agent>) -> Self {
        Self { host, number, agent }
    }

    /// As with `disable_ipv6=1` from the beginning: IPv4 only.
    pub fn without_ipv6(self) -> Self {
        for interfaces in ["all", "default"] {
            self.set_sysctl(&format!("net/ipv6/conf/{interfaces}/disable_ipv6"), "1");
        }
        self
    }

    /// Without ::1 on `lo`.
    pub fn without_v6_loopback(self) -> Self {
        self.ip("addr del ::1/128 dev lo");
        self
    }

    /// With a second interface: a veth whose other end, `<interface>-<number>` in the node's netns, is
    /// up and on no bridge. Addresses like `"10.9.0.2/24"`.
    pub fn with_interface(self, interface: &str, addresses: &[&str]) -> Self {
        self.add_interface(interface, addresses);
        self
    }

    /// [`with_interface`](Self::with_interface) on a pod that runs already.
    pub fn add_interface(&self, interface: &str, addresses: &[&str]) {
        let (name, peer) = (self.name(), format!("{interface}-{}", self.number));
        ip::batch(
            Some("node"),
            &format!(
                "link add {peer} type veth peer name {interface} netns {name}
                 link set {peer} up"
            ),
        );
        let addresses = addresses.iter().map(|address| format!("addr add {address} dev {interface}\n"));
        self.ip(&format!("{}link set {interface} up", addresses.collect::<String>()));
    }

    /// Its number in the lab, the last part of its addresses.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The node's end of `eth0`.
    pub fn node_interface(&self) -> String {
        format!("veth-{}", self.number)
    }

    /// Enrolls it as the agent does: register, ZDS add and ack, check, activate. Panics on failure.
    pub fn captured(self) -> Self {
        self.captured_with(Options::default())
    }

    /// [`captured`](Self::captured) with options.
    pub fn captured_with(self, options: Options) -> Self {
        self.capture(options).unwrap_or_else(|error| panic!("{} cannot be captured: {error}", self.name()));
        self
    }

    /// Enrolls it, all steps.
    pub fn capture(&self, options: Options) -> Result<(), CaptureError> {
        self.register(options)?;
        self.add_to_ztunnel().map_err(|refusal| match self.check() {
            Err(reason @ CaptureError::Dataplane(Error::ForeignListener { .. })) => reason,
            _ => refusal,
        })?;
        self.check()?;
        self.activate()
    }

    /// First step: routing and own addresses; ztunnel's listeners are stored from here on.
    pub fn register(&self, options: Options) -> Result<(), CaptureError> {
        let addresses = [IpAddr::from(self.v4()), self.v6().into()];
        Ok(self.dataplane().register(self.netns(), &addresses, options)?)
    }

    /// Second step: ztunnel listens in the pod.
    pub fn add_to_ztunnel(&self) -> Result<(), CaptureError> {
        Ok(self.agent.add(workload(&self.host, self.number))?)
    }

    /// Third step: the listeners are as capture needs them.
    pub fn check(&self) -> Result<(), CaptureError> {
        Ok(self.dataplane().check_listeners(self.netns())?)
    }

    /// Last step: capture begins.
    pub fn activate(&self) -> Result<(), CaptureError> {
        Ok(self.dataplane().activate(self.netns())?)
    }

    /// The reverse of [`capture`](Self::capture). `Restored::Draining`: captured connections are still
    /// open, call [`restore`](Self::restore) when they are not.
    pub fn release(&self) -> Result<Restored, CaptureError> {
        self.dataplane().withdraw(self.netns())?;
        self.remove_from_ztunnel()?;
        self.restore()
    }

    /// Ends ztunnel's service.
    pub fn remove_from_ztunnel(&self) -> Result<(), CaptureError> {
        Ok(self.agent.del(self.name())?)
    }

    /// Puts routing back, if no captured connection is open.
    pub fn restore(&self) -> Result<Restored, CaptureError> {
        Ok(self.dataplane().restore(self.netns())?)
    }

    /// What the dataplane counted for it.
    pub fn counters(&self) -> Counters {
        self.dataplane().counters(self.cookie()).expect("counters")
    }

    /// Which counters are higher than `before`, and by how much.
    pub fn counted_since(&self, before: &Counters) -> BTreeMap<&'static str, u64> {
        let now = self.counters();
        let moved = Counter::ALL.map(|counter| (counter.name(), now.get(counter) - before.get(counter)));
        moved.into_iter().filter(|(_, by)| *by > 0).collect()
    }

    /// Removes its interfaces and its name. The namespace itself goes with its last user.
    pub fn delete(self) {
        ip::batch(Some("node"), &format!("link del {}", self.node_interface()));
        ip::batch(None, &format!("netns del {}", self.name()));
    }

    fn dataplane(&self) -> Arc<Dataplane> {
        self.agent.dataplane().expect("this lab has no dataplane")
    }
}

/// The pod as ztunnel is told of it, and as the real one's configuration has it.
pub(crate) fn workload(host: &Host, number: u16) -> Workload {
    let name = format!("pod-{number}");
    let info = WorkloadInfo { service_account: name.clone(), name, namespace: "default".to_owned() };
    agent::workload(host.name(), host.netns(), info).expect("a descriptor for the pod's netns")
}
