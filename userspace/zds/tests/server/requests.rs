use super::*;

#[tokio::test]
async fn an_add_waits_for_a_ztunnel() {
    let lab = Lab::new();
    // Not on the node, so that the snapshot does not send it as well.
    let (ztunnels, workload) = (lab.ztunnels.clone(), workload("a"));
    let call = tokio::spawn(async move { ztunnels.add(&workload, Instant::now() + ztunnel::PATIENCE).await });
    let ztunnel = Ztunnel::hello(&lab).await;
    let mut requests = [ztunnel.request().await, Request::SnapshotSent];
    ztunnel.ack().await;
    requests[1] = ztunnel.request().await;
    ztunnel.ack().await;
    assert!(requests.contains(&add("a")), "{requests:?}");
    joined(call).await.unwrap();
}

#[tokio::test]
async fn an_add_without_any_ztunnel_fails_at_its_deadline() {
    let lab = Lab::new();
    let start = Instant::now();
    let error = joined(lab.add_within("a", SOON)).await.unwrap_err();
    assert!(matches!(error, Error::NoZtunnel), "{error}");
    assert!(start.elapsed() >= SOON);
}

#[tokio::test]
async fn an_add_too_large_for_a_packet_fails_at_once() {
    let lab = Lab::new();
    let mut large = workload("a");
    large.info.name = "n".repeat(wire::MAX_REQUEST);
    let error = lab.ztunnels.add(&large, Instant::now() + ztunnel::PATIENCE).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge(too_large) if too_large.size > wire::MAX_REQUEST), "{error}");
}

#[tokio::test]
async fn a_nack_is_the_callers_and_the_connection_goes_on() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.add("a");
    ztunnel.refuse(add("a"), "address in use").await;
    let error = joined(call).await.unwrap_err();
    assert!(matches!(&error, Error::Nacked { message, .. } if message == "address in use"), "{error}");
    let call = lab.del("a");
    ztunnel.refuse(del("a"), "no").await;
    assert!(matches!(joined(call).await, Err(Error::Nacked { .. })));
    let call = lab.add("b");
    ztunnel.take(add("b")).await;
    joined(call).await.unwrap();
}

#[tokio::test]
async fn a_long_nack_is_read_whole() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.add("a");
    ztunnel.refuse(add("a"), &"backtrace ".repeat(1000)).await;
    let error = joined(call).await.unwrap_err();
    assert!(matches!(&error, Error::Nacked { message, .. } if message.len() == 10_000));
}

#[tokio::test]
async fn adds_go_to_the_newest_and_when_it_dies_to_the_one_before() {
    let mut lab = Lab::new();
    let (older, first) = Ztunnel::ready(&mut lab).await;
    let (newer, second) = Ztunnel::ready(&mut lab).await;
    let call = lab.add("a");
    newer.take(add("a")).await;
    assert_eq!(joined(call).await.unwrap().connection, second);
    lab.node.take_away("a");
    drop(newer);
    lab.connected(1).await;
    let call = lab.add("b");
    older.take(add("b")).await;
    assert_eq!(joined(call).await.unwrap().connection, first);
}

#[tokio::test]
async fn when_the_newest_dies_the_one_before_is_given_what_it_missed() {
    let mut lab = Lab::new();
    let (older, connection) = Ztunnel::ready(&mut lab).await;
    // Two come and go, the second while the older one has a request outstanding.
    let (newer, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.add("a");
    newer.take(add("a")).await;
    joined(call).await.unwrap();
    lab.node.put_entry("b", Entry::Keep);
    drop(newer);
    older.expect(add("a")).await;
    let newest = Ztunnel::hello(&lab).await;
    newest.take(add("a")).await;
    newest.take(keep("b")).await;
    newest.take(Request::SnapshotSent).await;
    let call = lab.add("c");
    newest.take(add("c")).await;
    joined(call).await.unwrap();
    drop(newest);
    lab.connected(1).await;
    older.ack().await;
    lab.saw(Seen::TookOver(connection, 1, 0)).await;
    older.take(add("a")).await;
    older.take(add("c")).await;
    lab.saw(Seen::TookOver(connection, 2, 0)).await;
}

#[tokio::test]
async fn deletes_go_to_all() {
    let mut lab = Lab::new();
    let (older, _) = Ztunnel::ready(&mut lab).await;
    let (newer, _) = Ztunnel::ready(&mut lab).await;
    let call = lab.del("a");
    older.take(del("a")).await;
    newer.take(del("a")).await;
    joined(call).await.unwrap();
}

#[tokio::test]
async fn a_delete_without_any_ztunnel_succeeds() {
    joined(Lab::new().del("a")).await.unwrap();
}

#[tokio::test]
async fn a_delete_is_sent_though_its_caller_has_gone() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let held = lab.add("held");
    ztunnel.expect(add("held")).await;
    let (ztunnels, uid) = (lab.ztunnels.clone(), "a".into());
    assert!(ztunnels.del(&uid).now_or_never().is_none());
    ztunnel.ack().await;
    ztunnel.take(del("a")).await;
    joined(held).await.unwrap();
}

#[tokio::test]
async fn a_silent_ztunnel_delays_only_its_own_requests() {
    let mut lab = Lab::new();
    let (older, _) = Ztunnel::ready(&mut lab).await;
    let (silent, _) = Ztunnel::ready(&mut lab).await;
    let waiting = lab.add("a");
    silent.expect(add("a")).await;
    let deleting = [lab.del("b"), lab.del("c")];
    older.take(del("b")).await;
    older.take(del("c")).await;
    // And a third one comes and is served meanwhile.
    let newest = Ztunnel::hello(&lab).await;
    newest.take(add("a")).await;
    newest.take(Request::SnapshotSent).await;
    let call = lab.add("d");
    newest.take(add("d")).await;
    joined(call).await.unwrap();
    assert!(!waiting.is_finished() && deleting.iter().all(|call| !call.is_finished()));
}

#[tokio::test]
async fn an_add_dropped_in_the_queue_is_not_sent() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let first = lab.add("a");
    ztunnel.expect(add("a")).await;
    let dropped = workload("b");
    let deadline = Instant::now() + ztunnel::PATIENCE;
    assert!(lab.ztunnels.add(&dropped, deadline).now_or_never().is_none());
    let last = lab.add("c");
    tokio::task::yield_now().await;
    ztunnel.ack().await;
    ztunnel.take(add("c")).await;
    joined(first).await.unwrap();
    joined(last).await.unwrap();
}

#[tokio::test]
async fn the_ack_of_an_add_whose_caller_has_gone_is_not_taken_for_another() {
    let mut lab = Lab::new();
    let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
    let gone = lab.add_within("a", SOON);
    ztunnel.expect(add("a")).await;
    assert!(matches!(joined(gone).await, Err(Error::TimedOut { .. })));
    let next = lab.add("b");
    tokio::task::yield_now().await;
    ztunnel.ack().await;
    ztunnel.refuse(add("b"), "no").await;
    assert!(matches!(joined(next).await, Err(Error::Nacked { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_and_thirty_adds_in_parallel_are_all_acked() {
    let mut lab = Lab::new();
    let (ztunnel, connection) = Ztunnel::ready(&mut lab).await;
    let ztunnel = ztunnel.serve();
    let start = Instant::now();
    let calls: Vec<_> = (0..330).map(|number| lab.add(&number.to_string())).collect();
    for call in calls {
        assert_eq!(joined(call).await.unwrap().connection, connection);
    }
    println!("330 adds in {:?}", start.elapsed());
    lab.shutdown.cancel();
    joined(lab.server).await;
    assert_eq!(joined(ztunnel).await, 330);
}
