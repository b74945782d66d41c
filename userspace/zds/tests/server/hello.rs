use super::*;

#[tokio::test]
async fn a_client_that_says_nothing_is_closed_and_never_counted() {
    let mut lab = Lab::with(|config| config.hello_timeout = SOON);
    let start = Instant::now();
    let ztunnel = Ztunnel::silent(&lab).await;
    ztunnel.closed().await;
    assert!(start.elapsed() >= SOON);
    assert_eq!(lab.seen(Seen::rejected).await, "no hello in time");
    assert!(!lab.ztunnels.connected().has_changed().unwrap());
}

#[tokio::test]
async fn a_silent_client_is_not_the_newest() {
    let mut lab = Lab::new();
    let (ztunnel, connection) = Ztunnel::ready(&mut lab).await;
    let _silent = Ztunnel::silent(&lab).await;
    let call = lab.add("a");
    ztunnel.take(add("a")).await;
    assert_eq!(joined(call).await.unwrap().connection, connection);
}

#[tokio::test]
async fn a_first_message_that_is_no_hello_closes_the_connection() {
    for packet in [&b"\xff\xff\xff"[..], &wire::encode_ack(&Ack::Ok), &[0x08, 0x00], &[b'x'; 20_000]] {
        let mut lab = Lab::new();
        let ztunnel = Ztunnel::silent(&lab).await;
        ztunnel.send(packet).await;
        ztunnel.closed().await;
        lab.seen(Seen::rejected).await;
    }
}

#[tokio::test]
async fn descriptors_with_a_hello_are_ignored() {
    let lab = Lab::new();
    let ztunnel = Ztunnel::silent(&lab).await;
    send_with_descriptor(&ztunnel, &wire::encode_hello()).await;
    ztunnel.take(Request::SnapshotSent).await;
    lab.connected(1).await;
}

#[tokio::test]
async fn a_peer_of_another_user_is_closed() {
    let mut lab = Lab::with(|config| config.peer_uid = Some(4711));
    let ztunnel = Ztunnel::silent(&lab).await;
    ztunnel.closed().await;
    assert!(lab.seen(Seen::rejected).await.ends_with("expected 4711"));
}
