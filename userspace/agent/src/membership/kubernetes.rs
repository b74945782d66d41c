//! Membership by the API server: the pods of this node, and the labels of namespaces.
//!
//! Two watches fill two stores. Decisions are made over the stores, so they work while the API server does
//! not. Nothing here is a queue of events: whoever acts compares the whole state with its own, whenever
//! [`Membership::changes`] says that it may have changed. Lists are quorum reads, watches have bookmarks,
//! gaps and 410 lead to a new list ([`kube::runtime::watcher`]).

mod annotation;
mod event;
mod health;
mod pod;
#[cfg(test)]
pub(crate) mod tests;

use std::{
    collections::BTreeSet,
    hash::Hash,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Config, Resource, ResourceExt as _,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt as _,
        reflector::{ObjectRef, Store, store::Writer},
        utils::ResetTimerBackoff,
        watcher::{self, ExponentialBackoff, watcher},
    },
};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, timeout},
};

use super::{
    Decision, Described, Membership, Named, Redirection, Source, Undecided, predicate::Rule,
    wait_for_decision,
};
use crate::{
    enroll::{self, Failure},
    metrics::Metrics,
    readiness::Readiness,
    scope_file::ScopeFile,
};
use annotation::Annotations;
use event::Events;
use health::{Health, Observe, Watch};
use pod::Pod;

type NamespaceMeta = PartialObjectMeta<Namespace>;

/// For a connection to the API server.
const CONNECT: Duration = Duration::from_secs(5);
/// Life of one watch, in seconds. A connection that died silently is noticed five seconds later.
const WATCH: u32 = 120;
/// Between tries of a watch that fails, doubled up to [`SLOWEST`].
const FASTEST: Duration = Duration::from_millis(500);
const SLOWEST: Duration = Duration::from_secs(10);
/// A watch that ran for so long begins with [`FASTEST`] again.
const SETTLED: Duration = Duration::from_secs(30);
/// Between looks whether the watches still fail.
const REFRESH: Duration = Duration::from_secs(1);
/// Changes come in bursts; the scope file is written once after them.
const QUIET: Duration = Duration::from_millis(50);
/// After a scope file could not be written.
const AGAIN: Duration = Duration::from_secs(2);

/// Why there is no way to the API server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No pod of Kubernetes.
    #[error("this is no pod of Kubernetes; give --kubeconfig, or --standalone to work without Kubernetes")]
    NotInCluster(#[from] kube::config::InClusterError),
    /// The file is not good.
    #[error("cannot use the kubeconfig {path}")]
    Kubeconfig {
        /// Which.
        path: PathBuf,
        /// Why.
        source: kube::config::KubeconfigError,
    },
    /// Certificates or credentials are not good.
    #[error("cannot make a client of the API server")]
    Client(#[from] kube::Error),
}

/// See the module.
pub struct Kubernetes {
    client: Client,
    node: String,
    rule: Rule,
    pods: Store<Pod>,
    namespaces: Store<NamespaceMeta>,
    /// Taken by whoever follows; one at a time.
    writers: tokio::sync::Mutex<(Writer<Pod>, Writer<NamespaceMeta>)>,
    changes: watch::Sender<u64>,
    health: Arc<Health>,
    annotations: Annotations,
    events: Events,
}

impl Kubernetes {
    /// Talks to nobody yet.
    pub async fn connect(
        kubeconfig: Option<&Path>,
        node: String,
        rule: Rule,
        metrics: Arc<Metrics>,
    ) -> Result<Self, Error> {
        let mut config = match kubeconfig {
            Some(path) => {
                let failed = |source| Error::Kubeconfig { path: path.to_owned(), source };
                let file = Kubeconfig::read_from(path).map_err(failed)?;
                Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(failed)?
            }
            None => Config::incluster()?,
        };
        config.connect_timeout = Some(CONNECT);
        // Tries again without a word.
        config.default_retry = false;
        let health = Arc::new(Health::new(Arc::clone(&metrics)));
        let client = ClientBuilder::try_from(config)?.with_layer(&Observe(Arc::clone(&health))).build();
        Ok(Self::new(client, node, rule, health, metrics))
    }

    fn new(client: Client, node: String, rule: Rule, health: Arc<Health>, metrics: Arc<Metrics>) -> Self {
        let (pods, namespaces) = (Writer::new(pod::resource()), Writer::<NamespaceMeta>::default());
        Self {
            pods: pods.as_reader(),
            namespaces: namespaces.as_reader(),
            writers: tokio::sync::Mutex::new((pods, namespaces)),
            changes: watch::Sender::new(0),
            annotations: Annotations::new(client.clone(), Arc::clone(&metrics)),
            events: Events::new(client.clone(), node.clone(), metrics),
            client,
            node,
            rule,
            health,
        }
    }

    fn decide_now(&self, named: &Named) -> Result<Decision, Undecided> {
        let key = ObjectRef::new_with(&named.name, pod::resource()).within(&named.namespace);
        let (pod, namespace) = (self.pods.get(&key), self.namespace(&named.namespace));
        let labels = namespace.as_ref().map(|namespace| namespace.labels());
        pod::decide(named, pod.as_deref(), labels, &self.rule)
    }

    fn namespace(&self, name: &str) -> Option<Arc<NamespaceMeta>> {
        self.namespaces.get(&ObjectRef::new(name))
    }

    fn is_member(&self, pod: &Pod) -> Option<bool> {
        let namespace = self.namespace(pod.metadata.namespace.as_deref()?)?;
        Some(pod::is_member(pod, &self.rule, namespace.labels()))
    }

    /// Follows one resource. Ends never.
    async fn fill<K>(
        &self,
        watch: Watch,
        writer: &mut Writer<K>,
        events: impl Stream<Item = watcher::Result<watcher::Event<K>>>,
        trim: fn(&mut K),
        readiness: &Readiness,
    ) where
        K: Resource + Clone + 'static,
        K::DynamicType: Eq + Hash + Clone,
    {
        let backoff = backon::ExponentialBuilder::new()
            .with_min_delay(FASTEST)
            .with_max_delay(SLOWEST)
            .with_jitter()
            .without_max_times();
        let backoff = ResetTimerBackoff::new(ExponentialBackoff::from(backoff), SETTLED);
        let mut events = pin!(events.backoff(backoff));
        let mut listed = 0_usize;
        while let Some(event) = events.next().await {
            let event = match event {
                Ok(event) => event.modify(trim),
                Err(error) => {
                    self.health.failed(watch, &error, readiness);
                    continue;
                }
            };
            writer.apply_watcher_event(&event);
            match event {
                watcher::Event::Init => listed = 0,
                watcher::Event::InitApply(_) => listed += 1,
                watcher::Event::InitDone => {
                    tracing::info!(?watch, objects = listed, "list of the API server read");
                    self.health.listed(watch, readiness);
                    self.changed();
                }
                watcher::Event::Apply(_) | watcher::Event::Delete(_) => {
                    self.health.running(watch);
                    self.changed();
                }
            }
        }
    }

    fn changed(&self) {
        self.changes.send_modify(|change| *change += 1);
    }

    /// Only lists that are complete say anything: an agent that just began must not make the scope smaller.
    async fn keep_scope(&self, scope: &ScopeFile, readiness: &Readiness) {
        let mut changes = self.changes.subscribe();
        loop {
            if self.health.was_listed(Watch::Namespaces) && self.health.was_listed(Watch::Pods) {
                let namespaces = self.scope();
                if self.namespaces.is_empty() {
                    tracing::error!(
                        "the API server lists no namespace at all; the scope file stays as it is"
                    );
                } else if !scope.update(namespaces, readiness).await {
                    drop(timeout(AGAIN, changes.changed()).await);
                    continue;
                }
            }
            if changes.changed().await.is_err() {
                return;
            }
            tokio::time::sleep(QUIET).await;
        }
    }

    /// Namespaces in which a pod may be one of the mesh: a selector matches, or a single pod does.
    fn scope(&self) -> BTreeSet<String> {
        let namespaces = self.namespaces.state();
        let named = namespaces
            .iter()
            .filter(|own| self.rule.names_namespace(&own.name_any(), own.labels()))
            .map(|own| own.name_any());
        let pods = self.pods.state();
        let members = pods.iter().filter(|pod| self.is_member(pod) == Some(true));
        named.chain(members.filter_map(|pod| pod.metadata.namespace.clone())).collect()
    }

    async fn follow_both(&self, scope: &ScopeFile, readiness: &Readiness) {
        let mut writers = self.writers.lock().await;
        let (pods, namespaces) = &mut *writers;
        let config = watcher::Config::default().timeout(WATCH);
        let of_node = config.clone().fields(&format!("spec.nodeName={}", self.node));
        let all_pods = watcher(Api::all_with(self.client.clone(), &pod::resource()), of_node);
        let all_namespaces = watcher(Api::<NamespaceMeta>::all(self.client.clone()), config);
        tokio::join!(
            self.fill(Watch::Pods, pods, all_pods, pod::trim, readiness),
            self.fill(Watch::Namespaces, namespaces, all_namespaces, trim_namespace, readiness),
            self.annotations.keep(&self.pods, self.changes.subscribe()),
            self.events.publish(),
            self.keep_scope(scope, readiness),
            self.refresh(readiness),
        );
    }

    async fn refresh(&self, readiness: &Readiness) {
        let mut ticks = interval(REFRESH);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.health.refresh(readiness);
        }
    }
}

impl Membership for Kubernetes {
    async fn decide(&self, pod: &Named, deadline: Instant) -> Result<Decision, Undecided> {
        wait_for_decision(self.changes.subscribe(), deadline, || self.decide_now(pod)).await
    }

    fn described(&self) -> Vec<Described> {
        self.pods.state().iter().map(|pod| pod::describe(pod, self.is_member(pod))).collect()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn announce(&self, pod: &enroll::Pod, redirection: Redirection) {
        self.annotations.announce(pod, redirection);
    }

    fn report(&self, pod: &enroll::Pod, failure: &Failure) {
        self.events.report(pod, failure);
    }
}

impl Source for Kubernetes {
    fn follow(
        self: Arc<Self>,
        scope: ScopeFile,
        readiness: Arc<Readiness>,
    ) -> impl Future<Output = ()> + Send {
        // From the call on, not from the first poll: nobody may find the agent ready in between.
        self.health.begin(&readiness);
        async move { self.follow_both(&scope, &readiness).await }
    }
}

fn trim_namespace(namespace: &mut NamespaceMeta) {
    namespace.types = None;
    namespace.metadata.managed_fields = None;
    namespace.metadata.annotations = None;
    namespace.metadata.owner_references = None;
    namespace.metadata.finalizers = None;
}
