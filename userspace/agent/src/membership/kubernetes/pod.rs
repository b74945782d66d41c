//! A pod as the API describes it, as far as anybody here asks.

use std::{collections::BTreeSet, net::IpAddr};

use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::{
    ResourceExt as _,
    core::{ApiResource, Object},
};
use serde::Deserialize;

use crate::{
    enroll,
    membership::{
        Decision, Described, Named, Undecided,
        predicate::{BYPASS_INBOUND, Rule, SIDECAR_STATUS, Traits, bypasses_inbound},
        selector::Labels,
    },
};

/// How a pod stands (`lifecycle.md` §7); istiod reads it.
pub(super) const REDIRECTION: &str = "ambient.istio.io/redirection";
/// Of static pods: their uid for kubelet and the runtime, which is not the mirror pod's.
const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// Kubernetes' name for the account of a pod that names none.
const DEFAULT_ACCOUNT: &str = "default";

/// Only the fields below are decoded; [`trim`] drops most of the metadata.
pub(super) type Pod = Object<Spec, Status>;

/// Of `v1.PodSpec`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Spec {
    host_network: bool,
    service_account_name: Option<String>,
}

/// Of `v1.PodStatus`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct PodIp {
    ip: String,
}

/// What the type stands for.
pub(super) fn resource() -> ApiResource {
    ApiResource::erase::<ApiPod>(&())
}

/// Leaves what is in use.
pub(super) fn trim(pod: &mut Pod) {
    pod.types = None;
    pod.metadata.managed_fields = None;
    pod.metadata.owner_references = None;
    pod.metadata.finalizers = None;
    let in_use = [REDIRECTION, CONFIG_HASH, SIDECAR_STATUS, BYPASS_INBOUND];
    pod.annotations_mut().retain(|key, _| in_use.contains(&key.as_str()));
}

/// How the pod is said to stand.
pub(super) fn redirection(pod: &Pod) -> Option<&str> {
    pod.annotations().get(REDIRECTION).map(String::as_str)
}

/// Everything but whether it is one of the mesh.
pub(super) fn describe(pod: &Pod, member: Option<bool>) -> Described {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    Described {
        pod: identity(pod),
        hash: hash(pod).cloned(),
        member,
        bypass_inbound: bypasses_inbound(pod.annotations()),
        addresses: status.map(addresses).unwrap_or_default(),
        has_ended: matches!(phase, Some("Succeeded" | "Failed")),
    }
}

/// Whether it is one of the mesh, if its namespace has these labels.
pub(super) fn is_member(pod: &Pod, rule: &Rule, namespace_labels: &Labels) -> bool {
    rule.includes(&Traits {
        namespace: pod.metadata.namespace.as_deref().unwrap_or_default(),
        namespace_labels,
        labels: pod.labels(),
        annotations: pod.annotations(),
        host_network: pod.spec.host_network,
    })
}

/// Decides over the pod that the runtime names; none of the two may be known.
pub(super) fn decide(
    named: &Named,
    pod: Option<&Pod>,
    namespace_labels: Option<&Labels>,
    rule: &Rule,
) -> Result<Decision, Undecided> {
    let (namespace, name) = (named.namespace.clone(), named.name.clone());
    let Some(pod) = pod else {
        return Err(Undecided::Unknown { namespace, name });
    };
    let known = pod.metadata.uid.clone().unwrap_or_default();
    if let Some(told) = named.uid.as_ref().filter(|told| **told != known && Some(*told) != hash(pod)) {
        return Err(Undecided::Another { namespace, name, known, told: told.clone() });
    }
    let Some(namespace_labels) = namespace_labels else {
        return Err(Undecided::Namespace { namespace, name });
    };
    if !is_member(pod, rule, namespace_labels) {
        return Ok(Decision::Outside);
    }
    Ok(Decision::Member { pod: identity(pod), bypass_inbound: bypasses_inbound(pod.annotations()) })
}

fn identity(pod: &Pod) -> enroll::Pod {
    let account = pod.spec.service_account_name.as_deref().filter(|account| !account.is_empty());
    enroll::Pod {
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: pod.name_any(),
        service_account: account.unwrap_or(DEFAULT_ACCOUNT).to_owned(),
    }
}

fn hash(pod: &Pod) -> Option<&String> {
    pod.annotations().get(CONFIG_HASH)
}

fn addresses(status: &Status) -> BTreeSet<IpAddr> {
    let all = status.pod_ips.iter().map(|own| &own.ip).chain(&status.pod_ip);
    all.filter_map(|ip| ip.parse().ok()).map(|ip: IpAddr| ip.to_canonical()).collect()
}
