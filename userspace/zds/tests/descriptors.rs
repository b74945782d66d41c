//! In a process of its own: it counts the process's descriptors.

#![allow(clippy::unwrap_used, reason = "test code outside #[test] functions")]

mod ztunnel;

use std::fs;

use ztunnel::{Lab, Ztunnel, joined, send_with_descriptor};

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn no_descriptor_is_left_after_a_thousand_adds_and_deletes() {
    let mut lab = Lab::new();
    let (older, _) = Ztunnel::ready(&mut lab).await;
    let (newer, _) = Ztunnel::ready(&mut lab).await;
    let (older, newer) = (older.serve(), newer.serve());
    joined(lab.add("warm up")).await.unwrap();
    joined(lab.del("warm up")).await.unwrap();
    let before = open_descriptors();
    for number in 0..1000 {
        let uid = number.to_string();
        joined(lab.add(&uid)).await.unwrap();
        joined(lab.del(&uid)).await.unwrap();
    }
    assert_eq!(open_descriptors(), before);

    // A connection leaves nothing behind, however it ends, and takes no descriptors from its peer.
    for _ in 0..100 {
        let ztunnel = Ztunnel::silent(&lab).await;
        send_with_descriptor(&ztunnel, b"not a hello").await;
        ztunnel.closed().await;
        let (ztunnel, _) = Ztunnel::ready(&mut lab).await;
        send_with_descriptor(&ztunnel, b"out of turn").await;
        ztunnel.closed().await;
    }
    lab.connected(2).await;
    assert_eq!(open_descriptors(), before);

    lab.shutdown.cancel();
    joined(lab.server).await;
    assert_eq!(joined(older).await, 1001);
    assert_eq!(joined(newer).await, 2002);
    // Listener, and both ends of two connections.
    assert_eq!(open_descriptors(), before - 5);
}
