//! Against descriptions, a dataplane and a ztunnel of plain data.

use std::{collections::BTreeSet, fs, sync::Mutex};

use tokio::time::timeout;

use super::*;
use crate::{
    discover,
    enroll::fakes::{Answer, Dataplane, FakeZtunnel, Node, attachment},
    membership::Undecided,
};

const LONG: Duration = Duration::from_secs(60);
const U1: &str = "11111111-29e7-460b-9bfe-9e5d8a1c4f60";
const U2: &str = "22222222-29e7-460b-9bfe-9e5d8a1c4f60";

#[derive(Default)]
struct Cluster {
    described: Mutex<Vec<Described>>,
    outside: Mutex<BTreeSet<String>>,
    changes: watch::Sender<u64>,
    announced: Mutex<BTreeMap<String, Redirection>>,
    reported: Mutex<Vec<String>>,
}

impl Membership for Cluster {
    async fn decide(&self, pod: &Named, _deadline: Instant) -> Result<Decision, Undecided> {
        let Named { namespace, name, uid } = pod.clone();
        if self.outside.lock().unwrap().contains(&uid.unwrap_or_default()) {
            return Ok(Decision::Outside);
        }
        Err(Undecided::Unknown { namespace, name })
    }

    fn described(&self) -> Vec<Described> {
        self.described.lock().unwrap().clone()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn announce(&self, pod: &Pod, redirection: Redirection) {
        self.announced.lock().unwrap().insert(pod.uid.clone(), redirection);
    }

    fn report(&self, pod: &Pod, failure: &Failure) {
        self.reported.lock().unwrap().push(format!("{} {}", pod.uid, failure.step()));
    }
}

impl Cluster {
    fn describe(&self, pods: impl IntoIterator<Item = Described>) {
        *self.described.lock().unwrap() = pods.into_iter().collect();
        self.changes.send_modify(|change| *change += 1);
    }
}

struct Running {
    node: Node,
    cluster: Arc<Cluster>,
    ztunnels: watch::Sender<u64>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Running {
    fn begin(node: Node) -> Self {
        let cluster = Arc::new(Cluster::default());
        let ztunnels = watch::Sender::new(0);
        let reconciler: Reconciler<Dataplane, FakeZtunnel, Cluster> = Reconciler {
            enrollment: Arc::clone(&node.enrollment),
            membership: Arc::clone(&cluster),
            metrics: Arc::default(),
            host: discover::id_of(&node.netns_path("host")),
        };
        let task = tokio::spawn(reconciler.run(ztunnels.subscribe()));
        Self { node, cluster, ztunnels, task }
    }

    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let wait = async {
            while !holds(self) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        assert!(timeout(LONG, wait).await.is_ok(), "{what}: {:?}", self.cluster.announced.lock().unwrap());
    }

    async fn announced(&self, uid: &str, redirection: Redirection) {
        self.until(&format!("{uid} {redirection:?}"), |own| {
            own.cluster.announced.lock().unwrap().get(uid) == Some(&redirection)
        })
        .await;
    }
}

fn pod(uid: &str, address: &str) -> Described {
    Described {
        pod: Pod {
            uid: uid.into(),
            namespace: "shop".into(),
            name: format!("pod-{uid}"),
            service_account: "web".into(),
        },
        hash: None,
        member: Some(true),
        bypass_inbound: false,
        addresses: [address.parse().unwrap()].into(),
        has_ended: false,
    }
}

fn outside(pod: Described) -> Described {
    Described { member: Some(false), ..pod }
}

#[tokio::test]
async fn running_pods_come_in_and_go_out_with_their_description() {
    let node = Node::new();
    node.process(20, U1, "n1", "10.0.0.1");
    node.process(30, U2, "n2", "10.0.0.2");
    let running = Running::begin(node);
    running.cluster.describe([pod(U1, "10.0.0.1"), outside(pod(U2, "10.0.0.2"))]);
    running.announced(U1, Redirection::Enabled).await;
    running.announced(U2, Redirection::Absent).await;
    running.node.assert_enrolled(U1, "n1");
    running.cluster.describe([outside(pod(U1, "10.0.0.1")), pod(U2, "10.0.0.2")]);
    running.announced(U1, Redirection::Absent).await;
    running.announced(U2, Redirection::Enabled).await;
    running.node.assert_enrolled(U2, "n2");
    running.cluster.describe([outside(pod(U1, "10.0.0.1")), outside(pod(U2, "10.0.0.2"))]);
    running.announced(U2, Redirection::Absent).await;
    running.node.assert_clean();
}

#[tokio::test]
async fn the_runtime_s_del_reaches_a_pod_that_was_found_and_it_does_not_come_back() {
    let node = Node::new();
    node.process(20, U1, "n1", "10.0.0.1");
    let running = Running::begin(node);
    running.cluster.describe([pod(U1, "10.0.0.1")]);
    running.announced(U1, Redirection::Enabled).await;
    running.node.enrollment.del(attachment("podnet", &format!("{:064x}", 20), "eth0")).await;
    running.node.assert_clean();
    running.cluster.describe([pod(U1, "10.0.0.1")]);
    running.announced(U1, Redirection::Pending).await;
    running.node.assert_clean();
}

#[tokio::test]
async fn a_pod_that_is_no_longer_described_stays_captured() {
    let node = Node::new();
    node.process(20, U1, "n1", "10.0.0.1");
    node.add("by-namespace", "n2").await.unwrap();
    let running = Running::begin(node);
    running.cluster.describe([pod(U1, "10.0.0.1")]);
    running.announced(U1, Redirection::Enabled).await;
    running.cluster.describe([]);
    running.cluster.outside.lock().unwrap().insert("by-namespace".into());
    running.cluster.describe([]);
    // Only a decision takes a pod out.
    running.announced("by-namespace", Redirection::Absent).await;
    running.node.assert_enrolled(U1, "n1");
    assert_eq!(running.node.enrollment.dump().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_processes_is_pending_and_reported_until_it_is_found() {
    let running = Running::begin(Node::new());
    running.cluster.describe([pod(U1, "10.0.0.1")]);
    running.announced(U1, Redirection::Pending).await;
    running.until("reported", |own| !own.cluster.reported.lock().unwrap().is_empty()).await;
    assert_eq!(running.cluster.reported.lock().unwrap()[0], format!("{U1} netns"));
    running.node.process(20, U1, "n1", "10.0.0.1");
    running.announced(U1, Redirection::Enabled).await;
    running.node.assert_enrolled(U1, "n1");
}

#[tokio::test(start_paused = true)]
async fn a_nack_for_one_pod_delays_no_other_and_a_new_ztunnel_ends_its_pause() {
    let node = Node::new();
    node.ztunnel.answers.lock().unwrap().insert(U1.into(), Answer::Nack);
    node.process(20, U1, "n1", "10.0.0.1");
    node.process(30, U2, "n2", "10.0.0.2");
    let running = Running::begin(node);
    running.cluster.describe([pod(U1, "10.0.0.1"), pod(U2, "10.0.0.2")]);
    running.announced(U2, Redirection::Enabled).await;
    running.announced(U1, Redirection::Pending).await;
    running.until("several tries", |own| own.cluster.reported.lock().unwrap().len() > 5).await;
    running.node.assert_enrolled(U2, "n2");
    running.node.ztunnel.answers.lock().unwrap().clear();
    let before = Instant::now();
    running.ztunnels.send_modify(|change| *change += 1);
    running.announced(U1, Redirection::Enabled).await;
    assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
}

#[tokio::test]
async fn a_second_address_and_a_new_annotation_reach_an_enrolled_pod() {
    let node = Node::new();
    node.process(20, U1, "n1", "10.0.0.1 fd00::1");
    let running = Running::begin(node);
    running.cluster.describe([pod(U1, "10.0.0.1")]);
    running.announced(U1, Redirection::Enabled).await;
    let mut dual = pod(U1, "10.0.0.1");
    dual.addresses.insert("fd00::1".parse().unwrap());
    dual.bypass_inbound = true;
    running.cluster.describe([dual]);
    running
        .until("updated", |own| {
            own.node
                .enrollment
                .dump()
                .iter()
                .any(|record| record.addresses.len() == 2 && record.bypass_inbound)
        })
        .await;
    running.node.assert_enrolled(U1, "n1");
}

#[tokio::test(start_paused = true)]
async fn an_ended_pod_leaves_when_no_process_is_left() {
    let node = Node::new();
    node.process(20, U1, "n1", "10.0.0.1");
    let running = Running::begin(node);
    running.cluster.describe([pod(U1, "10.0.0.1")]);
    running.announced(U1, Redirection::Enabled).await;
    running.cluster.describe([Described { has_ended: true, ..pod(U1, "10.0.0.1") }]);
    sleep(Duration::from_secs(20)).await;
    running.node.assert_enrolled(U1, "n1");
    fs::remove_dir_all(running.node.directory.path().join("proc/20")).unwrap();
    running.announced(U1, Redirection::Absent).await;
    running.node.assert_clean();
}

#[tokio::test]
async fn the_last_state_of_a_label_that_flaps_wins() {
    let node = Node::new();
    node.process(20, U1, "n1", "10.0.0.1");
    let running = Running::begin(node);
    for round in 0..50 {
        running.cluster.describe([pod(U1, "10.0.0.1")]);
        sleep(Duration::from_millis(round % 7)).await;
        running.cluster.describe([outside(pod(U1, "10.0.0.1"))]);
        sleep(Duration::from_millis(round % 5)).await;
    }
    running.until("out", |own| own.node.enrollment.dump().is_empty()).await;
    running.announced(U1, Redirection::Absent).await;
    running.node.assert_clean();
    running.cluster.describe([pod(U1, "10.0.0.1")]);
    running.announced(U1, Redirection::Enabled).await;
    running.node.assert_enrolled(U1, "n1");
}
