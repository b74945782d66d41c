use super::*;

#[tokio::test]
async fn it_has_an_add_with_its_netns_or_a_keep_for_each_workload() {
    let mut lab = Lab::new();
    let a = lab.node.put("a");
    lab.node.put_entry("b", Entry::Keep);
    let c = lab.node.put("c");
    let ztunnel = Ztunnel::hello(&lab).await;
    for workload in [Some(a), None, Some(c)] {
        let (request, fds) = ztunnel.packet().await.unwrap();
        match workload {
            Some(workload) => {
                assert_eq!(request, add(workload.uid.as_str()));
                assert_eq!(inode(&fds[0]), inode(&workload.netns));
            }
            None => assert_eq!(request, keep("b")),
        }
        ztunnel.ack().await;
    }
    ztunnel.take(Request::SnapshotSent).await;
    let connection = lab.seen(Seen::connected).await;
    lab.saw(Seen::SnapshotSent(connection, 2, 1, 0)).await;
}

#[tokio::test]
async fn a_nacked_workload_does_not_keep_the_others_from_being_served_and_is_tried_again() {
    let mut lab = Lab::new();
    for uid in ["a", "b", "c"] {
        lab.node.put(uid);
    }
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.take(add("a")).await;
    ztunnel.refuse(add("b"), "address in use").await;
    ztunnel.take(add("c")).await;
    ztunnel.take(Request::SnapshotSent).await;
    let connection = lab.seen(Seen::connected).await;
    lab.saw(Seen::Refused(connection, "b".into(), 1, true)).await;
    lab.saw(Seen::SnapshotSent(connection, 2, 0, 1)).await;
    ztunnel.refuse(add("b"), "address in use").await;
    lab.saw(Seen::Refused(connection, "b".into(), 2, true)).await;
    ztunnel.take(add("b")).await;
    lab.saw(Seen::Recovered(connection, "b".into(), 2)).await;
}

#[tokio::test]
async fn a_refused_workload_is_not_tried_again_once_it_is_gone_or_its_netns_is() {
    let mut lab = Lab::new();
    for uid in ["gone", "keep", "last"] {
        lab.node.put(uid);
    }
    let ztunnel = Ztunnel::hello(&lab).await;
    for uid in ["gone", "keep", "last"] {
        ztunnel.refuse(add(uid), "no").await;
    }
    ztunnel.expect(Request::SnapshotSent).await;
    lab.node.take_away("gone");
    // ztunnel would end its process on a keep after the snapshot.
    lab.node.put_entry("keep", Entry::Keep);
    ztunnel.ack().await;
    ztunnel.refuse(add("last"), "no").await;
    ztunnel.take(add("last")).await;
    lab.seen(|seen| matches!(seen, Seen::Recovered(..)).then_some(())).await;
}

#[tokio::test]
async fn a_workload_too_large_for_a_packet_is_reported_and_left_out() {
    let mut lab = Lab::new();
    let mut large = workload("large");
    large.info.name = "n".repeat(wire::MAX_REQUEST);
    lab.node.put_entry("large", Entry::Workload(large));
    lab.node.put("small");
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.take(add("small")).await;
    ztunnel.take(Request::SnapshotSent).await;
    let connection = lab.seen(Seen::connected).await;
    lab.saw(Seen::Refused(connection, "large".into(), 1, false)).await;
    lab.saw(Seen::SnapshotSent(connection, 1, 0, 1)).await;
}

#[tokio::test]
async fn a_workload_deleted_meanwhile_is_not_sent() {
    let mut lab = Lab::new();
    for uid in ["a", "b", "c"] {
        lab.node.put(uid);
    }
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.expect(add("a")).await;
    let call = lab.del("b");
    tokio::task::yield_now().await;
    ztunnel.ack().await;
    ztunnel.take(del("b")).await;
    ztunnel.take(add("c")).await;
    ztunnel.take(Request::SnapshotSent).await;
    joined(call).await.unwrap();
    let connection = lab.seen(Seen::connected).await;
    lab.saw(Seen::SnapshotSent(connection, 2, 0, 0)).await;
}

#[tokio::test]
async fn a_workload_deleted_between_send_and_ack_is_deleted_after_it() {
    let lab = Lab::new();
    lab.node.put("a");
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.expect(add("a")).await;
    let call = lab.del("a");
    tokio::task::yield_now().await;
    ztunnel.ack().await;
    // In either order: ztunnel forgets a workload deleted before the end of the snapshot, too.
    let mut requests = Vec::new();
    for _ in 0..2 {
        requests.push(ztunnel.request().await);
        ztunnel.ack().await;
    }
    assert!(requests.contains(&del("a")) && requests.contains(&Request::SnapshotSent), "{requests:?}");
    joined(call).await.unwrap();
}

#[tokio::test]
async fn live_requests_take_turns_with_it() {
    let mut lab = Lab::new();
    for uid in ["a", "b", "c"] {
        lab.node.put(uid);
    }
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.expect(add("a")).await;
    lab.seen(Seen::connected).await;
    let calls = [lab.add("x"), lab.add("y")];
    tokio::task::yield_now().await;
    ztunnel.ack().await;
    for uid in ["x", "b", "y", "c"] {
        ztunnel.take(add(uid)).await;
    }
    ztunnel.take(Request::SnapshotSent).await;
    for call in calls {
        joined(call).await.unwrap();
    }
}

#[tokio::test]
async fn a_refused_end_closes_the_connection() {
    let mut lab = Lab::new();
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.refuse(Request::SnapshotSent, "pod snapshot received already").await;
    ztunnel.closed().await;
    assert!(lab.seen(Seen::disconnected).await.ends_with("received already"));
    lab.connected(0).await;
}
