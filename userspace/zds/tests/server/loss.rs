use super::*;

#[tokio::test]
async fn a_missed_ack_closes_the_connection() {
    let mut lab = Lab::with(|config| config.ack_timeout = SOON);
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.add_within("a", 3 * SOON);
    ztunnel.expect(add("a")).await;
    ztunnel.closed().await;
    assert_eq!(lab.seen(Seen::disconnected).await, "no ack in time");
    let error = joined(call).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
}

#[tokio::test]
async fn a_late_ack_is_never_taken_for_the_next_request() {
    let mut lab = Lab::with(|config| config.ack_timeout = SOON);
    let (late, _) = Ztunnel::ready(&mut lab).await;
    let first = lab.add_within("a", SOON / 2);
    late.expect(add("a")).await;
    assert!(matches!(joined(first).await, Err(Error::TimedOut { .. })));
    // Queued behind the unanswered one, on a connection that is about to be closed.
    let second = lab.add("b");
    late.closed().await;
    let packet = wire::encode_ack(&Ack::Ok);
    assert!(late.socket.send(&packet).await.is_err());
    assert!(!second.is_finished());
    let ztunnel = Ztunnel::hello(&lab).await;
    let serving = ztunnel.serve();
    joined(second).await.unwrap();
    lab.shutdown.cancel();
    joined(serving).await;
}

#[tokio::test]
async fn a_second_ack_is_not_taken_for_the_next_request() {
    let mut lab = Lab::new();
    let (ztunnel, connection) = Ztunnel::ready(&mut lab).await;
    let (first, second) = (lab.add("a"), lab.add_within("b", SOON));
    ztunnel.expect(add("a")).await;
    ztunnel.ack().await;
    ztunnel.ack().await;
    joined(first).await.unwrap();
    lab.saw(Seen::Disconnected(connection, "message outside a request".into())).await;
    assert!(matches!(joined(second).await, Err(Error::ConnectionLost { .. } | Error::TimedOut { .. })));
}

#[tokio::test]
async fn a_second_ack_in_a_snapshot_is_not_taken_for_the_next_workload() {
    let mut lab = Lab::new();
    lab.node.put("a");
    lab.node.put("b");
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.expect(add("a")).await;
    ztunnel.ack().await;
    ztunnel.ack().await;
    ztunnel.closed().await;
    assert_eq!(lab.seen(Seen::disconnected).await, "message outside a request");
}

#[tokio::test]
async fn a_message_outside_a_request_closes_the_connection() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    ztunnel.send(&wire::encode_hello()).await;
    ztunnel.closed().await;
    assert_eq!(lab.seen(Seen::disconnected).await, "message outside a request");
}

#[tokio::test]
async fn garbage_instead_of_an_ack_closes_the_connection() {
    for (packet, cause) in [
        (&b"\xff\xff"[..], "message can not be decoded"),
        (&b"\x7a\x00"[..], "message can not be decoded"),
        (&[b'x'; 20_000], "message is too long"),
    ] {
        let mut lab = Lab::new();
        let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
        let call = lab.add_within("a", SOON);
        ztunnel.expect(add("a")).await;
        ztunnel.send(packet).await;
        ztunnel.closed().await;
        assert_eq!(lab.seen(Seen::disconnected).await, cause);
        assert!(matches!(joined(call).await, Err(Error::ConnectionLost { .. })));
    }
}

#[tokio::test]
async fn the_end_of_an_idle_ztunnel_is_seen_without_a_request() {
    let mut lab = Lab::new();
    let (ztunnel, connection) = Ztunnel::ready(&mut lab).await;
    drop(ztunnel);
    lab.saw(Seen::Disconnected(connection, "closed by ztunnel".into())).await;
    lab.saw(Seen::Ended(connection)).await;
    lab.connected(0).await;
}

#[tokio::test]
async fn an_add_whose_ztunnel_dies_before_the_ack_goes_to_the_other() {
    let mut lab = Lab::new();
    let (older, connection) = Ztunnel::ready(&mut lab).await;
    let (newer, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.add("a");
    newer.expect(add("a")).await;
    drop(newer);
    // Once for the caller, once because it takes over.
    older.take(add("a")).await;
    older.take(add("a")).await;
    assert_eq!(joined(call).await.unwrap().connection, connection);
}

#[tokio::test]
async fn an_add_whose_ztunnel_misses_the_ack_goes_to_the_other() {
    let mut lab = Lab::with(|config| config.ack_timeout = 3 * SOON);
    let (older, connection) = Ztunnel::ready(&mut lab).await;
    let (newer, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.add("a");
    newer.expect(add("a")).await;
    older.take(add("a")).await;
    older.take(add("a")).await;
    assert_eq!(joined(call).await.unwrap().connection, connection);
}

#[tokio::test]
async fn an_add_whose_ack_was_missed_does_not_hold_up_the_next_connection() {
    let mut lab = Lab::with(|config| config.ack_timeout = SOON);
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let (poison, next) = (lab.add("poison"), lab.add("next"));
    ztunnel.expect(add("poison")).await;
    assert!(matches!(joined(poison).await, Err(Error::TimedOut { .. })));
    // The poison is not sent again, or this would be in vain.
    let again = Ztunnel::hello(&lab).await.serve();
    joined(next).await.unwrap();
    lab.shutdown.cancel();
    joined(again).await;
}

#[tokio::test]
async fn a_workload_whose_ack_was_missed_waits_until_all_others_are_served() {
    let mut lab = Lab::with(|config| config.ack_timeout = SOON);
    for uid in ["a", "b", "c"] {
        lab.node.put(uid);
    }
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.expect(add("a")).await;
    ztunnel.closed().await;
    let ztunnel = Ztunnel::hello(&lab).await;
    // It may serve it since an earlier time.
    ztunnel.take(keep("a")).await;
    for uid in ["b", "c"] {
        ztunnel.take(add(uid)).await;
    }
    ztunnel.take(Request::SnapshotSent).await;
    ztunnel.take(add("a")).await;
    drop(ztunnel);
    let ztunnel = Ztunnel::hello(&lab).await;
    for uid in ["a", "b", "c"] {
        ztunnel.take(add(uid)).await;
    }
    lab.seen(Seen::connected).await;
}

#[tokio::test]
async fn an_add_whose_only_ztunnel_dies_waits_for_the_next() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.add("a");
    ztunnel.expect(add("a")).await;
    drop(ztunnel);
    let next = Ztunnel::hello(&lab).await.serve();
    joined(call).await.unwrap();
    lab.shutdown.cancel();
    joined(next).await;
}

#[tokio::test]
async fn an_add_whose_ztunnel_dies_fails_at_its_deadline_with_that_reason() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.add_within("a", SOON);
    ztunnel.expect(add("a")).await;
    drop(ztunnel);
    assert!(matches!(joined(call).await, Err(Error::ConnectionLost { .. })));
}

#[tokio::test]
async fn a_delete_ends_with_the_connection_it_waits_for() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.del("a");
    ztunnel.expect(del("a")).await;
    drop(ztunnel);
    joined(call).await.unwrap();
}
