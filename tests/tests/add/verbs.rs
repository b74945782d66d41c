//! CHECK, STATUS, GC, and who may speak to the agent.

use std::{
    fs::{self, Permissions},
    io,
    os::{
        fd::AsRawFd as _,
        unix::{fs::PermissionsExt as _, net::UnixStream},
    },
    path::Path,
    process::Command,
    thread,
};

use culvert_abi::names::PODS;
use culvert_tests::{Behaviour, Lab, http};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, send, socket};

/// Somebody who is not root.
const NOBODY: u32 = 65534;

#[test]
fn a_check_right_after_an_add_passes() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    for number in 0..10 {
        let pod = lab.pod(&format!("p{number}"));
        agent.add(&pod);
        agent.runtime(&pod).check().succeeds();
    }
    assert!(!agent.log().all().iter().any(|line| line.contains("cannot tell whether a pod is captured")));
}

#[test]
fn a_check_passes_while_the_agent_is_away_or_slow_and_for_pods_that_are_none_of_the_mesh() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    agent.add(&pod);
    agent.runtime(&pod).container("unknown").check().succeeds().at_once();
    agent.runtime(&pod).as_pod("plain", "web").container("c").check().succeeds().at_once();
    // Captured, though nobody answers.
    ztunnel.kill();
    agent.runtime(&pod).check().succeeds();
    agent.freeze();
    agent.runtime(&pod).check().succeeds();
    agent.kill();
    agent.runtime(&pod).check().succeeds().at_once();
}

#[test]
fn a_check_fails_once_capture_was_removed_by_hand() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let [unpinned, unknown, unrouted] = ["unpinned", "unknown", "unrouted"].map(|name| lab.pod(name));
    for pod in [&unpinned, &unknown, &unrouted] {
        agent.add(pod);
    }
    fs::remove_file(lab.config().bpffs.join(format!("culvert/v1/pods/{}", unpinned.cookie()))).unwrap();
    let map = lab.config().bpffs.join("culvert/v1/maps").join(PODS).display().to_string();
    let key: Vec<_> = unknown.cookie().to_ne_bytes().iter().map(u8::to_string).collect();
    let deleted = Command::new("bpftool").args(["map", "delete", "pinned", &map, "key"]).args(key).status();
    assert!(deleted.unwrap().success());
    // No rule and no route of ours in the pod, and the agent does not see it.
    agent.freeze();
    unrouted.ip("link set lo down");
    nix::sys::signal::kill(agent.pid(), nix::sys::signal::Signal::SIGCONT).unwrap();
    for pod in [&unpinned, &unknown, &unrouted] {
        agent.runtime(pod).check().fails(101, "the pod is enrolled and is not captured; …");
    }
}

#[test]
fn a_status_succeeds_without_agent_and_without_ztunnel() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let pod = lab.pod("pod");
    let status = agent.runtime(&pod).status();
    status.succeeds();
    agent.wait_for_log("ztunnel: none is connected");
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    agent.runtime(&pod).status().succeeds();
    drop(ztunnel);
    agent.kill();
    let status = agent.runtime(&pod).status();
    assert!(status.succeeds().stderr.contains("agent not reached"), "{status:?}");
    agent
        .runtime(&pod)
        .key("timeoutSeconds", "soon")
        .status()
        .fails(50, "the network configuration cannot be decoded; …");
}

#[test]
fn a_garbage_collection_of_one_network_leaves_the_others_alone() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let (pod, gone) = (lab.pod("pod"), lab.pod("gone"));
    let before = gone.footprint();
    agent.add(&pod);
    agent.add(&gone);
    let attachments =
        || agent.dump().iter().map(|pod| pod["attachments"].as_array().unwrap().len()).sum::<usize>();
    let storage = agent.runtime(&pod).key("name", "storage").ifname("net1");
    storage.add().succeeds();
    assert_eq!(attachments(), 3);
    agent.runtime(&pod).key("name", "another").gc(&[]).succeeds();
    assert_eq!(attachments(), 3);
    storage.gc(&[]).succeeds();
    assert_eq!(attachments(), 2);
    agent.runtime(&pod).gc(&["container-of-pod"]).succeeds();
    agent.expect_no_trace(&gone, &before);
    assert_eq!(agent.dump().len(), 1);
    agent.runtime(&pod).check().succeeds();
}

/// As a thread of another user's.
fn as_nobody<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let as_user = || {
        // SAFETY: the system call itself, of this thread only, which ends here.
        let result = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        work()
    };
    thread::scope(|scope| scope.spawn(as_user).join().unwrap())
}

#[test]
fn a_peer_that_is_not_root_gets_no_word_out_of_any_socket() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    agent.add(&pod);
    let zds = lab.directory().join("zds.sock");
    let sockets = [agent.run_directory().join("cni.sock"), agent.run_directory().join("admin.sock")];
    let denied = |path: &Path| as_nobody(|| UnixStream::connect(path).unwrap_err().kind());
    for path in sockets.iter().chain([&zds]) {
        assert_eq!(denied(path), io::ErrorKind::PermissionDenied);
    }
    // Somebody has opened them.
    for path in
        [lab.directory(), &agent.run_directory()].into_iter().chain(sockets.iter().map(|path| &**path))
    {
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    fs::set_permissions(&zds, Permissions::from_mode(0o777)).unwrap();
    for path in &sockets {
        let answer = as_nobody(|| http::request(UnixStream::connect(path).unwrap(), "GET", "/dump", ""));
        assert!(answer.is_err(), "{answer:?}");
    }
    agent.wait_for_log("connection of another user refused");
    let heard = as_nobody(|| {
        let family = AddressFamily::Unix;
        let socket = socket(family, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
        connect(socket.as_raw_fd(), &UnixAddr::new(&zds).unwrap()).unwrap();
        send(socket.as_raw_fd(), &[8, 1], MsgFlags::MSG_NOSIGNAL).ok();
        recv(socket.as_raw_fd(), &mut [0; 1024], MsgFlags::empty())
    });
    assert!(matches!(heard, Ok(0) | Err(_)), "{heard:?}");
    agent.wait_for_log("peer has uid 65534, expected 0");
    // Root's go on.
    agent.add(&lab.pod("another"));
    drop(ztunnel);
}

#[test]
fn a_pod_of_another_uid_than_the_file_names_is_waited_out_and_then_told() {
    let lab = Lab::bare();
    let entry = serde_json::json!({ "namespace": "default", "name": "web-0", "uid": "older" });
    let agent = lab.node_agent().patience(4).pod(entry).start();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    let runtime = agent.runtime(&pod).as_pod("default", "web-0");
    let message = "cannot tell whether the pod is one of the mesh; … is known with uid …, the runtime says …";
    runtime.clone().uid("newer").add().fails(11, message);
    runtime.uid("older").add().succeeds();
}

#[test]
fn a_listener_on_a_port_of_ztunnel_s_fails_the_add_with_its_name() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    let before = pod.footprint();
    let in_the_way = pod.serve("[::]:15006");
    agent.runtime(&pod).add().fails(101, "a process that is not ztunnel listens on …").at_once();
    drop(in_the_way);
    agent.expect_no_trace(&pod, &before);
    agent.add(&pod);
}

#[test]
fn a_pod_whose_own_rules_drop_loopback_fails_the_self_test() {
    let lab = Lab::bare();
    let agent = lab.start_node_agent();
    let _ztunnel = lab.start_ztunnel(Behaviour::default());
    let pod = lab.pod("pod");
    let iptables = |arguments: &str| {
        let arguments = arguments.split(' ');
        assert!(pod.command("iptables").args(arguments).status().unwrap().success());
    };
    iptables("-A INPUT -i lo -j DROP");
    let before = pod.footprint();
    agent.runtime(&pod).add().fails(103, "the self-test found that the pod is not captured; …");
    agent.expect_no_trace(&pod, &before);
    iptables("-D INPUT -i lo -j DROP");
    agent.add(&pod);
}
