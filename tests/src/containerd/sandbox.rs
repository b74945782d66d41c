//! Pod sandboxes: what has a netns, and what CNI is run for.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::{Container, Containerd, answer};
use crate::node_agent::NAMESPACE;

/// NamespaceMode of CRI's api.proto.
const NODE: u8 = 2;

/// A pod as kubelet would ask for it.
#[derive(Clone, Debug)]
#[must_use]
pub struct PodSpec {
    name: String,
    namespace: String,
    uid: String,
    attempt: u32,
    host_network: bool,
}

impl PodSpec {
    /// A pod of the mesh.
    pub fn new(name: &str) -> Self {
        let (namespace, uid) = (NAMESPACE.to_owned(), format!("uid-of-{name}"));
        Self { name: name.to_owned(), namespace, uid, attempt: 0, host_network: false }
    }

    /// In another namespace.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = namespace.to_owned();
        self
    }

    /// In the node's netns.
    pub fn host_network(mut self) -> Self {
        self.host_network = true;
        self
    }

    /// Kubelet's counter of sandboxes of one pod.
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.attempt = attempt;
        self
    }

    fn json(&self, containerd: &Containerd<'_>) -> Value {
        let Self { name, namespace, uid, attempt, host_network } = self;
        let options = if *host_network { json!({ "network": NODE }) } else { json!({}) };
        json!({
            "metadata": { "name": name, "namespace": namespace, "uid": uid, "attempt": attempt },
            "log_directory": containerd.logs().join(uid),
            "linux": {
                "cgroup_parent": containerd.cgroup_parent(),
                "security_context": { "namespace_options": options },
            },
        })
    }

    pub(super) fn uid(&self) -> &str {
        &self.uid
    }

    fn file(&self) -> String {
        format!("{}-{}-{}.json", self.namespace, self.name, self.attempt)
    }
}

/// A sandbox. It lives until it is removed, or containerd ends.
#[derive(Debug)]
pub struct Sandbox<'a> {
    pub(super) containerd: &'a Containerd<'a>,
    pub(super) id: String,
    pub(super) spec: PodSpec,
    pub(super) config: String,
}

impl<'a> Containerd<'a> {
    /// RunPodSandbox; the error is what kubelet would put into the pod's event.
    pub fn run_sandbox(&'a self, spec: &PodSpec) -> Result<Sandbox<'a>, String> {
        let config = self.file(&spec.file(), &spec.json(self)).expect("the pod's file");
        let id = answer(self.crictl(&["runp", &config]).output())?;
        Ok(Sandbox { containerd: self, id, spec: spec.clone(), config })
    }

    /// RunPodSandbox, which must succeed.
    #[track_caller]
    pub fn sandbox(&'a self, spec: &PodSpec) -> Sandbox<'a> {
        self.run_sandbox(spec).unwrap_or_else(|error| panic!("{spec:?}: {error}"))
    }
}

impl Sandbox<'_> {
    /// A container of the pods' image, created and started.
    #[track_caller]
    pub fn run(&self, name: &str, arguments: &[&str]) -> Container {
        Container::start(self, name, super::Image::POD, arguments, &json!({ "linux": {} }))
    }

    /// A container of another image, with the rest of its ContainerConfig (api.proto of CRI).
    #[track_caller]
    pub fn run_image(&self, name: &str, image: &super::Image, arguments: &[&str], more: &Value) -> Container {
        self.containerd.import(image);
        Container::start(self, name, image.name(), arguments, more)
    }

    /// StopPodSandbox, which runs DEL.
    pub fn stop(&self) -> Result<(), String> {
        answer(self.containerd.crictl(&["stopp", &self.id]).output()).map(drop)
    }

    /// RemovePodSandbox, with its containers.
    pub fn remove(self) -> Result<(), String> {
        answer(self.containerd.crictl(&["rmp", "--force", &self.id]).output()).map(drop)
    }

    /// What the runtime knows.
    pub fn status(&self) -> Value {
        let status = answer(self.containerd.crictl(&["inspectp", "--output", "json", &self.id]).output());
        serde_json::from_str(&status.expect("the sandbox's status")).expect("JSON")
    }

    /// Its addresses, as the chain gave them.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let status = self.status();
        let network = &status["status"]["network"];
        let more = network["additionalIps"].as_array().into_iter().flatten().map(|entry| &entry["ip"]);
        let all = [&network["ip"]].into_iter().chain(more);
        all.filter_map(|address| address.as_str()?.parse().ok()).collect()
    }

    /// Id of the sandbox, CNI's container id.
    pub fn id(&self) -> &str {
        &self.id
    }
}
