//! What every kind of membership does: the same scenarios on a file and on an API server.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::{
    Decision, Described, Membership, Named, Source as _, Undecided,
    kubernetes::{
        Kubernetes,
        tests::{
            Following,
            api::{self, Api},
        },
    },
    predicate::Rule,
    selector,
    standalone::Standalone,
};
use crate::{enroll::Pod, scope_file::ScopeFile};

const LONG: Duration = Duration::from_secs(60);
const MODE: &str = "istio.io/dataplane-mode";

/// A pod to describe.
#[derive(Clone, Default)]
struct Entry {
    namespace: &'static str,
    name: &'static str,
    uid: &'static str,
    mode: Option<&'static str>,
    annotation: Option<(&'static str, &'static str)>,
    host_network: bool,
}

/// Namespaces, whether they are ambient, and pods.
#[derive(Clone, Default)]
struct Cluster {
    namespaces: Vec<(&'static str, bool)>,
    pods: Vec<Entry>,
}

trait World {
    type Membership: Membership;
    async fn new(cluster: &Cluster) -> Self;
    fn change(&self, cluster: &Cluster);
    fn membership(&self) -> &Self::Membership;
}

struct OnFile {
    membership: Arc<Standalone>,
    path: PathBuf,
    task: tokio::task::JoinHandle<()>,
    _directory: tempfile::TempDir,
}

impl Drop for OnFile {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn write(path: &PathBuf, cluster: &Cluster) {
    let labels = |is_ambient: bool| if is_ambient { json!({ MODE: "ambient" }) } else { json!({}) };
    let namespaces: serde_json::Map<String, Value> = cluster
        .namespaces
        .iter()
        .map(|(name, is_ambient)| ((*name).to_owned(), json!({ "labels": labels(*is_ambient) })))
        .collect();
    let pods = cluster.pods.iter().map(|pod| {
        json!({
            "namespace": pod.namespace, "name": pod.name, "uid": pod.uid, "serviceAccount": "web",
            "labels": pod.mode.map_or(json!({}), |mode| json!({ MODE: mode })),
            "annotations": pod.annotation.map_or(json!({}), |(name, value)| json!({ name: value })),
            "hostNetwork": pod.host_network, "addresses": ["10.0.0.7", "fd00::7"],
        })
    });
    // JSON is YAML.
    let text = json!({ "namespaces": namespaces, "pods": pods.collect::<Vec<_>>() }).to_string();
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

impl World for OnFile {
    type Membership = Standalone;

    async fn new(cluster: &Cluster) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mesh.yaml");
        write(&path, cluster);
        let rule = Rule {
            selectors: selector::parse(selector::DEFAULT).unwrap(),
            excluded: ["excluded".to_owned()].into(),
        };
        let membership = Arc::new(Standalone::read(path.clone(), rule).unwrap());
        let scope = ScopeFile::new(directory.path().join("lib/scope.json"));
        let task = tokio::spawn(Arc::clone(&membership).follow(scope, Arc::default()));
        Self { membership, path, task, _directory: directory }
    }

    fn change(&self, cluster: &Cluster) {
        write(&self.path, cluster);
    }

    fn membership(&self) -> &Standalone {
        &self.membership
    }
}

impl World for Following {
    type Membership = Kubernetes;

    async fn new(cluster: &Cluster) -> Self {
        let api = Api::new();
        apply(&api, cluster);
        let following = Self::begin(api);
        following.listed().await;
        following.api.until("watches", |state| state.queries.len() == 4).await;
        following
    }

    fn change(&self, cluster: &Cluster) {
        apply(&self.api, cluster);
    }

    fn membership(&self) -> &Kubernetes {
        &self.membership
    }
}

fn apply(api: &Api, cluster: &Cluster) {
    for (name, is_ambient) in &cluster.namespaces {
        let labels = if *is_ambient { json!({ MODE: "ambient" }) } else { json!({}) };
        api.apply(api::namespace(name, labels));
    }
    for entry in &cluster.pods {
        let mut pod = api::pod(entry.namespace, entry.name, entry.uid);
        if let Some(mode) = entry.mode {
            pod["metadata"]["labels"] = json!({ MODE: mode });
        }
        if let Some((name, value)) = entry.annotation {
            pod["metadata"]["annotations"] = json!({ name: value });
        }
        pod["spec"]["hostNetwork"] = entry.host_network.into();
        api.apply(pod);
    }
}

fn named(namespace: &str, name: &str, uid: &str) -> Named {
    Named { namespace: namespace.into(), name: name.into(), uid: Some(uid.into()) }
}

fn one(entry: Entry) -> Cluster {
    Cluster { namespaces: vec![("shop", true), ("plain", false), ("excluded", true)], pods: vec![entry] }
}

const WEB: Entry =
    Entry { namespace: "shop", name: "web", uid: "u1", mode: None, annotation: None, host_network: false };

async fn members_are_those_that_istio_takes<W: World>() {
    for (entry, member) in [
        (WEB, true),
        (Entry { mode: Some("none"), ..WEB }, false),
        (Entry { host_network: true, ..WEB }, false),
        (Entry { annotation: Some(("sidecar.istio.io/status", "")), ..WEB }, false),
        (Entry { namespace: "plain", ..WEB }, false),
        (Entry { namespace: "plain", mode: Some("ambient"), ..WEB }, true),
        (Entry { namespace: "excluded", mode: Some("ambient"), ..WEB }, false),
    ] {
        let world = W::new(&one(entry.clone())).await;
        let pod = named(entry.namespace, entry.name, entry.uid);
        let decision = world.membership().decide(&pod, Instant::now()).await.unwrap();
        assert_eq!(matches!(decision, Decision::Member { .. }), member, "{decision:?}");
        assert_eq!(world.membership().described()[0].member, Some(member));
    }
}

async fn a_member_is_described_as_it_is_decided<W: World>() {
    let bypass = Some(("ambient.istio.io/bypass-inbound-capture", "true"));
    let world = W::new(&one(Entry { annotation: bypass, ..WEB })).await;
    let pod =
        Pod { uid: "u1".into(), namespace: "shop".into(), name: "web".into(), service_account: "web".into() };
    let decision = world.membership().decide(&named("shop", "web", "u1"), Instant::now()).await.unwrap();
    assert_eq!(decision, Decision::Member { pod: pod.clone(), bypass_inbound: true });
    let described = Described {
        pod,
        hash: None,
        member: Some(true),
        bypass_inbound: true,
        addresses: ["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()].into(),
        has_ended: false,
    };
    assert_eq!(world.membership().described(), [described]);
}

async fn a_change_is_signalled_after_it_can_be_seen<W: World>() {
    let world = W::new(&one(WEB)).await;
    let mut changes = world.membership().changes();
    let pod = named("shop", "web", "u1");
    world.change(&Cluster { namespaces: vec![("shop", false)], pods: vec![WEB] });
    let left = async {
        while world.membership().decide(&pod, Instant::now()).await.unwrap() != Decision::Outside {
            changes.changed().await.unwrap();
        }
    };
    timeout(LONG, left).await.unwrap();
}

async fn another_pod_of_the_name_is_waited_out<W: World>() {
    let world = W::new(&one(WEB)).await;
    let pod = named("shop", "web", "u2");
    let undecided = world.membership().decide(&pod, Instant::now()).await.unwrap_err();
    assert!(matches!(undecided, Undecided::Another { .. }), "{undecided}");
    let waiting = world.membership().decide(&pod, Instant::now() + LONG);
    tokio::pin!(waiting);
    assert!(timeout(Duration::from_millis(50), &mut waiting).await.is_err());
    world.change(&one(Entry { uid: "u2", ..WEB }));
    assert!(matches!(waiting.await.unwrap(), Decision::Member { pod, .. } if pod.uid == "u2"));
}

macro_rules! contract {
    ($($scenario:ident),* $(,)?) => {
        mod standalone {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario::<super::OnFile>().await;
            })*
        }

        mod kubernetes {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario::<super::Following>().await;
            })*
        }
    };
}

contract!(
    members_are_those_that_istio_takes,
    a_member_is_described_as_it_is_decided,
    a_change_is_signalled_after_it_can_be_seen,
    another_pod_of_the_name_is_waited_out,
);
