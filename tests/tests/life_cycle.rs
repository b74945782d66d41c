//! Attaching and detaching: what it does to connections, and that it leaves nothing.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{
    fs, io,
    net::IpAddr,
    path::Path,
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use culvert_abi::{
    Address, ListenerKey, OwnAddress, PodEntry,
    names::{LISTENERS, OWN_ADDRESSES, PODS},
};
use culvert_dataplane::{Config, Dataplane, Error, Options, Restored};
use culvert_tests::{CaptureError, Connection, Family, Lab, Pod, Server, eventually};

/// The bound is 200 ms; three times that, because a loaded machine of two cores may not run a
/// thread for that long whatever the packets do.
const LONGEST_GAP: Duration = Duration::from_millis(600);

/// Releases, and waits for the connections that are closing.
fn release(pod: &Pod) {
    pod.release().unwrap();
    eventually("the last captured connection to close", || {
        (pod.restore().unwrap() == Restored::Complete).then_some(())
    });
}

/// Waits until ztunnel has closed its listeners, which it may do after its answer.
fn expect_closed(lab: &Lab, pod: &Pod) {
    let of_pod = |key: &ListenerKey| key.netns == pod.cookie();
    eventually("ztunnel's listeners to close", || {
        (!lab.map(LISTENERS).keys().iter().any(of_pod)).then_some(())
    });
}

/// Open descriptors of the process, once their number has been the same for a while: spare programs are
/// made in the background.
fn settled_descriptors() -> usize {
    let count = || fs::read_dir("/proc/self/fd").unwrap().count();
    let (mut last, mut since) = (count(), Instant::now());
    eventually("descriptors to settle", || {
        let now = count();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        (since.elapsed() > Duration::from_millis(300)).then_some(last)
    })
}

/// Sets it at the end of a scope.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Says something every millisecond and returns the longest time without an answer.
fn talk(connection: &mut Connection, until: &AtomicBool) -> io::Result<Duration> {
    let (mut longest, mut heard, mut number) = (Duration::ZERO, Instant::now(), 0_u64);
    while !until.load(Ordering::Relaxed) {
        number += 1;
        let words = number.to_ne_bytes();
        assert_eq!(connection.try_say(&words)?, words);
        longest = longest.max(heard.elapsed());
        heard = Instant::now();
        thread::sleep(Duration::from_millis(1));
    }
    Ok(longest)
}

#[test]
fn connections_made_before_attach_survive_attach_and_detach_without_a_gap() {
    let lab = Lab::new();
    let (one, two) = (lab.pod("one"), lab.pod("two"));
    let _servers = [one.serve("[::]:80"), two.serve("[::]:80")];
    let mut open = Vec::new();
    for family in Family::BOTH {
        open.push(one.connect(two.at(family, 80)).unwrap());
        open.push(two.connect(one.at(family, 80)).unwrap());
        open.push(lab.node().connect(one.at(family, 80)).unwrap());
    }
    let (stop, gaps) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for connection in &mut open {
            scope.spawn(|| gaps.lock().unwrap().push(talk(connection, &stop)));
        }
        // Also when something panics: the scope waits for its threads.
        let _end = Ending(&stop);
        for _ in 0..3 {
            for pod in [&one, &two] {
                pod.capture(Options::default()).unwrap();
            }
            // Both are captured now: a new connection goes through ztunnel twice.
            for family in Family::BOTH {
                assert_eq!(one.connect(two.at(family, 80)).unwrap().say(b"new"), b"new");
            }
            release(&one);
            release(&two);
        }
    });
    for gap in gaps.into_inner().unwrap() {
        let gap = gap.expect("the connection must live");
        assert!(gap < LONGEST_GAP, "no answer for {gap:?}");
    }
    // Those of each round, and never those from before.
    assert_eq!(lab.ztunnel().wait_for_accepted(15001, 6).len(), 6);
    assert_eq!(lab.ztunnel().wait_for_accepted(15006, 6).len(), 6);
}

#[test]
fn fifty_attaches_and_detaches_leave_nothing() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let (echo, server) = (other.serve("[::]:80"), pod.serve("[::]:80"));
    let cycle = |round: usize| {
        let pod = pod.clone().captured();
        let entry: PodEntry = lab.map(PODS).get(&pod.cookie()).unwrap();
        let family = Family::BOTH[round % 2];
        for (from, to) in [(&pod, &other), (&other, &pod)] {
            assert_eq!(from.connect(to.at(family, 80)).unwrap().say(b"hello"), b"hello");
        }
        release(&pod);
        entry
    };
    let before = (pod.footprint(), lab.kernel_footprint(), settled_descriptors());
    let entries: Vec<_> = (0..50).map(cycle).collect();
    // Each time the same was found: packet sizes that this `ip` may not know of, too.
    assert_eq!(entries, [entries[0]; 50]);
    eventually("the accepted connections' descriptors to close", || {
        (echo.accepted().len() == 50 && server.accepted().len() == 50).then_some(())
    });
    before.0.expect_same(&pod.footprint());
    before.1.expect_same(&lab.kernel_footprint());
    assert_eq!(settled_descriptors(), before.2);
}

#[test]
fn a_detach_under_changing_interfaces_leaves_nothing() {
    let lab = Lab::new();
    let pod = lab.pod("pod");
    let before = (pod.footprint(), lab.kernel_footprint());
    for _ in 0..50 {
        pod.register(Options::default()).unwrap();
        // Wakes the thread that keeps routing in step, at the moment of the detach.
        pod.ip("addr add 10.9.9.9/32 dev eth0\naddr del 10.9.9.9/32 dev eth0");
        assert_eq!(lab.dataplane().detach(pod.netns()).unwrap(), Restored::Complete);
        before.1.expect_same(&lab.kernel_footprint());
    }
    before.0.expect_same(&pod.footprint());
}

#[test]
fn a_detach_with_an_open_captured_connection_drains_first() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let before = (pod.footprint(), lab.kernel_footprint());
    let pod = pod.captured();
    let _servers: [Server; 2] = [other.serve("[::]:80"), pod.serve("[::]:80")];
    let mut open = Vec::new();
    for family in Family::BOTH {
        open.push(pod.connect(other.at(family, 80)).unwrap());
        open.push(other.connect(pod.at(family, 80)).unwrap());
    }
    let talk = |open: &mut Vec<Connection>| {
        for connection in open {
            assert_eq!(connection.say(b"still here"), b"still here");
        }
    };
    talk(&mut open);
    lab.ztunnel().wait_for_accepted(15001, 2);
    lab.ztunnel().wait_for_accepted(15006, 2);
    lab.ztunnel().forget();

    let restored = lab.dataplane().detach(pod.netns()).unwrap();
    assert!(matches!(restored, Restored::Draining(count) if count >= 4), "{restored:?}");
    talk(&mut open);
    // New ones are nobody's business, in both directions.
    for family in Family::BOTH {
        assert_eq!(pod.connect(other.at(family, 80)).unwrap().say(b"direct"), b"direct");
        assert_eq!(other.connect(pod.at(family, 80)).unwrap().say(b"direct"), b"direct");
    }
    assert_eq!(lab.ztunnel().saw().accepted(), []);
    while let Some(connection) = open.pop() {
        assert!(matches!(pod.restore().unwrap(), Restored::Draining(_)));
        talk(&mut open);
        drop(connection);
    }
    eventually("the last captured connection to close", || {
        (pod.restore().unwrap() == Restored::Complete).then_some(())
    });
    pod.remove_from_ztunnel().unwrap();
    before.0.expect_same(&pod.footprint());
    expect_closed(&lab, &pod);
    before.1.expect_same(&lab.kernel_footprint());
}

#[test]
fn a_pod_that_drains_is_finished_by_the_next_agent() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let before = pod.footprint();
    let pod = pod.captured();
    let _echo = other.serve("[::]:80");
    let mut open = pod.connect(other.at(Family::V4, 80)).unwrap();
    assert!(matches!(lab.dataplane().detach(pod.netns()).unwrap(), Restored::Draining(_)));
    lab.restart_dataplane();
    lab.dataplane().resume(pod.netns(), &[pod.v4().into(), pod.v6().into()]).unwrap();
    assert_eq!(open.say(b"still here"), b"still here");
    drop(open);
    eventually("the last captured connection to close", || {
        (pod.restore().unwrap() == Restored::Complete).then_some(())
    });
    before.expect_same(&pod.footprint());
    assert!(!lab.map(PODS).keys().contains(&pod.cookie()));
}

#[test]
fn attaching_twice_is_attaching_once_and_detaching_twice_is_no_error() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let _echo = other.serve("[::]:80");
    let before = (pod.footprint(), lab.kernel_footprint());
    let captured = {
        let pod = pod.clone().captured();
        let once = (pod.footprint(), lab.kernel_footprint());
        let pod = pod.captured();
        once.0.expect_same(&pod.footprint());
        once.1.expect_same(&lab.kernel_footprint());
        pod
    };
    for family in Family::BOTH {
        assert_eq!(captured.connect(other.at(family, 80)).unwrap().say(b"hello"), b"hello");
    }
    assert_eq!(captured.counters().accepted_outbound, 2);
    release(&captured);
    assert_eq!(captured.release().unwrap(), Restored::Complete);
    before.0.expect_same(&pod.footprint());
    expect_closed(&lab, &pod);
    before.1.expect_same(&lab.kernel_footprint());
}

#[test]
fn the_host_netns_is_refused() {
    let lab = Lab::new();
    let before = (lab.node().footprint(), lab.kernel_footprint());
    let addresses: [IpAddr; 1] = [lab.node().v4().into()];
    let refused = lab.dataplane().register(lab.node().netns(), &addresses, Options::default());
    assert!(
        matches!(refused, Err(Error::HostNetns { cookie }) if cookie == lab.node().cookie()),
        "{refused:?}"
    );
    // Nor by another descriptor of it, nor in a later step.
    let again = culvert_dataplane::Netns::current().unwrap();
    assert!(matches!(
        lab.dataplane().register(&again, &[], Options::default()),
        Err(Error::HostNetns { .. })
    ));
    assert!(matches!(lab.dataplane().activate(&again), Err(Error::NotRegistered { .. })));
    assert_eq!(lab.dataplane().detach(&again).unwrap(), Restored::Complete);
    before.0.expect_same(&lab.node().footprint());
    before.1.expect_same(&lab.kernel_footprint());
}

/// Registers a pod and expects it to fail at `map` and to leave nothing.
fn expect_failure_at(lab: &Lab, map: &'static str) {
    let pod = lab.pod("pod");
    let before = (pod.footprint(), lab.kernel_footprint());
    let failed = pod.register(Options::default());
    assert!(
        matches!(&failed, Err(CaptureError::Dataplane(Error::Map { map: full, .. })) if *full == map),
        "{failed:?}"
    );
    before.0.expect_same(&pod.footprint());
    before.1.expect_same(&lab.kernel_footprint());
}

#[test]
fn a_registration_that_finds_no_room_for_the_pod_leaves_nothing() {
    let lab = Lab::builder().without_ztunnel().start();
    let pods = lab.map(PODS);
    let fill = |cookie: &u64| pods.insert(&(u64::MAX - cookie), &PodEntry::default()).is_err();
    assert!((0..100_000).any(|cookie| fill(&cookie)), "the map must be full some time");
    expect_failure_at(&lab, PODS);
}

#[test]
fn a_registration_that_finds_no_room_for_an_address_leaves_nothing() {
    let lab = Lab::builder().without_ztunnel().start();
    let own = lab.map(OWN_ADDRESSES);
    let fill = |number: u128| {
        let address = Address { bytes: number.to_be_bytes() };
        own.insert(&OwnAddress { netns: u64::MAX, address }, &1_u32).is_err()
    };
    assert!((0..1_000_000).any(fill), "the map must be full some time");
    expect_failure_at(&lab, OWN_ADDRESSES);
}

#[test]
fn a_registration_whose_settings_are_read_only_leaves_nothing() {
    let lab = Lab::builder().without_ztunnel().without_dataplane().start();
    // A procfs as containers have it.
    let proc = Path::new("/run/netns/proc");
    fs::create_dir(proc).unwrap();
    let mount = |arguments: &[&str]| {
        assert!(Command::new("mount").args(arguments).arg(proc).status().unwrap().success());
    };
    mount(&["--bind", "/proc"]);
    mount(&["-o", "remount,bind,ro"]);
    let dataplane = Dataplane::start(&Config { proc: proc.into(), ..lab.config().clone() }).unwrap();
    let pod = lab.pod("pod");
    let before = (pod.footprint(), lab.kernel_footprint());
    let failed = dataplane.register(pod.netns(), &[pod.v4().into()], Options::default());
    let Err(Error::Routing { action, cookie, source }) = failed else { panic!("{failed:?}") };
    assert_eq!((&*action, cookie), ("write sysctls", pod.cookie()));
    assert_eq!(source.kind(), io::ErrorKind::ReadOnlyFilesystem);
    before.0.expect_same(&pod.footprint());
    before.1.expect_same(&lab.kernel_footprint());
}
