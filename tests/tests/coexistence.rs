//! BPF programs, rules, routes and queueing disciplines of others on the same pod and node.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{fs::File, io, net::Ipv4Addr};

use culvert_dataplane::Restored;
use culvert_tests::{Direction, Family, Foreign, Lab, Pod, eventually};

/// A connection each way and family: out by ztunnel, in by ztunnel.
fn talk(lab: &Lab, pod: &Pod, other: &Pod) {
    lab.ztunnel().forget();
    for family in Family::BOTH {
        assert_eq!(pod.connect(other.at(family, 80)).unwrap().say(b"out"), b"out");
        assert_eq!(other.connect(pod.at(family, 80)).unwrap().say(b"in"), b"in");
    }
    assert_eq!(lab.ztunnel().wait_for_accepted(15001, 2).len(), 2);
    assert_eq!(lab.ztunnel().wait_for_accepted(15006, 2).len(), 2);
}

/// The same once nothing is captured any more.
fn talk_directly(lab: &Lab, pod: &Pod, other: &Pod) {
    lab.ztunnel().forget();
    for family in Family::BOTH {
        assert_eq!(pod.connect(other.at(family, 80)).unwrap().say(b"out"), b"out");
        assert_eq!(other.connect(pod.at(family, 80)).unwrap().say(b"in"), b"in");
    }
    assert_eq!(lab.ztunnel().saw().accepted(), []);
}

fn release(pod: &Pod) {
    pod.release().unwrap();
    eventually("the last captured connection to close", || {
        (pod.restore().unwrap() == Restored::Complete).then_some(())
    });
}

/// Every program runs during `work`.
fn expect_runs(programs: &[(&str, Foreign)], work: impl FnOnce()) {
    let before: Vec<_> = programs.iter().map(|(_, program)| program.runs()).collect();
    work();
    for ((name, program), before) in programs.iter().zip(before) {
        assert!(program.runs() > before, "{name} does not run any more: {before} times, and no more");
    }
}

/// Attaches the programs before or after capture, and lets both talk before, during and after it.
fn expect_coexistence(attach: impl Fn(&Lab, &Pod) -> io::Result<Vec<(&'static str, Foreign)>>) {
    let lab = Lab::new();
    let (first, second, other) = (lab.pod("first"), lab.pod("second"), lab.pod("other"));
    let _servers = [first.serve("[::]:80"), second.serve("[::]:80"), other.serve("[::]:80")];

    let programs = attach(&lab, &first).unwrap();
    expect_runs(&programs, || talk_directly(&lab, &first, &other));
    let first = first.captured();
    expect_runs(&programs, || talk(&lab, &first, &other));
    release(&first);
    expect_runs(&programs, || talk_directly(&lab, &first, &other));

    let second = second.captured();
    let programs = attach(&lab, &second).unwrap();
    expect_runs(&programs, || talk(&lab, &second, &other));
    lab.restart_dataplane();
    lab.dataplane().resume(second.netns(), &[second.v4().into(), second.v6().into()]).unwrap();
    expect_runs(&programs, || talk(&lab, &second, &other));
    release(&second);
    expect_runs(&programs, || talk_directly(&lab, &second, &other));
}

#[test]
fn foreign_tcx_programs_of_linux_6_6_keep_running() {
    if !Foreign::has_tcx() {
        println!("skipped: this kernel has no TCX");
        return;
    }
    expect_coexistence(|_, pod| {
        Ok(vec![
            ("TCX ingress", Foreign::tcx(pod, "eth0", Direction::Ingress)?),
            ("TCX egress", Foreign::tcx(pod, "eth0", Direction::Egress)?),
        ])
    });
}

#[test]
fn foreign_clsact_filters_keep_running() {
    expect_coexistence(|lab, pod| {
        let bpffs = &lab.config().bpffs;
        Ok(vec![
            ("clsact ingress", Foreign::clsact(pod, "eth0", Direction::Ingress, bpffs)?),
            ("clsact egress", Foreign::clsact(pod, "eth0", Direction::Egress, bpffs)?),
        ])
    });
}

#[test]
fn a_foreign_sk_lookup_that_selects_nothing_keeps_running_and_changes_nothing() {
    expect_coexistence(|_, pod| Ok(vec![("sk_lookup", Foreign::sk_lookup(pod)?)]));
}

#[test]
fn foreign_connect4_and_sock_ops_on_the_root_cgroup_keep_running() {
    expect_coexistence(|lab, _| {
        let cgroup = File::open(&lab.config().cgroup)?;
        Ok(vec![("connect4", Foreign::connect4(&cgroup)?), ("sock_ops", Foreign::sock_ops(&cgroup)?)])
    });
}

#[test]
fn a_foreign_sk_lookup_that_selects_nothing_does_not_open_what_is_refused() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let _before = Foreign::sk_lookup(&pod).unwrap();
    let pod = pod.captured();
    let _after = Foreign::sk_lookup(&pod).unwrap();
    let servers = [pod.serve("[::]:80"), other.serve("[::]:80")];
    lab.ztunnel().kill();
    for family in Family::BOTH {
        for (from, to) in [(&pod, &other), (&other, &pod)] {
            let refused = from.connect(to.at(family, 80)).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused, "{} to {}", from.name(), to.name());
        }
    }
    assert!(servers.iter().all(|server| server.accepted().is_empty()));
    assert_eq!((pod.counters().refused_outbound, pod.counters().lookup_refused_in), (2, 2));
}

/// As Cilium's socket load balancer, before our programs on the cgroup or after them.
fn expect_balanced(balancer_first: bool) {
    let vip = Ipv4Addr::new(10, 96, 0, 77);
    let lab = Lab::builder().without_dataplane().without_ztunnel().start();
    let cgroup = File::open(&lab.config().cgroup).unwrap();
    let (client, server) = (lab.pod("client"), lab.pod("server"));
    let attach = || Foreign::balancer(&cgroup, vip, server.v4()).unwrap();
    let early = balancer_first.then(attach);
    let agent = lab.agent_process(&[]);
    let balancer = early.unwrap_or_else(attach);
    let ztunnel = lab.start_ztunnel(culvert_tests::Behaviour::default());
    agent.capture(&client);
    agent.capture(&server);
    let echo = server.serve("[::]:80");
    let wire = lab.wire();

    assert_eq!(client.connect((vip, 80)).unwrap().say(b"service"), b"service");
    assert_eq!(balancer.runs(), 1);
    let accepted = echo.next_accepted();
    assert_eq!((accepted.peer.ip(), accepted.local), (client.v4().into(), (server.v4(), 80).into()));
    // Out by 15001 with the address that the balancer chose, in by 15006.
    let to = (server.v4(), 80).into();
    assert_eq!(ztunnel.wait_for_accepted(15001, 1)[0].destination, to);
    assert_eq!(ztunnel.wait_for_accepted(15006, 1)[0].destination, to);
    let frames = wire.stop();
    assert!(frames.syns_to((vip, 80)).is_empty(), "{frames:?}");

    // Nothing of it gets out without ztunnel, and nothing is balanced past it.
    ztunnel.kill();
    let wire = lab.wire();
    let refused = client.connect((vip, 80)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    let frames = wire.stop();
    assert!(frames.syns_from(client.v4()).is_empty(), "{frames:?}");
}

#[test]
fn a_vip_that_a_foreign_connect4_before_ours_rewrites_is_captured_and_reaches_the_pod() {
    expect_balanced(true);
}

#[test]
fn a_vip_that_a_foreign_connect4_after_ours_rewrites_is_captured_and_reaches_the_pod() {
    expect_balanced(false);
}

#[test]
fn detaching_a_pod_leaves_rules_routes_and_qdiscs_of_others_alone() {
    let lab = Lab::new();
    let (pod, other) = (lab.pod("pod"), lab.pod("other"));
    let _servers = [pod.serve("[::]:80"), other.serve("[::]:80")];
    // In our table, at our preferences and around them.
    for (family, net) in [("-4", "10.99.0.0/24"), ("-6", "fd00:99::/64")] {
        for line in [
            "rule add pref 50 fwmark 0x5000 lookup 77",
            &format!("rule add pref 90 to {net} lookup 77"),
            &format!("rule add pref 100 from {net} lookup 77"),
            &format!("rule add pref 200 from {net} lookup 100"),
            &format!("route add {net} dev eth0 table 77"),
            &format!("route add {net} dev eth0 table 100"),
            "route add unreachable default metric 9999 table 100",
        ] {
            let added = pod.command("ip").arg(family).args(line.split(' ')).status().unwrap();
            assert!(added.success(), "{line}");
        }
    }
    for arguments in ["qdisc replace dev eth0 root pfifo limit 77", "qdisc add dev eth0 clsact"] {
        assert!(pod.command("tc").args(arguments.split(' ')).status().unwrap().success());
    }
    let before = pod.footprint();
    let pod = pod.captured();
    talk(&lab, &pod, &other);
    release(&pod);
    before.expect_same(&pod.footprint());
    talk_directly(&lab, &pod, &other);
}
