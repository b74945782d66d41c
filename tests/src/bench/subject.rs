//! One variant of the lab: two pods with ztunnel, or a node for pods in bulk.

use std::{net::IpAddr, sync::atomic::AtomicBool};

use super::{
    connections,
    cpu::Cpu,
    host_connect, iptables,
    load::Parties,
    measure::{Measure, Metrics},
    placement::Placement,
    pods, requests, stream,
    worker::{Of, Variant},
};
use crate::{lab::Lab, pod::Pod, topology, ztunnel::Behaviour};

pub(super) struct Subject {
    variant: Variant,
    lab: Lab,
    /// Client and server.
    pods: Option<(Pod, Pod)>,
    cpu: Cpu,
}

impl Subject {
    pub(super) fn start(of: Of, congestion_control: Option<&str>) -> anyhow::Result<Self> {
        let Of { variant, bulk } = of;
        let mut builder = Lab::builder();
        if matches!(variant, Variant::Direct | Variant::Iptables) {
            builder = builder.without_dataplane();
        }
        builder = match variant {
            _ if bulk => builder.without_ztunnel(),
            Variant::Direct => builder.without_ztunnel(),
            _ => builder.ztunnel(ztunnel()),
        };
        let lab = builder.big_tcp(variant != Variant::CulvertWithoutBigTcp).start();
        let cpu = Cpu::of(&lab.config().cgroup);
        let pods = (!bulk).then(|| (lab.pod("client"), lab.pod("server")));
        let subject = Self { variant, lab, pods, cpu };
        for pod in subject.pods.iter().flat_map(|(client, server)| [client, server]) {
            if let Some(name) = congestion_control {
                pod.set_sysctl("net/ipv4/tcp_congestion_control", name);
            }
            subject.capture(pod)?;
        }
        Ok(subject)
    }

    fn capture(&self, pod: &Pod) -> anyhow::Result<()> {
        match self.variant {
            Variant::Direct => {}
            Variant::Iptables => {
                iptables::apply_routing(pod.netns())?;
                iptables::apply_rules(pod.netns())?;
                pod.add_to_ztunnel().map_err(|error| anyhow::anyhow!("{error}"))?;
            }
            Variant::Culvert | Variant::CulvertWithoutBigTcp => {
                pod.clone().captured();
            }
        }
        Ok(())
    }

    pub(super) fn measure(&self, measure: &Measure, ended: &AtomicBool) -> anyhow::Result<Metrics> {
        let cpu = &self.cpu;
        match *measure {
            Measure::Requests { connections, placement, seconds } => {
                let parties = self.parties(placement)?;
                let metrics = requests::measure(&parties, cpu, connections, seconds);
                self.place_ztunnel(Placement::Free)?;
                metrics
            }
            Measure::Connections { seconds } => {
                connections::measure(&self.parties(Placement::Free)?, cpu, seconds)
            }
            Measure::Stream { seconds } => stream::measure(&self.parties(Placement::Free)?, cpu, seconds),
            Measure::HostConnect { seconds } => host_connect::measure(self.lab.node(), seconds),
            Measure::Pods { one_by_one, at_once } => {
                pods::measure(&self.lab, self.variant, one_by_one, at_once, ended)
            }
        }
    }

    fn parties(&self, placement: Placement) -> anyhow::Result<Parties<'_>> {
        let (client, server) = self.pods.as_ref().ok_or_else(|| anyhow::anyhow!("this lab has no pods"))?;
        self.place_ztunnel(placement)?;
        Ok(Parties { client, server, placement })
    }

    fn place_ztunnel(&self, placement: Placement) -> anyhow::Result<()> {
        match self.variant {
            Variant::Direct => Ok(()),
            _ => Ok(placement.place(self.lab.ztunnel().pid())?),
        }
    }
}

/// Both pods are in the mesh; nothing is told of connections.
fn ztunnel() -> Behaviour {
    let tunnel = [2, 3].map(topology::pod_addresses).into_iter();
    let tunnel = tunnel.flat_map(|(v4, v6)| [IpAddr::from(v4), v6.into()]).collect();
    Behaviour { tunnel, quiet: true, ..Behaviour::default() }
}
