//! Enrollment against a dataplane and a ztunnel of plain data.

mod del;
mod restart;
mod storm;
mod undo;

use culvert_cni::codes::Code;

use super::{Failure, NetnsId};
use crate::enroll::fakes::{Answer, Call, Node, attachment, soon};

#[tokio::test]
async fn an_add_takes_its_steps_in_order() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let calls = node.dataplane.state().calls.clone();
    assert_eq!(calls, [Call::Open, Call::Register, Call::Add, Call::Check, Call::Activate, Call::SelfTest]);
    node.assert_enrolled("u1", "c1");
}

#[tokio::test]
async fn the_same_add_twice_is_one_pod() {
    let node = Node::new();
    let (first, second) = tokio::join!(node.add("u1", "c1"), node.add("u1", "c1"));
    first.unwrap();
    second.unwrap();
    node.add("u1", "c1").await.unwrap();
    node.assert_enrolled("u1", "c1");
    assert_eq!(node.enrollment.dump().len(), 1);
    node.enrollment.del(attachment("podnet", "c1", "eth0")).await;
    node.assert_clean();
}

#[tokio::test]
async fn an_add_that_is_repeated_and_fails_leaves_the_pod_in_the_mesh() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let cookie = node.netns("c1");
    node.dataplane.state().uncaptured.insert(cookie);
    assert_eq!(node.add("u1", "c1").await.unwrap_err().code(), Code::SelfTest);
    node.assert_enrolled("u1", "c1");
}

#[tokio::test]
async fn addresses_of_all_networks_are_the_pod_s() {
    let node = Node::new();
    node.add("u1", "c1").await.unwrap();
    let mut second = node.request("u1", "c1");
    second.addresses = ["fd00::8".parse().unwrap()].into();
    second.attachment = attachment("other", "c1", "net1");
    node.enrollment.add(second, soon()).await.unwrap();
    let dump = node.enrollment.dump();
    assert_eq!(dump.len(), 1);
    assert_eq!((dump[0].addresses.len(), dump[0].attachments.len()), (2, 2));
}

#[tokio::test]
async fn without_addresses_in_the_event_the_netns_is_asked() {
    let node = Node::new();
    let mut add = node.request("u1", "c1");
    add.addresses.clear();
    node.enrollment.add(add, soon()).await.unwrap();
    assert_eq!(node.enrollment.dump()[0].addresses, ["10.0.0.99".parse().unwrap()].into());
}

#[tokio::test]
async fn the_host_s_netns_is_refused() {
    let node = Node::with_host(Some("host"));
    let failure = node.add("u1", "host").await.unwrap_err();
    assert_eq!(failure.code(), Code::Netns);
    assert!(failure.to_string().contains("network namespace of the host"), "{failure}");
    node.assert_clean();
}

#[tokio::test]
async fn a_path_that_names_another_netns_than_the_runtime_s_is_refused() {
    let node = Node::new();
    let mut add = node.request("u1", "c1");
    add.netns_id = Some(NetnsId { dev: 4, ino: 4_026_532_000 });
    let failure = node.enrollment.add(add, soon()).await.unwrap_err();
    assert!(matches!(failure, Failure::AnotherNetns { .. }), "{failure}");
    assert_eq!(failure.code(), Code::Netns);
    node.assert_clean();
}

#[tokio::test]
async fn a_netns_that_is_not_there_is_named() {
    let node = Node::new();
    let mut add = node.request("u1", "c1");
    add.netns = node.netns_path("nowhere");
    let failure = node.enrollment.add(add, soon()).await.unwrap_err();
    let refusal = failure.refusal();
    assert_eq!(refusal.code, Code::Netns);
    assert!(refusal.details.contains("nowhere"), "{refusal}");
}

#[tokio::test(start_paused = true)]
async fn a_missing_ztunnel_is_waited_for_until_the_deadline() {
    let node = Node::new();
    node.ztunnel.connected.send_replace(false);
    let failure = node.add("u1", "c1").await.unwrap_err();
    let refusal = failure.refusal();
    assert_eq!(refusal.code, Code::TryLater);
    assert!(refusal.details.contains("waited 10.0 s for a ztunnel"), "{refusal}");
    node.assert_clean();
}

#[tokio::test]
async fn an_add_goes_on_when_ztunnel_arrives() {
    let node = Node::new();
    node.ztunnel.connected.send_replace(false);
    let arrive = async {
        while !node.dataplane.state().reached.contains(&Call::Add) {
            tokio::task::yield_now().await;
        }
        node.ztunnel.connected.send_replace(true);
    };
    let (added, ()) = tokio::join!(node.add("u1", "c1"), arrive);
    added.unwrap();
    node.assert_enrolled("u1", "c1");
}

#[tokio::test(start_paused = true)]
async fn a_step_that_hangs_is_answered_in_time_and_named() {
    let node = Node::new();
    node.dataplane.hold(Call::Register);
    let add = node.add("u1", "c1");
    let releasing = async {
        // Paused time does not pass by itself while a thread works.
        while !node.dataplane.state().reached.contains(&Call::Register) {
            tokio::task::yield_now().await;
        }
        tokio::time::advance(std::time::Duration::from_secs(11)).await;
    };
    let (failure, ()) = tokio::join!(add, releasing);
    let failure = failure.unwrap_err();
    assert_eq!(failure.code(), Code::Deadline);
    assert!(failure.to_string().contains("register"), "{failure}");
    node.dataplane.release(Call::Register);
    node.enrollment.drain().await;
    node.assert_clean();
}

#[tokio::test]
async fn check_fails_only_on_the_positive_word() {
    use super::Captured;
    let node = Node::new();
    let named = attachment("podnet", "c1", "eth0");
    assert!(matches!(node.enrollment.check(&named).await, Captured::Unknown));
    node.add("u1", "c1").await.unwrap();
    assert!(matches!(node.enrollment.check(&named).await, Captured::Yes));
    let cookie = node.netns("c1");
    node.dataplane.state().uncaptured.insert(cookie);
    assert!(matches!(node.enrollment.check(&named).await, Captured::No(_)));
    node.dataplane.state().failing.insert(Call::SelfTest);
    assert!(matches!(node.enrollment.check(&named).await, Captured::Yes));
}

#[tokio::test]
async fn one_pod_s_silent_ztunnel_delays_no_other_pod() {
    let node = Node::new();
    node.ztunnel.answers.lock().unwrap().insert("u1".into(), Answer::Silence);
    let slow = node.add("u1", "c1");
    tokio::pin!(slow);
    tokio::select! {
        result = &mut slow => panic!("{result:?}"),
        result = node.add("u2", "c2") => result.unwrap(),
    }
    node.assert_enrolled("u2", "c2");
}
