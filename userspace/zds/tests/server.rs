//! The server against scripted ztunnels over real sockets.

#![allow(clippy::unwrap_used, reason = "test code outside #[test] functions")]

mod ztunnel;

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use culvert_zds::{
    Config, Entry, Error, Owner as _, Server,
    wire::{self, Ack, Request},
};
use futures::FutureExt as _;
use tokio::time::Instant;
use tokio_seqpacket::UnixSeqpacketListener;
use ztunnel::{
    Introduce, Lab, SOON, Seen, Ztunnel, add, del, inode, joined, keep, send_with_descriptor, workload,
};

mod hello {
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
}

mod introduction {
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
}

mod snapshot {
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
}

mod requests {
    use super::*;

    #[tokio::test]
    async fn an_add_waits_for_a_ztunnel() {
        let lab = Lab::new();
        // Not on the node, so that the snapshot does not send it as well.
        let (ztunnels, workload) = (lab.ztunnels.clone(), workload("a"));
        let call =
            tokio::spawn(async move { ztunnels.add(&workload, Instant::now() + ztunnel::PATIENCE).await });
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
}

mod loss {
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
}

mod socket {
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
}
