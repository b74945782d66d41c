//! Against a scripted API server.

pub(crate) mod api;

use std::time::Duration;

use serde_json::json;
use tokio::time::timeout;

use super::*;
use crate::membership::selector;
use api::{Api, State, namespace, pod};

const LONG: Duration = Duration::from_secs(60);

/// Membership that follows the server until dropped.
pub(crate) struct Following {
    pub(crate) membership: Arc<Kubernetes>,
    pub(crate) api: Api,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) scope: PathBuf,
    task: tokio::task::JoinHandle<()>,
    _directory: tempfile::TempDir,
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Following {
    pub(crate) fn begin(api: Api) -> Self {
        let metrics = Arc::new(Metrics::default());
        let health = Arc::new(Health::new(Arc::clone(&metrics)));
        let client = tower::Layer::layer(&Observe(Arc::clone(&health)), api.service());
        let rule = Rule {
            selectors: selector::parse(selector::DEFAULT).unwrap(),
            excluded: ["excluded".to_owned()].into(),
        };
        let client = Client::new(client, "default");
        let membership = Arc::new(Kubernetes::new(client, "node-1".into(), rule, health, metrics));
        let directory = tempfile::tempdir().unwrap();
        let scope = directory.path().join("scope.json");
        let readiness = Arc::new(Readiness::default());
        let follow = Arc::clone(&membership).follow(ScopeFile::new(scope.clone()), Arc::clone(&readiness));
        let task = tokio::spawn(follow);
        Self { membership, api, readiness, scope, task, _directory: directory }
    }

    pub(crate) async fn listed(&self) {
        self.until("listed", |own| own.readiness.reasons().is_empty()).await;
    }

    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let wait = async {
            while !holds(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = timeout(LONG, wait).await;
        assert!(waited.is_ok(), "{what}: {:?} {:?}", self.readiness.reasons(), self.api.state().requests);
    }

    fn is_member(&self, namespace: &str, name: &str, uid: &str) -> Option<bool> {
        let named = Named { namespace: namespace.into(), name: name.into(), uid: Some(uid.into()) };
        self.membership.decide_now(&named).ok().map(|decision| decision != Decision::Outside)
    }

    fn uids(&self) -> Vec<String> {
        let mut uids: Vec<_> = self.membership.described().into_iter().map(|pod| pod.pod.uid).collect();
        uids.sort();
        uids
    }

    fn pod(&self, name: &str) -> enroll::Pod {
        let described = self.membership.described();
        described.into_iter().find(|pod| pod.pod.name == name).unwrap().pod
    }
}

fn ambient() -> serde_json::Value {
    json!({ "istio.io/dataplane-mode": "ambient" })
}

/// Namespace `shop` of the mesh, `plain` outside of it, a pod in each.
fn cluster() -> Api {
    let api = Api::new();
    api.apply(namespace("shop", ambient()));
    api.apply(namespace("plain", json!({})));
    api.apply(pod("shop", "web", "u1"));
    api.apply(pod("plain", "other", "u2"));
    api
}

#[tokio::test(start_paused = true)]
async fn only_pods_of_this_node_and_metadata_of_namespaces_are_asked_for() {
    let following = Following::begin(cluster());
    following.listed().await;
    following.api.until("watches", |state| state.queries.len() == 4).await;
    let queries = following.api.state().queries.clone();
    let of_pods: Vec<_> = queries.iter().filter(|query| query.contains("nodeName")).collect();
    assert_eq!(of_pods.len(), 2, "{queries:?}");
    assert!(of_pods.iter().all(|query| query.contains("spec.nodeName%3Dnode-1")), "{queries:?}");
    let watches: Vec<_> = queries.iter().filter(|query| query.contains("watch=true")).collect();
    assert!(watches.iter().all(|query| query.contains("allowWatchBookmarks=true")), "{queries:?}");
    // A quorum read names no version.
    let lists: Vec<_> = queries.iter().filter(|query| !query.contains("watch=true")).collect();
    assert!(lists.iter().all(|query| !query.contains("resourceVersion")), "{queries:?}");
}

#[tokio::test(start_paused = true)]
async fn stored_pods_have_only_what_is_in_use() {
    let following = Following::begin(cluster());
    following.listed().await;
    let key = ObjectRef::new_with("web", pod::resource()).within("shop");
    let stored = following.membership.pods.get(&key).unwrap();
    assert_eq!((&stored.metadata.managed_fields, &stored.types), (&None, &None));
}

#[tokio::test(start_paused = true)]
async fn labels_of_a_namespace_and_of_a_pod_change_decisions() {
    let following = Following::begin(cluster());
    following.listed().await;
    assert_eq!(following.is_member("shop", "web", "u1"), Some(true));
    assert_eq!(following.is_member("plain", "other", "u2"), Some(false));
    let mut changes = following.membership.changes();
    following.api.apply(namespace("plain", ambient()));
    timeout(LONG, changes.changed()).await.unwrap().unwrap();
    following.until("labelled", |own| own.is_member("plain", "other", "u2") == Some(true)).await;
    let mut opted_out = pod("plain", "other", "u2");
    opted_out["metadata"]["labels"] = json!({ "istio.io/dataplane-mode": "none" });
    following.api.apply(opted_out);
    following.until("opted out", |own| own.is_member("plain", "other", "u2") == Some(false)).await;
}

#[tokio::test(start_paused = true)]
async fn a_gap_and_an_expired_watch_lead_to_what_is_there_now() {
    let following = Following::begin(cluster());
    following.listed().await;
    following.api.until("watches", |state| state.queries.len() == 4).await;
    following.api.behind_the_watch(|state: &mut State| {
        state.pods.remove("shop/web").unwrap();
    });
    let mut again = pod("shop", "again", "u3");
    again["metadata"]["resourceVersion"] = json!("90");
    following.api.behind_the_watch(|state: &mut State| drop(state.pods.insert("shop/again".into(), again)));
    following.api.expire("pods");
    following.until("relisted", |own| own.uids() == ["u2", "u3"]).await;
    following.api.cut("pods");
    following
        .api
        .until("watched again", |state| {
            state.requests.iter().filter(|request| *request == "watch pods 200").count() == 3
        })
        .await;
    following.api.apply(pod("shop", "web", "u4"));
    following.until("new pod", |own| own.uids() == ["u2", "u3", "u4"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_fails_is_no_secret_and_what_is_known_stands() {
    let api = cluster();
    api.fail("list pods", &[500, 429]);
    let following = Following::begin(api);
    following
        .until("reported", |own| {
            own.readiness.reasons().iter().any(|reason| reason.contains("nothing is known yet"))
        })
        .await;
    following.listed().await;
    following.api.until("watches", |state| state.queries.len() == 4).await;
    following.api.fail("watch pods", &[500, 503, 500]);
    following.api.cut("pods");
    following
        .until("reported", |own| {
            own.readiness.reasons().iter().any(|reason| reason.contains("what is known stands"))
        })
        .await;
    assert_eq!(following.is_member("shop", "web", "u1"), Some(true));
    // The watch says nothing when it runs again, and yet it is known.
    following.listed().await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_namespace_is_not_known_is_decided_when_it_is() {
    let api = cluster();
    api.apply(pod("late", "web", "u5"));
    let following = Following::begin(api);
    following.listed().await;
    let named = Named { namespace: "late".into(), name: "web".into(), uid: Some("u5".into()) };
    let undecided = following.membership.decide(&named, Instant::now()).await.unwrap_err();
    assert!(matches!(undecided, Undecided::Namespace { .. }), "{undecided}");
    let decide = following.membership.decide(&named, Instant::now() + LONG);
    tokio::pin!(decide);
    assert!(timeout(Duration::from_secs(1), &mut decide).await.is_err());
    following.api.apply(namespace("late", ambient()));
    assert!(matches!(decide.await.unwrap(), Decision::Member { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_static_pod_is_known_by_its_hash_and_a_recreated_one_by_its_new_uid() {
    let api = cluster();
    let mut mirror = pod("shop", "static-node-1", "mirror-uid");
    mirror["metadata"]["annotations"] = json!({ "kubernetes.io/config.hash": "abc", "noise": "x" });
    api.apply(mirror);
    let following = Following::begin(api);
    following.listed().await;
    assert_eq!(following.is_member("shop", "static-node-1", "abc"), Some(true));
    let named = Named { namespace: "shop".into(), name: "static-node-1".into(), uid: Some("abc".into()) };
    let Ok(Decision::Member { pod: member, .. }) = following.membership.decide_now(&named) else {
        panic!("a member");
    };
    assert_eq!(member.uid, "mirror-uid");
    // StatefulSet: the runtime is ahead of the watch.
    let named = Named { namespace: "shop".into(), name: "web".into(), uid: Some("u9".into()) };
    let decide = following.membership.decide(&named, Instant::now() + LONG);
    tokio::pin!(decide);
    assert!(timeout(Duration::from_secs(1), &mut decide).await.is_err());
    following.api.delete("pods", "shop/web");
    following.api.apply(pod("shop", "web", "u9"));
    assert!(matches!(decide.await.unwrap(), Decision::Member { pod, .. } if pod.uid == "u9"));
}

#[tokio::test(start_paused = true)]
async fn the_scope_file_follows_namespaces_and_single_pods_once_both_are_listed() {
    use culvert_cni::scope::Scope;
    let api = cluster();
    api.fail("list pods", &[500; 3]);
    let following = Following::begin(api);
    following.api.until("failing", |state| state.requests.iter().any(|line| line == "list pods 500")).await;
    assert!(Scope::read(&following.scope).is_err(), "a half of the picture is no scope");
    let scope_is = |expected: &'static [&str]| {
        move |own: &Following| {
            Scope::read(&own.scope).is_ok_and(|scope| scope.namespaces.iter().eq(expected.iter().copied()))
        }
    };
    following.until("scope", scope_is(&["shop"])).await;
    let mut single = pod("plain", "single", "u6");
    single["metadata"]["labels"] = ambient();
    following.api.apply(single);
    following.until("scope", scope_is(&["plain", "shop"])).await;
    following.api.apply(namespace("shop", json!({})));
    following.until("scope", scope_is(&["plain"])).await;
}

#[tokio::test(start_paused = true)]
async fn the_annotation_is_written_once_and_again_when_somebody_edits_it() {
    let following = Following::begin(cluster());
    following.listed().await;
    let web = following.pod("web");
    following.membership.announce(&web, Redirection::Enabled);
    following.api.until("enabled", |state| state.redirection("shop/web") == Some("enabled")).await;
    assert_eq!(following.api.state().patches[0]["metadata"]["uid"], "u1");
    following.membership.announce(&web, Redirection::Enabled);
    tokio::time::sleep(LONG).await;
    assert_eq!(following.api.state().patches.len(), 1);
    following.api.apply(pod("shop", "web", "u1"));
    following.api.until("again", |state| state.patches.len() == 2).await;
    following.api.until("enabled", |state| state.redirection("shop/web") == Some("enabled")).await;
    following.membership.announce(&web, Redirection::Absent);
    following.api.until("absent", |state| state.redirection("shop/web").is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn a_patch_that_fails_is_repeated_and_one_of_a_pod_that_is_gone_is_not() {
    let following = Following::begin(cluster());
    following.listed().await;
    let (web, other) = (following.pod("web"), following.pod("other"));
    following.api.fail("patch pods", &[409, 429, 403, 500]);
    following.membership.announce(&web, Redirection::Enabled);
    following.api.until("enabled", |state| state.redirection("shop/web") == Some("enabled")).await;
    let patches = following.api.state().patches.len();
    // Re-created under its name behind the watch: the uid does not match any more.
    following.api.behind_the_watch(|state| {
        state.pods.insert("plain/other".into(), pod("plain", "other", "u8"));
    });
    following.membership.announce(&other, Redirection::Pending);
    tokio::time::sleep(Duration::from_secs(30)).await;
    let state = following.api.state();
    assert_eq!((state.patches.len(), state.redirection("plain/other")), (patches + 1, None));
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_an_event_on_the_pod_and_the_same_one_is_not_repeated() {
    let following = Following::begin(cluster());
    following.listed().await;
    let web = following.pod("web");
    let failure = || Failure::Unfound(crate::discover::Unfound::NoProcess);
    following.membership.report(&web, &failure());
    following.membership.report(&web, &failure());
    following.api.until("event", |state| !state.events.is_empty()).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let state = following.api.state();
    assert_eq!(state.events.len(), 1);
    let event = &state.events[0];
    assert_eq!((&event["regarding"]["uid"], &event["type"]), (&json!("u1"), &json!("Warning")));
    assert_eq!(event["reason"], "MeshNetnsNotFound");
    assert!(event["note"].as_str().unwrap().contains("restart the pod"), "{event}");
}

/// Every request of a life in which everything happens.
#[tokio::test(start_paused = true)]
async fn the_role_that_is_shipped_allows_what_is_asked_and_nothing_else() {
    let following = Following::begin(cluster());
    following.listed().await;
    let web = following.pod("web");
    following.membership.announce(&web, Redirection::Enabled);
    let failure = || Failure::Unfound(crate::discover::Unfound::NoProcess);
    following.membership.report(&web, &failure());
    following.api.until("event", |state| !state.events.is_empty()).await;
    tokio::time::sleep(Duration::from_secs(301)).await;
    following.membership.report(&web, &failure());
    following
        .api
        .until("counted", |state| state.requests.iter().any(|line| line == "patch events 200"))
        .await;
    following.api.until("enabled", |state| state.redirection("shop/web") == Some("enabled")).await;
    let asked: BTreeSet<String> = following
        .api
        .state()
        .requests
        .iter()
        .map(|line| line.trim_end_matches(" 200").replace("patch pods", "patch pods/status"))
        .collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/rbac.yaml");
    let manifests = std::fs::read_to_string(path).unwrap();
    let role = manifests.split("\n---\n").find(|manifest| manifest.contains("kind: ClusterRole\n")).unwrap();
    let role: serde_json::Value = serde_saphyr::from_str(role).unwrap();
    let strings = |value: &serde_json::Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
    };
    let mut allowed = BTreeSet::new();
    for rule in role["rules"].as_array().unwrap() {
        for resource in strings(&rule["resources"]) {
            allowed.extend(strings(&rule["verbs"]).iter().map(|verb| format!("{verb} {resource}")));
        }
    }
    assert_eq!(asked, allowed);
}
