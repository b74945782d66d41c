//! The loading process ends, is killed, is replaced: traffic does not notice.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "test code outside #[test] functions: a panic shows the line"
)]

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use culvert_abi::{
    PodEntry,
    names::{COUNTERS, MAPS, OWN_ADDRESSES, POD_ADDRESSES, PODS, PROCESS_EXIT, ZTUNNELS},
    pod::{ACTIVE, INTRODUCTION},
};
use culvert_dataplane::{Dataplane, Error, Netns, Options, Restored};
use culvert_tests::{Behaviour, Family, Host, Lab, Pod, eventually};

/// Four clients make 200 connections a second together.
const PACE: Duration = Duration::from_millis(20);

/// Sets it at the end of a scope.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Connections without end, each answered by an echo server. Panics at the end if one failed.
struct Load<'a> {
    ways: [(&'a Host, &'a Host); 2],
    stop: AtomicBool,
    /// For each way.
    made: [AtomicUsize; 2],
    failed: Mutex<Vec<String>>,
}

impl<'a> Load<'a> {
    /// One client for each way and family. Returns how many were made each way.
    fn during(ways: [(&'a Host, &'a Host); 2], work: impl FnOnce(&Self)) -> [usize; 2] {
        let load =
            Self { ways, stop: AtomicBool::new(false), made: Default::default(), failed: Mutex::default() };
        thread::scope(|scope| {
            for way in [0, 1] {
                for family in Family::BOTH {
                    let load = &load;
                    scope.spawn(move || load.ways[way].0.run(|| load.run(way, family)));
                }
            }
            // Also when `work` panics: the scope waits for its threads.
            let _end = Ending(&load.stop);
            load.wait_for_more(40);
            work(&load);
            load.wait_for_more(40);
        });
        let failed = load.failed.into_inner().unwrap();
        assert!(failed.is_empty(), "{} of {:?}: {failed:#?}", failed.len(), load.made);
        load.made.map(AtomicUsize::into_inner)
    }

    fn run(&self, way: usize, family: Family) {
        let (from, to) = self.ways[way];
        let mut next = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            let connected = from.to(to.at(family, 80)).connect_here();
            match connected.and_then(|mut connection| connection.try_say(b"hello")) {
                Ok(answer) => assert_eq!(answer, b"hello"),
                Err(error) => {
                    let failed = format!("{} to {}: {error}", from.name(), to.at(family, 80));
                    self.failed.lock().unwrap().push(failed);
                }
            }
            self.made[way].fetch_add(1, Ordering::Relaxed);
            next += PACE;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }

    /// Waits until this many connections more have been made, or failed.
    fn wait_for_more(&self, count: usize) {
        let made = || self.made.iter().map(|made| made.load(Ordering::Relaxed)).sum::<usize>();
        let enough = made() + count;
        eventually(&format!("{count} connections"), || (made() >= enough).then_some(()));
    }
}

/// Every file below the bpffs with the id of the program, map or link that it pins.
fn pins(lab: &Lab) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for (kind, directory) in [("map", "maps"), ("link", "links"), ("link", "pods")] {
        let directory = lab.config().bpffs.join("culvert/v1").join(directory);
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let shown = show(kind, &entry.path());
            found.push((entry.path().display().to_string(), shown["id"].as_u64().unwrap()));
        }
    }
    found.sort();
    found
}

/// What bpftool says of a pin.
fn show(kind: &str, pin: &Path) -> serde_json::Value {
    let output = Command::new("bpftool").args(["--json", kind, "show", "pinned"]).arg(pin).output();
    let text = output.expect("bpftool must be installed").stdout;
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", pin.display()))
}

/// Those that are never replaced: the kernel puts no other program into a link to a tracepoint.
fn lasting_pins(lab: &Lab) -> Vec<(String, u64)> {
    pins(lab).into_iter().filter(|(path, _)| !path.ends_with(PROCESS_EXIT)).collect()
}

/// The programs behind the pinned links of a directory.
fn programs(lab: &Lab, directory: &str) -> Vec<u64> {
    let links = pins(lab).into_iter().filter(|(path, _)| path.contains(directory));
    links.map(|(path, _)| show("link", Path::new(&path))["prog_id"].as_u64().unwrap()).collect()
}

#[test]
fn an_agent_is_killed_and_replaced_under_load_without_a_failed_connection() {
    let lab = Lab::builder().without_dataplane().without_ztunnel().start();
    let agent = lab.agent_process(&[]);
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let _servers = [pod.serve("[::]:80"), other.serve("[::]:80")];
    agent.capture(&pod);
    let (before, old) =
        (lasting_pins(&lab), ["/links/", "/pods/"].map(|directory| programs(&lab, directory)));
    let mut agent = Some(agent);
    let [outbound, inbound] = Load::during([(&pod, &other), (&other, &pod)], |load| {
        for _ in 0..3 {
            agent.take().unwrap().kill();
            // Nobody is there now.
            load.wait_for_more(40);
            agent = Some(lab.agent_process(&[&pod]));
            load.wait_for_more(40);
        }
    });
    // None failed, and none passed by.
    ztunnel.wait_for_accepted(15001, outbound);
    ztunnel.wait_for_accepted(15006, inbound);
    assert_eq!(lasting_pins(&lab), before, "links and maps are those of the first agent");
    let [node, of_pod] = old;
    let new = programs(&lab, "/links/");
    assert!(new.iter().all(|program| !node.contains(program)), "programs {node:?} are still in {new:?}");
    assert_eq!(programs(&lab, "/pods/"), of_pod, "the same version has the same program for the pod");
    // The last agent can end what the first began.
    agent.unwrap().release(&pod);
    let entry: Option<PodEntry> = lab.map(PODS).get(&pod.cookie());
    assert!(entry.is_none_or(|entry| entry.state != ACTIVE), "{entry:?}");
}

#[test]
fn programs_are_replaced_in_place_under_load_without_a_failed_connection() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod").captured(), lab.pod("other"));
    let _servers = [pod.serve("[::]:80"), other.serve("[::]:80")];
    let before = lasting_pins(&lab);
    let [outbound, inbound] = Load::during([(&pod, &other), (&other, &pod)], |load| {
        for _ in 0..5 {
            let old = [programs(&lab, "/links/"), programs(&lab, "/pods/")].concat();
            lab.restart_dataplane();
            lab.dataplane().renew(pod.cookie()).unwrap();
            let new = [programs(&lab, "/links/"), programs(&lab, "/pods/")].concat();
            assert!(new.iter().all(|program| !old.contains(program)), "{old:?} {new:?}");
            lab.dataplane().resume(pod.netns(), &[pod.v4().into(), pod.v6().into()]).unwrap();
            load.wait_for_more(10);
        }
    });
    assert_eq!(lasting_pins(&lab), before);
    let counters = pod.counters();
    assert_eq!(counters.refused_outbound + counters.lookup_refused_in + counters.lookup_refused_out, 0);
    let (outbound, inbound) = (outbound as u64, inbound as u64);
    assert_eq!((counters.captured_outbound, counters.accepted_outbound), (outbound, outbound));
    assert_eq!(counters.accepted_inbound, inbound);
    // The tracepoint is attached, too.
    lab.ztunnel().kill();
    assert_eq!(lab.map(ZTUNNELS).keys::<u32>(), [0; 0]);
}

#[test]
fn a_killed_agent_leaves_no_introduction_behind() {
    let lab = Lab::builder().without_dataplane().without_ztunnel().start();
    let agent = lab.agent_process(&[]);
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let introductions = || {
        let pods = lab.map(PODS);
        let is_introduction =
            |cookie: &u64| pods.get(cookie).is_some_and(|entry: PodEntry| entry.state == INTRODUCTION);
        pods.keys::<u64>().into_iter().filter(is_introduction).collect::<Vec<_>>()
    };
    let first = introductions();
    assert_eq!(first.len(), 1);
    agent.kill();
    let _agent = lab.agent_process(&[]);
    eventually("the second introduction, and no other", || {
        let now = introductions();
        (now.len() == 1 && now != first).then_some(())
    });
}

#[test]
fn a_second_start_in_one_bpffs_adopts_the_first() {
    let lab = Lab::builder().without_ztunnel().start();
    let before = (lasting_pins(&lab), lab.kernel_footprint());
    drop(Dataplane::start(lab.config()).unwrap());
    assert_eq!(lasting_pins(&lab), before.0);
    before.1.expect_same(&lab.kernel_footprint());

    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let (pod, other) = (lab.pod("pod").captured(), lab.pod("other"));
    let _servers = [pod.serve("[::]:80"), other.serve("[::]:80")];
    let before = lasting_pins(&lab);
    let second = Dataplane::start(lab.config()).unwrap();
    assert_eq!(lasting_pins(&lab), before);
    for family in Family::BOTH {
        assert_eq!(pod.connect(other.at(family, 80)).unwrap().say(b"out"), b"out");
        assert_eq!(other.connect(pod.at(family, 80)).unwrap().say(b"in"), b"in");
    }
    let counters = second.counters(pod.cookie()).unwrap();
    assert_eq!((counters.accepted_outbound, counters.accepted_inbound), (2, 2));
    assert_eq!(counters, pod.counters());
    second.withdraw(pod.netns()).unwrap();
    pod.remove_from_ztunnel().unwrap();
    eventually("the end of captured connections", || {
        (second.restore(pod.netns()).unwrap() == Restored::Complete).then_some(())
    });
}

#[test]
fn a_pinned_map_of_another_shape_is_refused_and_nothing_is_changed() {
    let lab = Lab::builder().without_dataplane().without_ztunnel().start();
    let maps = lab.config().bpffs.join("culvert/v1/maps");
    fs::create_dir_all(&maps).unwrap();
    let size = size_of::<PodEntry>().to_string();
    // Type, key, value, entries, flags (BPF_F_NO_PREALLOC).
    for (what, shape) in [
        ("type", ["lru_hash", "8", &size, "4096", "0"]),
        ("key", ["hash", "4", &size, "4096", "1"]),
        ("value", ["hash", "8", "32", "4096", "1"]),
        ("entries", ["hash", "8", &size, "4095", "1"]),
        ("flags", ["hash", "8", &size, "4096", "0"]),
    ] {
        let pin = maps.join(PODS);
        let [kind, key, value, entries, flags] = shape;
        let create = ["type", kind, "key", key, "value", value, "entries", entries, "flags", flags];
        let mut bpftool = Command::new("bpftool");
        bpftool.args(["map", "create"]).arg(&pin).args(create).args(["name", PODS]);
        assert!(bpftool.status().unwrap().success(), "{what}");
        let before = pins(&lab);

        let refused = Dataplane::start(lab.config()).err().expect(what);
        let Error::PinMismatch { path, directory, .. } = &refused else { panic!("{what}: {refused:?}") };
        assert_eq!(*path, pin);
        let text = refused.to_string();
        assert!(text.contains(pin.to_str().unwrap()), "{text}");
        assert!(text.contains(&format!("remove {}", directory.display())), "{text}");
        assert_eq!(pins(&lab), before, "{what}");
        fs::remove_file(&pin).unwrap();
    }
    // The remedy helps.
    Dataplane::start(lab.config()).unwrap();
    assert_eq!(fs::read_dir(&maps).unwrap().count(), MAPS.len());
}

#[test]
fn a_netns_that_vanished_while_no_agent_ran_is_collected_at_the_next_start() {
    let lab = Lab::builder().without_dataplane().without_ztunnel().start();
    drop(Dataplane::start(lab.config()).unwrap());
    let before = lab.kernel_footprint();
    let dataplane = Dataplane::start(lab.config()).unwrap();
    let (vanishing, staying) = (Netns::create().unwrap(), Netns::create().unwrap());
    let cookie = vanishing.cookie();
    for (netns, address) in [(&vanishing, "10.9.9.1"), (&staying, "10.9.9.2")] {
        dataplane.register(netns, &[address.parse().unwrap()], Options::default()).unwrap();
        dataplane.activate(netns).unwrap();
    }
    let pin = lab.config().bpffs.join("culvert/v1/pods").join(cookie.to_string());
    assert_ne!(show("link", &pin)["netns_ino"], 0);
    drop((dataplane, vanishing));
    // The kernel takes a namespace apart in the background.
    eventually("the link to lose its netns", || (show("link", &pin)["netns_ino"] == 0).then_some(()));

    let dataplane = Dataplane::start(lab.config()).unwrap();
    assert!(!pin.exists());
    assert_eq!(lab.map(PODS).keys::<u64>(), [staying.cookie()]);
    assert_eq!(lab.map(POD_ADDRESSES).keys::<culvert_abi::Address>().len(), 1);
    assert!(!lab.map(COUNTERS).keys().contains(&cookie));
    let own = lab.map(OWN_ADDRESSES).keys::<culvert_abi::OwnAddress>();
    assert!(own.iter().all(|own| own.netns == staying.cookie()), "{own:?}");
    // A netns that lives is none of them.
    assert_eq!(dataplane.detach(&staying).unwrap(), Restored::Complete);
    before.expect_same(&lab.kernel_footprint());
}

#[test]
fn a_netns_that_vanished_registered_or_draining_is_collected_too() {
    let lab = Lab::builder().without_dataplane().without_ztunnel().start();
    drop(Dataplane::start(lab.config()).unwrap());
    let before = lab.kernel_footprint();
    let dataplane = Dataplane::start(lab.config()).unwrap();
    let (registered, draining) = (Netns::create().unwrap(), Netns::create().unwrap());
    for (netns, address) in [(&registered, "10.9.9.1"), (&draining, "10.9.9.2")] {
        dataplane.register(netns, &[address.parse().unwrap()], Options::default()).unwrap();
    }
    dataplane.activate(&draining).unwrap();
    dataplane.withdraw(&draining).unwrap();
    drop((dataplane, registered, draining));
    // The kernel takes a namespace apart in the background.
    eventually("a start that finds both gone", || {
        drop(Dataplane::start(lab.config()).unwrap());
        lab.map(PODS).keys::<u64>().is_empty().then_some(())
    });
    before.expect_same(&lab.kernel_footprint());
}

#[test]
fn links_that_an_earlier_process_pinned_on_another_cgroup_move_to_the_configured_one() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod").captured(), lab.pod("other"));
    let _servers = [pod.serve("[::]:80"), other.serve("[::]:80")];
    let lower = lab.config().cgroup.join("lower");
    fs::create_dir(&lower).unwrap();
    let cgroups = || {
        let links = lab.config().bpffs.join("culvert/v1/links");
        let entries = fs::read_dir(links).unwrap().flatten();
        // The one of a tracepoint has none.
        entries.filter_map(|entry| show("link", &entry.path())["cgroup_id"].as_u64()).collect::<Vec<_>>()
    };
    let config = culvert_dataplane::Config { cgroup: lower.clone(), ..lab.config().clone() };
    drop(Dataplane::start(&config).unwrap());
    assert_eq!(cgroups(), [fs::metadata(&lower).unwrap().ino(); 7]);
    drop(Dataplane::start(lab.config()).unwrap());
    assert_eq!(cgroups(), [fs::metadata(&lab.config().cgroup).unwrap().ino(); 7]);
    assert_captured(&lab, &pod, &other);
    fs::remove_dir(&lower).unwrap();
}

fn assert_captured(lab: &Lab, pod: &Pod, other: &Pod) {
    for family in Family::BOTH {
        assert_eq!(pod.connect(other.at(family, 80)).unwrap().say(b"out"), b"out");
    }
    assert_eq!(lab.ztunnel().wait_for_accepted(15001, 2).len(), 2);
}
