//! Whether the watches run, told three ways: log, metrics, readiness. A watch that fails is tried again by
//! [`kube::runtime::watcher`]; what is known meanwhile stands.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use http::{Method, Request, Response};
use kube::client::Body;
use tokio::time::Instant;
use tower::{Layer, Service};

use crate::{error_chain::Chain, metrics::Metrics, readiness::Readiness};

/// Between two log lines about one watch that goes on failing.
const LOG: Duration = Duration::from_secs(60);

/// A watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    Pods,
    Namespaces,
}

impl Watch {
    /// Name in metrics, which is that of the resource.
    const fn resource(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Namespaces => "namespaces",
        }
    }

    const fn part(self) -> &'static str {
        match self {
            Self::Pods => "watch of pods",
            Self::Namespaces => "watch of namespaces",
        }
    }
}

#[derive(Debug, Default)]
struct Standing {
    was_listed: bool,
    failing: Option<Failing>,
}

#[derive(Debug)]
struct Failing {
    since: Instant,
    logged: Instant,
}

/// Of both watches.
#[derive(Debug)]
pub(super) struct Health {
    metrics: Arc<Metrics>,
    pods: Mutex<Standing>,
    namespaces: Mutex<Standing>,
}

impl Health {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, pods: Mutex::default(), namespaces: Mutex::default() }
    }

    /// Following begins (again): not ready before both lists are there.
    pub(super) fn begin(&self, readiness: &Readiness) {
        for watch in [Watch::Pods, Watch::Namespaces] {
            *self.standing(watch) = Standing::default();
            readiness.report(watch.part(), "not listed yet");
        }
    }

    /// Whether there was a complete list.
    pub(super) fn was_listed(&self, watch: Watch) -> bool {
        self.standing(watch).was_listed
    }

    pub(super) fn listed(&self, watch: Watch, readiness: &Readiness) {
        self.standing(watch).was_listed = true;
        self.running(watch);
        readiness.clear(watch.part());
    }

    /// An answer came.
    pub(super) fn running(&self, watch: Watch) {
        if let Some(failing) = self.standing(watch).failing.take() {
            let seconds = failing.since.elapsed().as_secs();
            tracing::info!(resource = watch.resource(), seconds, "in step with the API server again");
            self.metrics.watch_failing(watch.resource(), None);
        }
    }

    pub(super) fn failed(&self, watch: Watch, error: &kube::runtime::watcher::Error, readiness: &Readiness) {
        let resource = watch.resource();
        self.metrics.watch_error(resource);
        let error = Chain(error).to_string();
        let now = Instant::now();
        let mut standing = self.standing(watch);
        let known = if standing.was_listed { "what is known stands" } else { "nothing is known yet" };
        let failing = standing.failing.get_or_insert_with(|| {
            tracing::warn!(resource, error, known, "out of step with the API server; trying again");
            Failing { since: now, logged: now }
        });
        let age = now - failing.since;
        if now - failing.logged >= LOG {
            failing.logged = now;
            tracing::warn!(
                resource,
                error,
                known,
                seconds = age.as_secs(),
                "still out of step with the API server"
            );
        }
        self.metrics.watch_failing(resource, Some(age));
        readiness.report(watch.part(), format!("out of step with the API server ({known}): {error}"));
    }

    /// Clears the readiness of watches that run again.
    pub(super) fn refresh(&self, readiness: &Readiness) {
        for watch in [Watch::Pods, Watch::Namespaces] {
            let standing = self.standing(watch);
            match &standing.failing {
                None if standing.was_listed => readiness.clear(watch.part()),
                None => {}
                Some(failing) => {
                    self.metrics.watch_failing(watch.resource(), Some(failing.since.elapsed()));
                }
            }
        }
    }

    fn standing(&self, watch: Watch) -> MutexGuard<'_, Standing> {
        let standing = match watch {
            Watch::Pods => &self.pods,
            Watch::Namespaces => &self.namespaces,
        };
        standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts requests to the API server, and sees watches begin: the watcher itself says nothing when a broken
/// one goes on without news.
#[derive(Clone, Debug)]
pub(super) struct Observe(pub(super) Arc<Health>);

impl<S> Layer<S> for Observe {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed { inner, health: Arc::clone(&self.0) }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Observed<S> {
    inner: S,
    health: Arc<Health>,
}

impl<S, B> Service<Request<Body>> for Observed<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (verb, resource) = kind(&request);
        let health = Arc::clone(&self.health);
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().map_or(0, |answer| answer.status().as_u16());
            health.metrics.api_request(verb, resource, code.into());
            if verb == "watch" && code == 200 {
                match resource {
                    "pods" => health.running(Watch::Pods),
                    "namespaces" => health.running(Watch::Namespaces),
                    _ => {}
                }
            }
            answer
        })
    }
}

/// The verb and the resource of a request, from closed sets.
fn kind<B>(request: &Request<B>) -> (&'static str, &'static str) {
    let uri = request.uri();
    let is_watch = uri.query().is_some_and(|query| query.contains("watch=true"));
    let verb = match *request.method() {
        Method::GET if is_watch => "watch",
        Method::GET => "list",
        Method::POST => "create",
        Method::PATCH => "patch",
        _ => "other",
    };
    let path = uri.path();
    let resource = if path.ends_with("/status") {
        "pods/status"
    } else if path.contains("/events") {
        "events"
    } else if path.ends_with("/pods") {
        "pods"
    } else if path.ends_with("/namespaces") {
        "namespaces"
    } else {
        "other"
    };
    (verb, resource)
}
