//! Removals: each touches its own attachment only.

use std::collections::{BTreeSet, HashSet};

use crate::enroll::fakes::{Call, Node, attachment};
use crate::enroll::{Attachment, Removal};

#[tokio::test]
async fn the_last_attachment_takes_the_pod_out_in_order() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    node.dataplane.state().calls.clear();
    assert_eq!(node.enrollment.del(attachment("podnet", "c1", "eth0")).await, Removal::Removed);
    assert_eq!(node.dataplane.state().calls, [Call::Withdraw, Call::Del, Call::Restore]);
    node.assert_clean();
    assert_eq!(node.enrollment.del(attachment("podnet", "c1", "eth0")).await, Removal::Unknown);
}

#[tokio::test]
async fn a_late_del_of_the_old_sandbox_leaves_the_new_one() {
    let node = Node::new();
    node.add("u1", "old").await.unwrap();
    node.add("u1", "new").await.unwrap();
    assert_eq!(node.enrollment.del(attachment("podnet", "old", "eth0")).await, Removal::Removed);
    node.assert_enrolled("u1", "new");
    assert_eq!(*node.ztunnel.deleted.lock().unwrap(), Vec::<String>::new());
    node.enrollment.del(attachment("podnet", "new", "eth0")).await;
    node.assert_clean();
}

#[tokio::test]
async fn an_older_sandbox_is_served_again_when_the_newest_goes() {
    let node = Node::new();
    node.add("u1", "old").await.unwrap();
    node.add("u1", "new").await.unwrap();
    node.enrollment.del(attachment("podnet", "new", "eth0")).await;
    node.assert_enrolled("u1", "old");
}

#[tokio::test]
async fn a_pod_of_two_networks_stays_until_both_are_gone() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let mut second = node.request("u1", "c1");
    second.attachment = attachment("other", "c1", "net1");
    node.enrollment.add(second, crate::enroll::fakes::soon()).await.unwrap();
    node.enrollment.del(attachment("podnet", "c1", "eth0")).await;
    node.assert_enrolled("u1", "c1");
    assert_eq!(node.records.read().unwrap()[0].attachments.len(), 1);
    node.enrollment.del(attachment("other", "c1", "net1")).await;
    node.assert_clean();
}

#[tokio::test]
async fn a_del_that_names_only_the_container_means_all_of_it() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    node.add("u2", "c2").await.unwrap();
    let named = Attachment { container_id: Some("c1".into()), ..Attachment::default() };
    node.enrollment.del(named).await;
    assert_eq!(node.enrollment.dump().len(), 1);
    node.assert_enrolled("u2", "c2");
}

#[tokio::test]
async fn garbage_collection_removes_what_one_network_does_not_know() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    node.add("u2", "c2").await.unwrap();
    let mut other = node.request("u3", "c3");
    other.attachment = attachment("other", "c3", "eth0");
    node.enrollment.add(other, crate::enroll::fakes::soon()).await.unwrap();
    let mut istio = node.request("u4", "c4");
    istio.attachment = Attachment::default();
    node.enrollment.add(istio, crate::enroll::fakes::soon()).await.unwrap();
    let valid = BTreeSet::from([("c2".to_owned(), "eth0".to_owned())]);
    node.enrollment.retain("podnet", valid).await;
    let uids: BTreeSet<_> = node.enrollment.dump().into_iter().map(|record| record.pod.uid).collect();
    assert_eq!(uids, ["u2", "u3", "u4"].map(str::to_owned).into());
}

#[tokio::test]
async fn a_pod_with_open_connections_leaves_when_they_have_closed() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let cookie = node.netns("c1");
    node.dataplane.state().draining.insert(cookie);
    node.enrollment.del(attachment("podnet", "c1", "eth0")).await;
    assert!(node.dataplane.state().registered.contains(&cookie));
    assert!(!node.dataplane.state().active.contains(&cookie));
    node.enrollment.look(&HashSet::new()).await;
    assert_eq!(node.enrollment.dump().len(), 1);
    node.dataplane.state().draining.clear();
    node.enrollment.look(&HashSet::new()).await;
    node.assert_clean();
}

#[tokio::test]
async fn a_del_that_cannot_end_capture_is_finished_later() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    node.dataplane.state().failing.insert(Call::Withdraw);
    assert_eq!(node.enrollment.del(attachment("podnet", "c1", "eth0")).await, Removal::Removed);
    assert_eq!(node.enrollment.dump().len(), 1);
    node.dataplane.state().failing.clear();
    node.enrollment.look(&HashSet::new()).await;
    node.enrollment.look(&HashSet::new()).await;
    node.assert_clean();
}

#[tokio::test]
async fn a_netns_that_vanished_is_noticed_at_the_second_look() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let cookie = node.netns("c1");
    std::fs::remove_file(node.netns_path("c1")).unwrap();
    let missing = node.enrollment.look(&HashSet::new()).await;
    assert_eq!((missing.len(), node.enrollment.dump().len()), (1, 1));
    node.enrollment.look(&missing).await;
    node.assert_clean();
    assert!(node.dataplane.state().forgotten.contains(&cookie));
}

#[tokio::test]
async fn a_netns_without_a_path_stays_captured_while_a_process_lives_in_it() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let proc = node.directory.path().join("proc/42/ns");
    std::fs::create_dir_all(&proc).unwrap();
    std::fs::hard_link(node.netns_path("c1"), proc.join("net")).unwrap();
    std::fs::remove_file(node.netns_path("c1")).unwrap();
    let missing = node.enrollment.look(&HashSet::new()).await;
    let missing = node.enrollment.look(&missing).await;
    assert_eq!(node.enrollment.dump().len(), 1);
    std::fs::remove_dir_all(node.directory.path().join("proc/42")).unwrap();
    node.enrollment.look(&missing).await;
    node.assert_clean();
}
