//! Writes `ambient.istio.io/redirection` of this node's pods: what the annotation should say is compared
//! with what it says whenever either changes, so a lost or edited one is written again.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
    runtime::reflector::Store,
};
use serde_json::json;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};

use super::pod::{Pod, REDIRECTION, redirection};
use crate::{enroll, error_chain::Chain, membership::Redirection, metrics::Metrics};

/// Patches under way at the same time.
const PARALLEL: usize = 16;
/// For one patch.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the watch may take to show what was written before it is written again.
const ECHO: Duration = Duration::from_secs(10);
/// Before the first repetition of a patch that failed, doubled up to [`SLOWEST`].
const FASTEST: Duration = Duration::from_millis(250);
const SLOWEST: Duration = Duration::from_secs(30);
/// How long something announced is kept for a pod that no list has.
const UNLISTED: Duration = Duration::from_secs(60);

impl Redirection {
    /// The value of the annotation. istiod takes exactly `enabled` for capable of HBONE
    /// (`pilot/pkg/serviceregistry/ambient/workloads.go`).
    const fn value(self) -> Option<&'static str> {
        match self {
            Self::Enabled => Some("enabled"),
            Self::Pending => Some("pending"),
            Self::Absent => None,
        }
    }
}

/// What pods' annotations should say.
pub(super) struct Annotations {
    client: Client,
    metrics: Arc<Metrics>,
    wanted: Mutex<HashMap<String, (Redirection, Instant)>>,
    announced: Notify,
}

/// The last patch of a pod.
#[derive(Debug)]
struct Written {
    value: Option<&'static str>,
    /// What the annotation said before.
    before: Option<String>,
    /// Not repeated before this.
    again: Instant,
    failures: u32,
}

/// What became of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Written,
    /// No such pod any more.
    Gone,
    Failed,
}

impl Annotations {
    pub(super) fn new(client: Client, metrics: Arc<Metrics>) -> Self {
        Self { client, metrics, wanted: Mutex::default(), announced: Notify::new() }
    }

    pub(super) fn announce(&self, pod: &enroll::Pod, redirection: Redirection) {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let before = wanted.insert(pod.uid.clone(), (redirection, Instant::now()));
        if before.is_none_or(|(before, _)| before != redirection) {
            self.announced.notify_one();
        }
    }

    /// Runs until dropped.
    pub(super) async fn keep(&self, pods: &Store<Pod>, mut changes: watch::Receiver<u64>) {
        let mut written: HashMap<String, Written> = HashMap::new();
        let mut under_way: HashMap<tokio::task::Id, String> = HashMap::new();
        let mut patches = JoinSet::new();
        loop {
            let next = self.compare(pods, &mut written, &mut under_way, &mut patches);
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                () = self.announced.notified() => {}
                Some(done) = patches.join_next_with_id() => {
                    let (id, outcome) = match done {
                        Ok((id, outcome)) => (id, outcome),
                        Err(panic) => (panic.id(), Outcome::Failed),
                    };
                    if let Some(written) = under_way.remove(&id).and_then(|uid| written.get_mut(&uid)) {
                        let now = Instant::now();
                        let pause = FASTEST * 2_u32.saturating_pow(written.failures.min(10));
                        (written.failures, written.again) = match outcome {
                            Outcome::Written => (0, now + ECHO),
                            Outcome::Gone => (0, now + UNLISTED),
                            Outcome::Failed => (written.failures + 1, now + pause.min(SLOWEST)),
                        };
                    }
                }
                () = sleep_until(next) => {}
            }
        }
    }

    /// Begins the patches that are due; when the next one will be.
    fn compare(
        &self,
        pods: &Store<Pod>,
        written: &mut HashMap<String, Written>,
        under_way: &mut HashMap<tokio::task::Id, String>,
        patches: &mut JoinSet<Outcome>,
    ) -> Instant {
        let now = Instant::now();
        let mut next = now + UNLISTED;
        let pods = pods.state();
        let by_uid: HashMap<&str, &Pod> =
            pods.iter().filter_map(|pod| Some((pod.metadata.uid.as_deref()?, &**pod))).collect();
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.retain(|uid, (_, since)| by_uid.contains_key(uid.as_str()) || now - *since < UNLISTED);
        written.retain(|uid, _| wanted.contains_key(uid));
        for (uid, (redirection_wanted, _)) in &*wanted {
            let Some(pod) = by_uid.get(uid.as_str()) else {
                continue;
            };
            let (value, says) = (redirection_wanted.value(), redirection(pod));
            if under_way.values().any(|busy| busy == uid) {
                continue;
            }
            if value == says {
                written.remove(uid);
                continue;
            }
            let same = written.get(uid).filter(|last| (last.value, last.before.as_deref()) == (value, says));
            if let Some(last) = same.filter(|last| last.again > now) {
                next = next.min(last.again);
                continue;
            }
            if patches.len() >= PARALLEL {
                // The end of one wakes us.
                break;
            }
            let failures = same.map_or(0, |last| last.failures);
            written.insert(
                uid.clone(),
                Written { value, before: says.map(str::to_owned), again: now, failures },
            );
            let task =
                patches.spawn(patch(self.client.clone(), Arc::clone(&self.metrics), names(uid, pod), value));
            under_way.insert(task.id(), uid.clone());
        }
        next
    }
}

struct Names {
    namespace: String,
    name: String,
    uid: String,
}

fn names(uid: &str, pod: &Pod) -> Names {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    Names { namespace, name: pod.name_any(), uid: uid.to_owned() }
}

async fn patch(client: Client, metrics: Arc<Metrics>, pod: Names, value: Option<&str>) -> Outcome {
    let Names { namespace, name, uid } = pod;
    // With the uid, so that a pod of the same name that came after is not meant: uids are immutable.
    let change = json!({ "metadata": { "uid": uid, "annotations": { REDIRECTION: value } } });
    let pods: Api<ApiPod> = Api::namespaced(client, &namespace);
    let (parameters, change) = (PatchParams::default(), Patch::Merge(change));
    // The answer is the whole pod; nobody reads more than its metadata.
    let patched = pods.patch_subresource("status", &name, &parameters, &change);
    let (outcome, name_of_outcome, error) = match timeout(PATIENCE, patched).await {
        Ok(Ok(_)) => (Outcome::Written, "written", None),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 422) => {
            (Outcome::Gone, "gone", None)
        }
        Ok(Err(error)) => {
            let name = match &error {
                kube::Error::Api(status) if status.code == 403 => "forbidden",
                kube::Error::Api(status) if status.code == 409 => "conflict",
                kube::Error::Api(status) if status.code == 429 => "throttled",
                _ => "failed",
            };
            (Outcome::Failed, name, Some(Chain(&error).to_string()))
        }
        Err(error) => (Outcome::Failed, "failed", Some(error.to_string())),
    };
    metrics.annotation_written(name_of_outcome);
    let value = value.unwrap_or("none");
    let pod = format_args!("{namespace}/{name}");
    match error {
        None => tracing::debug!(%pod, uid, value, outcome = name_of_outcome, "redirection annotated"),
        Some(error) => {
            tracing::warn!(%pod, uid, value, error, "cannot annotate redirection yet; capture is not affected");
        }
    }
    outcome
}
