//! The one table of metrics.
//!
//! | metric | labels | Istio's name |
//! |---|---|---|
//! | `culvert_ready` | | `istio_cni_install_ready` |
//! | `culvert_cni_requests_total` | `verb`, `code` (0: success) | `istio_cni_plugin_requests_total` |
//! | `culvert_add_step_seconds` | `step` | none |
//! | `culvert_add_failures_total` | `step` | none |
//! | `culvert_sandboxes` | `state` | none |
//! | `culvert_ztunnels_connected` | | `ztunnel_connected` |
//! | `culvert_zds_events_total` | `event` | none |
//! | `culvert_pods` | `state`, `reason` | none |
//! | `culvert_reconciles_total` | `operation`, `outcome` | `nodeagent_reconcile_events_total` |
//! | `culvert_annotation_writes_total` | `outcome` | none |
//! | `culvert_events_total` | `outcome` | none |
//! | `culvert_api_requests_total` | `verb`, `resource`, `code` (0: no answer) | none |
//! | `culvert_watch_errors_total` | `resource` | none |
//! | `culvert_watch_failing_seconds` | `resource` | none |
//!
//! Label values come from closed sets, never from a pod's name or an error's text. The page is fixed by a
//! golden test.

use std::{collections::BTreeMap, fmt, time::Duration};

use culvert_zds::Event;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::{Family, MetricConstructor},
        gauge::Gauge,
        histogram::Histogram,
    },
    registry::Registry,
};

use crate::enroll::{Failure, Step};

/// Upper bounds of the histogram, in seconds: from a step in the kernel to a wait for ztunnel.
const SECONDS: [f64; 10] = [0.000_5, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0, 5.0, 20.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    verb: &'static str,
    code: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStep {
    step: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfState {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfEvent {
    event: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfPods {
    state: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfOperation {
    operation: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfOutcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ApiRequest {
    verb: &'static str,
    resource: &'static str,
    code: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfResource {
    resource: &'static str,
}

#[derive(Clone)]
struct StepHistogram;

impl MetricConstructor<Histogram> for StepHistogram {
    fn new_metric(&self) -> Histogram {
        Histogram::new(SECONDS)
    }
}

/// See the module. Shared by the parts that count.
pub struct Metrics {
    registry: Registry,
    ready: Gauge,
    requests: Family<Request, Counter>,
    step_seconds: Family<OfStep, Histogram, StepHistogram>,
    add_failures: Family<OfStep, Counter>,
    sandboxes: Family<OfState, Gauge>,
    ztunnels: Gauge,
    zds_events: Family<OfEvent, Counter>,
    pods: Family<OfPods, Gauge>,
    reconciles: Family<OfOperation, Counter>,
    annotation_writes: Family<OfOutcome, Counter>,
    events: Family<OfOutcome, Counter>,
    api_requests: Family<ApiRequest, Counter>,
    watch_errors: Family<OfResource, Counter>,
    watch_failing: Family<OfResource, Gauge>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("culvert");
        let ready = Gauge::default();
        registry.register("ready", "Whether readyz answers 200", ready.clone());
        let requests = Family::default();
        registry.register(
            "cni_requests",
            "Requests of the CNI plugin by verb and CNI error code",
            requests.clone(),
        );
        let step_seconds = Family::new_with_constructor(StepHistogram);
        registry.register("add_step_seconds", "Time that the steps of an ADD took", step_seconds.clone());
        let add_failures = Family::default();
        registry.register("add_failures", "ADDs that failed, by step", add_failures.clone());
        let sandboxes = Family::default();
        registry.register("sandboxes", "Sandboxes of pods by state", sandboxes.clone());
        let ztunnels = Gauge::default();
        registry.register(
            "ztunnels_connected",
            "ztunnels that are connected and introduced",
            ztunnels.clone(),
        );
        let zds_events = Family::default();
        registry.register("zds_events", "What happened on connections to ztunnel", zds_events.clone());
        let pods = Family::default();
        registry.register("pods", "Pods that are described one by one, by state and reason", pods.clone());
        let reconciles = Family::default();
        registry.register(
            "reconciles",
            "Operations on running pods, by outcome or failed step",
            reconciles.clone(),
        );
        let annotation_writes = Family::default();
        registry.register(
            "annotation_writes",
            "Patches of the redirection annotation",
            annotation_writes.clone(),
        );
        let events = Family::default();
        registry.register("events", "Events on pods", events.clone());
        let api_requests = Family::default();
        registry.register(
            "api_requests",
            "Requests to the API server by HTTP status; 0: no answer",
            api_requests.clone(),
        );
        let watch_errors = Family::default();
        registry.register("watch_errors", "Failed tries to list or watch", watch_errors.clone());
        let watch_failing = Family::default();
        registry.register(
            "watch_failing_seconds",
            "For how long there has been no watch; 0: it runs",
            watch_failing.clone(),
        );
        Self {
            registry,
            ready,
            requests,
            step_seconds,
            add_failures,
            sandboxes,
            ztunnels,
            zds_events,
            pods,
            reconciles,
            annotation_writes,
            events,
            api_requests,
            watch_errors,
            watch_failing,
        }
    }
}

impl Metrics {
    /// A request of the plugin was answered; 0 is success.
    pub fn request(&self, verb: &'static str, code: u32) {
        self.requests.get_or_create(&Request { verb, code }).inc();
    }

    /// An ADD of a pod of the mesh ended.
    pub fn add_finished(&self, times: &[(Step, Duration)], failure: Option<&Failure>) {
        for (step, time) in times {
            self.step_seconds.get_or_create(&OfStep { step: step.name() }).observe(time.as_secs_f64());
        }
        if let Some(failure) = failure {
            self.add_failures.get_or_create(&OfStep { step: failure.step().name() }).inc();
        }
    }

    /// How many sandboxes there are.
    pub fn set_sandboxes(&self, enrolled: usize, leaving: usize) {
        for (state, count) in [("enrolled", enrolled), ("leaving", leaving)] {
            self.sandboxes.get_or_create(&OfState { state }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// How the described pods stand: counts by state and reason, all of them.
    pub fn set_pods(&self, counts: &BTreeMap<(&'static str, &'static str), i64>) {
        self.pods.clear();
        for ((state, reason), count) in counts {
            self.pods.get_or_create(&OfPods { state, reason }).set(*count);
        }
    }

    /// An operation on a running pod ended.
    pub fn reconciled(&self, operation: &'static str, outcome: &'static str) {
        self.reconciles.get_or_create(&OfOperation { operation, outcome }).inc();
    }

    /// A patch of an annotation ended.
    pub fn annotation_written(&self, outcome: &'static str) {
        self.annotation_writes.get_or_create(&OfOutcome { outcome }).inc();
    }

    /// An Event was published, or was not.
    pub fn event(&self, outcome: &'static str) {
        self.events.get_or_create(&OfOutcome { outcome }).inc();
    }

    /// A request to the API server was answered; 0 is no answer.
    pub fn api_request(&self, verb: &'static str, resource: &'static str, code: u32) {
        self.api_requests.get_or_create(&ApiRequest { verb, resource, code }).inc();
    }

    /// A list or a watch failed.
    pub fn watch_error(&self, resource: &'static str) {
        self.watch_errors.get_or_create(&OfResource { resource }).inc();
    }

    /// For how long there has been no watch, `None` if it runs.
    pub fn watch_failing(&self, resource: &'static str, time: Option<Duration>) {
        let seconds = time.map_or(0, |time| i64::try_from(time.as_secs()).unwrap_or(i64::MAX).max(1));
        self.watch_failing.get_or_create(&OfResource { resource }).set(seconds);
    }

    /// Something happened on a connection to a ztunnel.
    pub fn zds(&self, event: &Event<'_>) {
        let event = match event {
            Event::AcceptFailed { .. } => "accept-failed",
            Event::Rejected { .. } => "rejected",
            Event::Connected { .. } => "connected",
            Event::SnapshotSent { .. } => "snapshot-sent",
            Event::TookOver { .. } => "took-over",
            Event::Refused { .. } => "refused",
            Event::Recovered { .. } => "recovered",
            Event::Disconnected { .. } => "disconnected",
            _ => "other",
        };
        self.zds_events.get_or_create(&OfEvent { event }).inc();
    }

    /// The page, with what is only looked at now.
    pub fn page(&self, ready: bool, ztunnels: usize) -> Result<String, fmt::Error> {
        self.ready.set(i64::from(ready));
        self.ztunnels.set(i64::try_from(ztunnels).unwrap_or(i64::MAX));
        let mut page = String::new();
        encode(&mut page, &self.registry)?;
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, types and labels are an interface: dashboards and alerts are built on them.
    #[test]
    fn the_page_is_the_golden_one() {
        let metrics = Metrics::default();
        metrics.request("add", 0);
        metrics.request("add", 102);
        metrics.add_finished(&[(Step::Ztunnel, Duration::from_millis(3))], None);
        metrics.add_finished(&[], Some(&Failure::Deadline { step: Step::Ztunnel }));
        metrics.set_sandboxes(2, 0);
        let error = std::io::ErrorKind::Other.into();
        metrics.zds(&Event::AcceptFailed { error: &error, pause: Duration::ZERO });
        metrics.set_pods(&[(("enrolled", ""), 2), (("failing", "ztunnel"), 1)].into());
        metrics.reconciled("enroll", "ztunnel");
        metrics.annotation_written("written");
        metrics.event("published");
        metrics.api_request("watch", "pods", 200);
        metrics.watch_error("pods");
        metrics.watch_failing("pods", Some(Duration::from_secs(3)));
        let page = metrics.page(true, 1).unwrap();
        // The order of a family's rows is not fixed.
        let sorted = |page: &str| {
            let mut lines: Vec<String> = page.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&page), sorted(include_str!("metrics/page.txt")), "the page is now:\n{page}");
    }
}
