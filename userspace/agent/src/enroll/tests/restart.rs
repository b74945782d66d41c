//! What the next agent makes of records.

use crate::enroll::fakes::{Call, Node, attachment};
use crate::record::{Phase, Record};

#[tokio::test]
async fn every_recorded_pod_is_served_without_being_asked_for() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    node.add("u2", "c2").await.unwrap();
    let node = node.restarted();
    node.enrollment.resume().await.unwrap();
    node.assert_enrolled("u1", "c1");
    node.assert_enrolled("u2", "c2");
    node.enrollment.del(attachment("podnet", "c1", "eth0")).await;
    node.enrollment.del(attachment("podnet", "c2", "eth0")).await;
    node.assert_clean();
}

#[tokio::test]
async fn a_record_whose_netns_is_gone_is_dropped_with_all_it_owned() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let cookie = node.netns("c1");
    std::fs::remove_file(node.netns_path("c1")).unwrap();
    let node = node.restarted();
    node.enrollment.resume().await.unwrap();
    assert!(node.dataplane.state().forgotten.contains(&cookie));
    node.assert_clean();
}

#[tokio::test]
async fn a_record_whose_path_names_another_netns_is_dropped() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    std::fs::rename(node.netns_path("c1"), node.netns_path("moved")).unwrap();
    node.netns("c1");
    let node = node.restarted();
    node.enrollment.resume().await.unwrap();
    node.assert_clean();
}

#[tokio::test]
async fn an_add_that_died_with_its_agent_is_undone() {
    for phase in [Phase::Enrolling, Phase::Leaving] {
        let node = Node::new();
        node.add("u1", "c1").await.unwrap();
        let record = node.records.read().unwrap().remove(0);
        node.records.write(&Record { phase, ..record }).unwrap();
        let node = node.restarted();
        node.enrollment.resume().await.unwrap();
        node.assert_clean();
    }
}

#[tokio::test]
async fn the_newest_sandbox_of_a_pod_is_current_again() {
    // Whatever their cookies are: the kernel gives no order with them.
    for sandboxes in [["a", "b"], ["b", "a"]] {
        let node = Node::new();
        for name in ["a", "b"] {
            node.netns(name);
        }
        for sandbox in sandboxes {
            node.add("u1", sandbox).await.unwrap();
        }
        let node = node.restarted();
        node.enrollment.resume().await.unwrap();
        node.assert_enrolled("u1", sandboxes[1]);
    }
}

#[tokio::test]
async fn a_pod_whose_pins_are_gone_is_captured_again() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    {
        let mut state = node.dataplane.state();
        state.registered.clear();
        state.active.clear();
        state.calls.clear();
    }
    let node = node.restarted();
    node.enrollment.resume().await.unwrap();
    node.enrollment.drain().await;
    assert!(node.dataplane.state().calls.ends_with(&[Call::Activate, Call::SelfTest]));
    node.assert_enrolled("u1", "c1");
}

#[tokio::test]
async fn a_captured_pod_whose_record_is_lost_stays_captured_when_its_add_fails() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let cookie = node.netns("c1");
    node.records.remove(cookie).unwrap();
    let node = node.restarted();
    node.enrollment.resume().await.unwrap();
    node.dataplane.state().failing.insert(Call::Add);
    node.add("u1", "c1").await.unwrap_err();
    node.enrollment.drain().await;
    assert!(node.dataplane.state().active.contains(&cookie));
}
