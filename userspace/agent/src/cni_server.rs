//! The agent's end of the plugin's socket. What is asked and answered is documented in [`culvert_cni`].
//!
//! Each request is decoded, handed to enrollment and answered; a connection that ends takes its request
//! with it, so an ADD whose plugin was killed is undone.

mod answers;
mod received;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, io, sync::Arc, time::Duration};

use axum::{Json, Router, extract::State, response::Response, routing::post};
use culvert_cni::{
    answer::{Answer, Outcome, Refusal, Status, StepTime},
    codes::Code,
    event::{self, AddEvent, GcRequest},
    log::Batch,
};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    enroll::{Add, Attachment, Captured, Enrollment, Failure, NetnsId, Redirect, Removal, Step, Ztunnel},
    error_chain::Chain,
    membership::{Decision, Membership, Named, Redirection},
    metrics::Metrics,
    readiness::Readiness,
    telemetry,
    unix_socket::OwnListener,
};
use answers::{answered, decode, refused};
use received::Received;

/// The plugin gives everything but an ADD one second; DEL and CHECK are answered before.
const PROMPT: Duration = Duration::from_millis(800);

/// What requests need.
pub struct Service<R: Redirect, Z, M> {
    /// Does the work.
    pub enrollment: Arc<Enrollment<R, Z>>,
    /// Decides who is in the mesh.
    pub membership: Arc<M>,
    /// For STATUS.
    pub readiness: Arc<Readiness>,
    /// Counts requests.
    pub metrics: Arc<Metrics>,
    /// Time of an ADD.
    pub add_deadline: Duration,
    /// Whether a ztunnel is connected, for STATUS.
    pub has_ztunnel: fn(&Z) -> bool,
}

type Shared<R, Z, M> = State<Arc<Service<R, Z, M>>>;

/// Serves until `shutdown`, then finishes the requests under way.
pub async fn serve<R: Redirect, Z: Ztunnel, M: Membership>(
    listener: OwnListener,
    service: Arc<Service<R, Z, M>>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let router = Router::new()
        .route("/cmdadd", post(add))
        .route("/cmddel", post(del))
        .route("/check", post(check))
        .route("/status", post(status))
        .route("/gc", post(gc))
        .route("/log", post(log))
        .with_state(service);
    axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned()).await
}

async fn add<R: Redirect, Z: Ztunnel, M: Membership>(
    State(service): Shared<R, Z, M>,
    Received(body): Received,
) -> Response {
    let deadline = Instant::now() + service.add_deadline;
    let answer = match AddEvent::decode(&body) {
        Ok(event) => service.add(event, deadline).await,
        Err(error) => Err(Refusal::new(Code::Undecodable, "the ADD event cannot be read", error.to_string())),
    };
    service.answer("add", answer)
}

async fn del<R: Redirect, Z: Ztunnel, M: Membership>(
    State(service): Shared<R, Z, M>,
    Received(body): Received,
) -> Response {
    let answer = match decode::<event::Attachment>(&body) {
        Ok(named) => {
            // What takes longer goes on; the runtime need not wait for ztunnel.
            let removal = timeout(PROMPT, service.enrollment.del(attachment(named))).await;
            Ok(Answer::new(match removal.unwrap_or(Removal::Removed) {
                Removal::Removed => Outcome::Removed,
                Removal::Unknown => Outcome::Unknown,
            }))
        }
        Err(refusal) => Err(refusal),
    };
    service.answer("del", answer)
}

async fn check<R: Redirect, Z: Ztunnel, M: Membership>(
    State(service): Shared<R, Z, M>,
    Received(body): Received,
) -> Response {
    let answer = match decode::<event::Attachment>(&body) {
        Ok(named) => match timeout(PROMPT, service.enrollment.check(&attachment(named))).await {
            Ok(Captured::Unknown) => Ok(Answer::new(Outcome::Unknown)),
            Ok(Captured::No(error)) => {
                Err(Refusal::new(Code::Attach, "the pod is enrolled and is not captured", error.to_string()))
            }
            // Without a positive word a CHECK passes.
            Ok(Captured::Yes) | Err(tokio::time::error::Elapsed { .. }) => Ok(Answer::new(Outcome::Enrolled)),
        },
        Err(refusal) => Err(refusal),
    };
    service.answer("check", answer)
}

async fn status<R: Redirect, Z: Ztunnel, M: Membership>(State(service): Shared<R, Z, M>) -> Json<Status> {
    let mut reasons = service.readiness.reasons();
    if !(service.has_ztunnel)(service.enrollment.ztunnel()) {
        reasons.push("ztunnel: none is connected".to_owned());
    }
    service.metrics.request("status", 0);
    Json(Status { ready: reasons.is_empty(), reasons })
}

async fn gc<R: Redirect, Z: Ztunnel, M: Membership>(
    State(service): Shared<R, Z, M>,
    Received(body): Received,
) -> Response {
    let answer = match decode::<GcRequest>(&body) {
        Ok(request) => {
            let valid: BTreeSet<_> = request
                .valid_attachments
                .into_iter()
                .map(|attachment| (attachment.container_id, attachment.if_name))
                .collect();
            drop(timeout(PROMPT, service.enrollment.retain(&request.network_name, valid)).await);
            Ok(Answer::new(Outcome::Removed))
        }
        Err(refusal) => Err(refusal),
    };
    service.answer("gc", answer)
}

/// Always 200: nothing depends on it.
async fn log(Received(body): Received) {
    match serde_json::from_slice::<Batch>(&body) {
        Ok(batch) => batch.lines().for_each(|line| telemetry::plugin_line(&line)),
        Err(error) => tracing::warn!(%error, "log lines of the plugin cannot be read"),
    }
}

impl<R: Redirect, Z: Ztunnel, M: Membership> Service<R, Z, M> {
    async fn add(&self, event: AddEvent, deadline: Instant) -> Result<Answer, Refusal> {
        let start = Instant::now();
        let outside = Ok(Answer::new(Outcome::NotInMesh));
        if event.pod_namespace.is_empty() || event.pod_name.is_empty() {
            // Not of Kubernetes: no selector can match it.
            return outside;
        }
        let named = Named {
            namespace: event.pod_namespace.clone(),
            name: event.pod_name.clone(),
            uid: event.pod_uid.clone().filter(|uid| !uid.is_empty()),
        };
        let (pod, bypass_inbound) = match self.membership.decide(&named, deadline).await {
            Ok(Decision::Outside) => return outside,
            Ok(Decision::Member { pod, bypass_inbound }) => (pod, bypass_inbound),
            Err(undecided) => {
                let failure = Failure::from(undecided);
                let (namespace, name, uid) = (named.namespace, named.name, named.uid.unwrap_or_default());
                tracing::error!(pod = format!("{namespace}/{name}"), uid, error = %Chain(&failure), "pod not enrolled");
                return Err(failure.refusal());
            }
        };
        let decided = StepTime::new(Step::Membership.name(), start.elapsed());
        let add = Add {
            pod: pod.clone(),
            netns: event.netns.into(),
            netns_id: event.netns_dev.zip(event.netns_ino).map(|(dev, ino)| NetnsId { dev, ino }),
            addresses: event.ips.iter().filter_map(|ip| ip.address.ip).map(|ip| ip.to_canonical()).collect(),
            bypass_inbound,
            attachment: Attachment {
                network: event.network_name,
                container_id: event.container_id,
                if_name: event.if_name,
            },
        };
        match self.enrollment.add(add, deadline).await {
            Ok(times) => {
                self.membership.announce(&pod, Redirection::Enabled);
                let times = times.into_iter().map(|(step, time)| StepTime::new(step.name(), time));
                Ok(Answer { outcome: Outcome::Enrolled, steps: [decided].into_iter().chain(times).collect() })
            }
            Err(failure) => Err(failure.refusal()),
        }
    }

    fn answer(&self, verb: &'static str, answer: Result<Answer, Refusal>) -> Response {
        self.metrics.request(verb, answer.as_ref().err().map_or(0, |refusal| refusal.code.number()));
        match answer {
            Ok(answer) => answered(&answer),
            Err(refusal) => refused(refusal),
        }
    }
}

fn attachment(named: event::Attachment) -> Attachment {
    Attachment {
        network: named.network_name,
        container_id: Some(named.container_id).filter(|container| !container.is_empty()),
        if_name: named.if_name,
    }
}
