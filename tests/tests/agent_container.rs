//! The agent as it runs in a cluster: a container with few capabilities, read-only paths and the host's paths
//! mounted, started by the runtime whose pods it takes into the mesh.

use std::{fs, io, net::IpAddr, path::Path, time::Duration};

use culvert_tests::{
    Behaviour, Chain, Containerd, Image, Lab, Plugins, PodSpec, Sandbox, containerd::Container, http, within,
};
use serde_json::{Value, json};

/// What kubelet sets for containers that are not privileged (Kubernetes 1.37, pkg/securitycontext/util.go).
const MASKED: [&str; 10] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// All that the agent has.
const CAPABILITIES: [&str; 4] = ["BPF", "NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"];

/// MountPropagation of CRI's api.proto.
const HOST_TO_CONTAINER: u8 = 1;

fn container(node: &Containerd<'_>, capabilities: &[&str]) -> Value {
    let (lab, own) = (node.lab(), node.lab().directory());
    let mount = |host: &Path, container: &str| json!({ "host_path": host, "container_path": container });
    let mut netns = mount(&node.netns_directory(), "/host/var/run/netns");
    // Those that are made after it has started.
    netns["propagation"] = HOST_TO_CONTAINER.into();
    json!({
        "mounts": [
            netns,
            mount(Path::new("/proc"), "/host/proc"),
            mount(&lab.config().cgroup, "/host/sys/fs/cgroup"),
            mount(&lab.config().bpffs, "/sys/fs/bpf"),
            mount(own, &own.display().to_string()),
        ],
        "linux": {
            "security_context": {
                "capabilities": { "add_capabilities": capabilities, "drop_capabilities": ["ALL"] },
                "readonly_rootfs": true,
                "no_new_privs": true,
                "masked_paths": MASKED,
                "readonly_paths": READ_ONLY,
                // RuntimeDefault.
                "seccomp": { "profile_type": 0 },
            },
        },
    })
}

/// Starts it in a pod of its own.
fn start(
    pod: &Sandbox<'_>,
    node: &Containerd<'_>,
    capabilities: &[&str],
    more: &[&str],
) -> io::Result<Container> {
    let directory = node.lab().directory();
    fs::create_dir_all(directory.join("mesh"))?;
    let mesh = json!({ "namespaces": { "default": { "labels": { "istio.io/dataplane-mode": "ambient" } } } });
    fs::write(directory.join("mesh/mesh.yaml"), mesh.to_string())?;
    let own = directory.display();
    let arguments = [
        format!("--standalone={own}/mesh/mesh.yaml"),
        format!("--run-dir={own}/run"),
        format!("--scope-file={own}/lib/scope.json"),
        format!("--zds-socket={own}/zds.sock"),
        "--host-proc=/host/proc".to_owned(),
        "--host-cgroup=/host/sys/fs/cgroup".to_owned(),
        "--netns-prefix=/host".to_owned(),
    ];
    let arguments: Vec<_> = arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
    Ok(pod.run_image("agent", &Image::of("culvert-agent"), &arguments, &container(node, capabilities)))
}

#[test]
fn an_agent_in_a_container_takes_pods_in_and_out() {
    let lab = Lab::bare();
    let node = Containerd::start(&lab, Chain::new(&lab, Plugins::Debian));
    // It starts while no agent is there: the chain has it in its list of exempt DaemonSets.
    let pod = node.sandbox(&PodSpec::new("culvert-node-x7k2p").namespace("culvert-system"));
    // The lab's cgroup is not the root of the host's.
    let agent = start(&pod, &node, &CAPABILITIES, &["--skip-probe"]).unwrap();
    let address = pod.addresses().into_iter().find(IpAddr::is_ipv4).unwrap();
    within(Duration::from_secs(60), "readyz", || {
        let connection = lab.node().connect((address, 15014)).ok()?;
        let answer = http::request(connection.stream(), "GET", "/readyz", "").ok()?;
        (answer.status == 200).then_some(())
    });

    let ztunnel = lab.start_stand_in(Behaviour::default());
    let server = lab.pod("server");
    let echo = server.serve("[::]:80");
    let web = node.sandbox(&PodSpec::new("web"));
    let own = web.addresses();
    for (name, address) in [("v4", format!("{}:80", server.v4())), ("v6", format!("[{}]:80", server.v6()))] {
        web.run(name, &[&address]).wait_for("connected");
        assert!(own.contains(&echo.next_accepted().peer.ip()));
    }
    assert_eq!(ztunnel.wait_for_accepted(15001, 2).len(), 2, "{}", agent.output());
    let records = lab.directory().join("run/pods");
    assert_eq!(fs::read_dir(&records).unwrap().count(), 1);
    web.remove().unwrap();
    within(Duration::from_secs(10), "the end of its record", || {
        (fs::read_dir(&records).ok()?.count() == 0).then_some(())
    });
}

#[test]
fn an_agent_in_a_container_that_lacks_a_capability_says_which() {
    let lab = Lab::bare();
    let node = Containerd::start(&lab, Chain::new(&lab, Plugins::Debian));
    let pod = node.sandbox(&PodSpec::new("culvert-node-x7k2p").namespace("culvert-system"));
    let lacking: Vec<_> =
        CAPABILITIES.into_iter().filter(|name| !["SYS_PTRACE", "BPF"].contains(name)).collect();
    let agent = start(&pod, &node, &lacking, &[]).unwrap();
    agent.wait_for("missing: BPF");
    agent.wait_for("/host/proc/1/ns/net");
    agent.wait_for("needs SYS_PTRACE");
}
