//! Events on pods that cannot be taken into the mesh. Repeated ones are one Event with a count.

use std::{collections::HashMap, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{
    sync::{Mutex, mpsc},
    time::{Instant, timeout},
};

use crate::{
    enroll::{Failure, Pod, Step},
    error_chain::Chain,
    metrics::Metrics,
};

const CONTROLLER: &str = "culvert.io/agent";
const ACTION: &str = "Enroll";
/// Reports that wait to be published; more are dropped and counted.
const WAITING: usize = 512;
/// The same reason of the same pod is published once in this time.
const REPEAT: Duration = Duration::from_secs(300);
/// For one request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Characters of a note that the API server takes.
const NOTE: usize = 1024;

struct Report {
    pod: Pod,
    reason: &'static str,
    note: String,
}

/// See the module.
pub(super) struct Events {
    recorder: Recorder,
    metrics: Arc<Metrics>,
    send: mpsc::Sender<Report>,
    receive: Mutex<mpsc::Receiver<Report>>,
}

impl Events {
    pub(super) fn new(client: Client, node: String, metrics: Arc<Metrics>) -> Self {
        let reporter = Reporter { controller: CONTROLLER.to_owned(), instance: Some(node) };
        let (send, receive) = mpsc::channel(WAITING);
        Self { recorder: Recorder::new(client, reporter), metrics, send, receive: Mutex::new(receive) }
    }

    pub(super) fn report(&self, pod: &Pod, failure: &Failure) {
        let note = format!("{}. {}", Chain(failure), advice(failure));
        let report = Report { pod: pod.clone(), reason: reason(failure), note };
        if self.send.try_send(report).is_err() {
            self.metrics.event("dropped");
        }
    }

    /// Runs until dropped.
    pub(super) async fn publish(&self) {
        let mut receive = self.receive.lock().await;
        let mut published: HashMap<(String, &'static str), Instant> = HashMap::new();
        while let Some(Report { pod, reason, note }) = receive.recv().await {
            published.retain(|_, at| at.elapsed() < REPEAT);
            let key = (pod.uid.clone(), reason);
            if published.contains_key(&key) {
                continue;
            }
            let event = Event {
                type_: EventType::Warning,
                reason: reason.to_owned(),
                note: Some(note.chars().take(NOTE).collect()),
                action: ACTION.to_owned(),
                secondary: None,
            };
            match timeout(PATIENCE, self.recorder.publish(&event, &reference(&pod))).await {
                Ok(Ok(())) => {
                    self.metrics.event("published");
                    published.insert(key, Instant::now());
                }
                Ok(Err(error)) => self.failed(&pod, &Chain(&error)),
                Err(error) => self.failed(&pod, &error),
            }
        }
    }

    fn failed(&self, pod: &Pod, error: &dyn std::fmt::Display) {
        self.metrics.event("failed");
        tracing::warn!(%pod, uid = pod.uid, %error, "cannot publish an Event");
    }
}

fn reference(pod: &Pod) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.clone()),
        name: Some(pod.name.clone()),
        uid: Some(pod.uid.clone()),
        ..ObjectReference::default()
    }
}

/// Reasons are what people filter by.
fn reason(failure: &Failure) -> &'static str {
    match failure.step() {
        Step::Netns => "MeshNetnsNotFound",
        Step::Ztunnel => "MeshZtunnelNotServing",
        Step::SelfTest => "MeshSelfTestFailed",
        Step::Register | Step::Attach => "MeshCaptureFailed",
        Step::Membership | Step::Turn | Step::Record => "MeshEnrollmentFailed",
    }
}

fn advice(failure: &Failure) -> &'static str {
    match failure.step() {
        Step::Netns => {
            "The pod is not captured and is tried again. If this stays, restart the pod: its netns is then told by the runtime"
        }
        Step::Ztunnel => "The pod is not captured and is tried again. Look at ztunnel on this node",
        Step::SelfTest | Step::Register | Step::Attach => {
            "The pod is not captured and is tried again. The agent's log on this node has the details"
        }
        Step::Membership | Step::Turn | Step::Record => "The pod is not captured and is tried again",
    }
}
