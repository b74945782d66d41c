//! Whatever step an ADD ends in, nothing of it is left.

use culvert_cni::codes::Code;
use rstest::rstest;

use crate::enroll::Removal;
use crate::enroll::fakes::{Answer, Call, Node, attachment};

#[rstest]
#[case::netns(Call::Open, Code::Netns)]
#[case::register(Call::Register, Code::Attach)]
#[case::ztunnel(Call::Add, Code::Ztunnel)]
#[case::listeners(Call::Check, Code::Attach)]
#[case::attach(Call::Activate, Code::Attach)]
#[case::self_test(Call::SelfTest, Code::SelfTest)]
#[tokio::test]
async fn a_step_that_fails_is_named_and_undone(#[case] step: Call, #[case] code: Code) {
    let node = Node::new();
    node.dataplane.state().failing.insert(step);
    assert_eq!(node.add("u1", "c1").await.unwrap_err().code(), code);
    node.assert_clean();
    node.dataplane.state().failing.clear();
    node.add("u1", "c1").await.unwrap();
    node.assert_enrolled("u1", "c1");
}

#[tokio::test]
async fn a_record_that_cannot_be_written_fails_the_add() {
    let node = Node::new();
    let pods = node.directory.path().join("pods");
    std::fs::remove_dir(&pods).unwrap();
    std::fs::write(&pods, "in the way").unwrap();
    assert_eq!(node.add("u1", "c1").await.unwrap_err().code(), Code::TryLater);
    std::fs::remove_file(&pods).unwrap();
    std::fs::create_dir(&pods).unwrap();
    node.assert_clean();
}

#[rstest]
#[case::netns(Call::Open)]
#[case::register(Call::Register)]
#[case::ztunnel(Call::Add)]
#[case::listeners(Call::Check)]
#[case::attach(Call::Activate)]
#[case::self_test(Call::SelfTest)]
#[tokio::test]
async fn a_runtime_that_goes_away_in_a_step_leaves_nothing(#[case] step: Call) {
    let node = Node::new();
    node.dataplane.hold(step);
    drop_when_reached(&node, step).await;
    node.dataplane.release(step);
    node.enrollment.drain().await;
    node.assert_clean();
}

#[rstest]
#[case::netns(Call::Open)]
#[case::register(Call::Register)]
#[case::ztunnel(Call::Add)]
#[case::listeners(Call::Check)]
#[case::attach(Call::Activate)]
#[case::self_test(Call::SelfTest)]
#[tokio::test]
async fn a_del_during_a_step_undoes_the_add(#[case] step: Call) {
    let node = Node::new();
    node.dataplane.hold(step);
    let del = async {
        reached(&node, step).await;
        let del = node.enrollment.del(attachment("podnet", "c1", "eth0"));
        let release = async { node.dataplane.release(step) };
        assert_eq!(tokio::join!(del, release).0, Removal::Removed);
    };
    let (added, ()) = tokio::join!(node.add("u1", "c1"), del);
    added.unwrap_err();
    node.assert_clean();
}

#[tokio::test]
async fn a_retry_right_after_the_runtime_went_away_waits_for_the_undoing() {
    let node = Node::new();
    node.dataplane.hold(Call::Activate);
    drop_when_reached(&node, Call::Activate).await;
    let release = async { node.dataplane.release(Call::Activate) };
    let (added, ()) = tokio::join!(node.add("u1", "c1"), release);
    added.unwrap();
    node.assert_enrolled("u1", "c1");
}

#[tokio::test]
async fn a_failed_new_sandbox_gives_ztunnel_back_to_the_old_one() {
    let node = Node::new();
    node.add("u1", "old").await.unwrap();
    let new = node.netns("new");
    node.dataplane.state().uncaptured.insert(new);
    node.add("u1", "new").await.unwrap_err();
    node.assert_enrolled("u1", "old");
    assert!(!node.dataplane.state().registered.contains(&new));
    assert_eq!(*node.ztunnel.deleted.lock().unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn a_nack_leaves_nothing_at_ztunnel() {
    let node = Node::new();
    node.ztunnel.answers.lock().unwrap().insert("u1".into(), Answer::Nack);
    assert_eq!(node.add("u1", "c1").await.unwrap_err().code(), Code::Ztunnel);
    assert_eq!(*node.ztunnel.deleted.lock().unwrap(), ["u1"]);
    node.assert_clean();
}

async fn drop_when_reached(node: &Node, step: Call) {
    tokio::select! {
        result = node.add("u1", "c1") => panic!("{result:?}"),
        () = reached(node, step) => {}
    }
}

async fn reached(node: &Node, step: Call) {
    while !node.dataplane.state().reached.contains(&step) {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}
