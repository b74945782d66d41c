//! The lab: a node, and what is on it.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
    time::Duration,
};

use culvert_dataplane::{Config, Dataplane};
use tokio::runtime::Runtime;

use crate::{
    agent::{Agent, Note},
    agent_process::AgentProcess,
    host::Host,
    isolation::{BPFFS, Isolation, NETNS},
    journal::Journal,
    pod::Pod,
    real, topology,
    wire::Wire,
    ztunnel::{Behaviour, Ztunnel},
};

/// Threads for servers and ZDS.
const THREADS: usize = 2;
const SHUTDOWN: Duration = Duration::from_secs(1);

/// What a lab is to have.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    dataplane: bool,
    ztunnel: Option<Behaviour>,
    big_tcp: bool,
}

impl Builder {
    /// No programs in the kernel: pods cannot be captured.
    pub fn without_dataplane(mut self) -> Self {
        self.dataplane = false;
        self
    }

    /// No ztunnel yet; see [`Lab::start_ztunnel`].
    pub fn without_ztunnel(mut self) -> Self {
        self.ztunnel = None;
        self
    }

    /// A ztunnel that behaves like this.
    pub fn ztunnel(mut self, behaviour: Behaviour) -> Self {
        self.ztunnel = Some(behaviour);
        self
    }

    /// Large packets on the pods' `lo`, as by default, or not.
    pub fn big_tcp(mut self, big_tcp: bool) -> Self {
        self.big_tcp = big_tcp;
        self
    }

    /// Makes it.
    pub fn start(self) -> Lab {
        let isolation = Isolation::enter();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .enable_all()
            .build()
            .expect("runtime");
        let node = topology::node(runtime.handle());
        let config = Config {
            bpffs: BPFFS.into(),
            cgroup: isolation.cgroup.path().to_owned(),
            host_netns: Path::new(NETNS).join("node"),
            proc: "/proc".into(),
            big_tcp: self.big_tcp,
        };
        let dataplane = self.dataplane.then(|| start_dataplane(&config));
        let socket = isolation.directory.join("zds.sock");
        let agent = Agent::start(&socket, dataplane, [], runtime.handle());
        let mut lab = Lab {
            ztunnel: None,
            hosts: Mutex::new(vec![node.clone()]),
            node,
            config,
            agent,
            pods: AtomicU16::new(2),
            others: AtomicU16::new(1),
            runtime: Some(runtime),
            isolation,
        };
        lab.ztunnel = self.ztunnel.map(|behaviour| lab.start_ztunnel(behaviour));
        lab
    }
}

/// A node with pods, in namespaces of the process. See the crate's documentation.
#[derive(Debug)]
pub struct Lab {
    ztunnel: Option<Ztunnel>,
    node: Host,
    /// The node first.
    hosts: Mutex<Vec<Host>>,
    config: Config,
    agent: Arc<Agent>,
    pods: AtomicU16,
    others: AtomicU16,
    runtime: Option<Runtime>,
    isolation: Isolation,
}

#[expect(clippy::new_without_default, reason = "it moves the process into namespaces")]
impl Lab {
    /// A node with Culvert's programs loaded and one ztunnel connected. Panics when the process is not
    /// root's, or has a lab already.
    pub fn new() -> Self {
        Self::builder().start()
    }

    /// A node where nothing of Culvert's runs yet: for [`NodeAgent`](crate::NodeAgent).
    pub fn bare() -> Self {
        Self::builder().without_dataplane().without_ztunnel().start()
    }

    /// A lab with something else.
    pub fn builder() -> Builder {
        Builder { dataplane: true, ztunnel: Some(Behaviour::default()), big_tcp: true }
    }

    /// A new pod, not captured. The name is that of its netns too.
    pub fn pod(&self, name: &str) -> Pod {
        let number = self.pods.fetch_add(1, Ordering::Relaxed);
        let host = self.keep(topology::pod(name, number, self.runtime().handle()));
        Pod::new(host, number, Arc::clone(&self.agent))
    }

    /// A new pod with a user namespace of its own, as with `hostUsers: false`.
    pub fn pod_of_user_namespace(&self, name: &str) -> Pod {
        let number = self.pods.fetch_add(1, Ordering::Relaxed);
        let host = self.keep(topology::pod_of_user_namespace(name, number, self.runtime().handle()));
        Pod::new(host, number, Arc::clone(&self.agent))
    }

    /// A host that is not the node: its packets are routed through the node.
    pub fn outside(&self, name: &str) -> Host {
        let number = self.others.fetch_add(1, Ordering::Relaxed);
        self.keep(topology::outside(name, number, self.runtime().handle()))
    }

    /// The node: its processes are the host's.
    pub fn node(&self) -> &Host {
        &self.node
    }

    /// Gives a service's address to a pod, and returns it. Other pods have no route but the default.
    pub fn vip(&self, address: &str, pod: &Pod) -> IpAddr {
        let address: IpAddr = address.parse().unwrap_or_else(|error| panic!("{address}: {error}"));
        let (prefix, via) = match address {
            IpAddr::V4(_) => (32, pod.v4().into()),
            IpAddr::V6(_) => (128, IpAddr::from(pod.v6())),
        };
        pod.ip(&format!("addr add {address}/{prefix} dev lo"));
        self.node.ip(&format!("route add {address}/{prefix} via {via}"));
        address
    }

    /// The first ztunnel.
    pub fn ztunnel(&self) -> &Ztunnel {
        self.ztunnel.as_ref().expect("this lab was made without a ztunnel")
    }

    /// Another ztunnel, as in a rollout. Returns when it serves every pod, unless it is not to.
    pub fn start_ztunnel(&self, behaviour: Behaviour) -> Ztunnel {
        self.ztunnel_of(behaviour, real::binary())
    }

    /// A stand-in, also where [`start_ztunnel`](Self::start_ztunnel) starts the real one: that has few
    /// faults, and knows few pods.
    pub fn start_stand_in(&self, behaviour: Behaviour) -> Ztunnel {
        self.ztunnel_of(behaviour, None)
    }

    fn ztunnel_of(&self, behaviour: Behaviour, binary: Option<PathBuf>) -> Ztunnel {
        let number = self.others.fetch_add(1, Ordering::Relaxed);
        let addresses = (Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST);
        let host = topology::empty(&format!("ztunnel-{number}"), addresses, self.runtime().handle());
        let directory = &self.isolation.directory;
        Ztunnel::start(host, behaviour, binary, &directory.join("zds.sock"), directory, &self.agent)
    }

    /// What the ZDS server noticed.
    pub fn zds(&self) -> &Journal<Note> {
        self.agent.notes()
    }

    /// A capture on every interface but `lo`, in the node's netns and in those of all pods and hosts
    /// made until now.
    pub fn wire(&self) -> Wire {
        Wire::start(&self.hosts())
    }

    /// The dataplane.
    pub fn dataplane(&self) -> Arc<Dataplane> {
        self.agent.dataplane().expect("this lab has no dataplane")
    }

    /// An agent in a process of its own, which can be killed. It adopts what is pinned, resumes these
    /// pods, and takes over the ZDS socket. For labs [without a dataplane](Builder::without_dataplane).
    pub fn agent_process(&self, resume: &[&Pod]) -> AgentProcess {
        AgentProcess::start(&self.node, &self.config, &self.isolation.directory.join("zds.sock"), resume)
    }

    /// What the dataplane was started with, for another process to adopt it.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Drops the dataplane and starts another, which adopts what is pinned; as a restart of the agent
    /// does. ZDS connections stay. Pods must be resumed by the caller.
    pub fn restart_dataplane(&self) {
        self.agent.replace_dataplane(|| start_dataplane(&self.config));
    }

    /// A directory of the lab's own, in memory.
    pub fn directory(&self) -> &Path {
        &self.isolation.directory
    }

    fn keep(&self, host: Host) -> Host {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner).push(host.clone());
        host
    }

    pub(crate) fn hosts(&self) -> Vec<Host> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("the lab lives")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.ztunnel = None;
        self.agent.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(SHUTDOWN);
        }
    }
}

pub(crate) fn start_dataplane(config: &Config) -> Dataplane {
    Dataplane::start(config).unwrap_or_else(|error| {
        let mut causes = String::new();
        let mut cause: Option<&dyn std::error::Error> = Some(&error);
        while let Some(error) = cause {
            causes = format!("{causes}: {error}");
            cause = error.source();
        }
        panic!("the dataplane does not start{causes}")
    })
}
