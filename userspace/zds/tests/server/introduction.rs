use super::*;

#[tokio::test]
async fn it_comes_before_the_snapshot_and_the_owner_hears_of_its_end() {
    let mut lab = Lab::introducing(|_config| {});
    lab.node.put("a");
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.expect(add("introduction")).await;
    assert!(lab.ztunnels.connected().borrow().is_empty());
    ztunnel.ack().await;
    ztunnel.take(add("a")).await;
    ztunnel.take(Request::SnapshotSent).await;
    let connection = lab
        .seen(|seen| match seen {
            Seen::Introduced(connection, Ok(())) => Some(*connection),
            _ => None,
        })
        .await;
    lab.saw(Seen::SnapshotSent(connection, 1, 0, 0)).await;
    drop(ztunnel);
    lab.saw(Seen::Ended(connection)).await;
}

#[tokio::test]
async fn a_nacked_one_closes_the_connection_and_adds_go_elsewhere() {
    let mut lab = Lab::introducing(|_config| {});
    let older = Ztunnel::hello(&lab).await;
    older.take(add("introduction")).await;
    older.take(Request::SnapshotSent).await;
    let connection = lab.seen(Seen::connected).await;

    let newer = Ztunnel::hello(&lab).await;
    newer.refuse(add("introduction"), "lo is down").await;
    newer.closed().await;
    let cause = lab.seen(Seen::rejected).await;
    assert!(cause.starts_with("introduction failed: ") && cause.ends_with("lo is down"), "{cause}");
    assert_ne!(lab.seen(Seen::ended).await, connection);

    let call = lab.add("a");
    older.take(add("a")).await;
    assert_eq!(joined(call).await.unwrap().connection, connection);
}

#[tokio::test]
async fn an_owner_can_not_go_on_over_a_nack() {
    let mut lab = Lab::build(Introduce::Stubborn, |_config| {});
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.refuse(add("introduction"), "no").await;
    ztunnel.closed().await;
    lab.seen(Seen::rejected).await;
}

#[tokio::test]
async fn an_unanswered_one_closes_the_connection() {
    for change in [
        |config: &mut Config| config.introduction_timeout = SOON,
        |config: &mut Config| config.ack_timeout = SOON,
    ] {
        let mut lab = Lab::introducing(change);
        let ztunnel = Ztunnel::hello(&lab).await;
        ztunnel.expect(add("introduction")).await;
        ztunnel.closed().await;
        lab.seen(Seen::rejected).await;
        lab.seen(Seen::ended).await;
        assert!(!lab.ztunnels.connected().has_changed().unwrap());
    }
}
