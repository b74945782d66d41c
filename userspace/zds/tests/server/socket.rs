use super::*;

fn config(path: &Path) -> Config {
    Config { peer_uid: None, accept_interval: Duration::ZERO, ..Config::new(path) }
}

#[tokio::test]
async fn it_is_for_its_owner_only_and_alone_in_its_directory() {
    let lab = Lab::new();
    assert_eq!(fs::metadata(&lab.path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(lab.directory.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn a_stale_one_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ztunnel.sock");
    drop(UnixSeqpacketListener::bind(&path).unwrap());
    let server = Server::bind(config(&path)).unwrap();
    assert!(server.socket().is_ours());
    assert_eq!(server.socket().path(), path);
    tokio_seqpacket::UnixSeqpacket::connect(&path).await.unwrap();
}

#[tokio::test]
async fn a_directory_that_is_not_there_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    assert!(Server::bind(config(&directory.path().join("absent/ztunnel.sock"))).is_err());
}

#[tokio::test]
async fn shutdown_closes_the_connections_and_removes_it() {
    let mut lab = Lab::new();
    let (ztunnel, connection) = Ztunnel::ready(&mut lab).await;
    let call = lab.add("a");
    ztunnel.expect(add("a")).await;
    lab.shutdown.cancel();
    joined(lab.server).await;
    ztunnel.closed().await;
    assert!(!lab.path.exists());
    assert!(
        matches!(joined(call).await, Err(Error::ConnectionLost { connection: lost }) if lost == connection)
    );
    // No waiting for a ztunnel that can not come.
    let error = lab.ztunnels.add(&workload("b"), Instant::now() + ztunnel::PATIENCE).await;
    assert!(matches!(error, Err(Error::NoZtunnel)));
    assert_eq!(lab.node.uids(), ["a".into()]);
}

#[tokio::test]
async fn shutdown_tells_the_owner_of_every_end() {
    let mut lab = Lab::introducing(|_config| {});
    let ztunnel = Ztunnel::hello(&lab).await;
    ztunnel.expect(add("introduction")).await;
    lab.shutdown.cancel();
    lab.seen(Seen::ended).await;
}

#[tokio::test]
async fn shutdown_leaves_another_servers_alone() {
    let lab = Lab::new();
    let server = Server::bind(config(&lab.path)).unwrap();
    lab.shutdown.cancel();
    joined(lab.server).await;
    assert!(server.socket().is_ours());
    fs::remove_file(&lab.path).unwrap();
    assert!(!server.socket().is_ours());
}
