//! Topology: the node, its pods, and hosts beyond it.

use std::{
    io::{BufRead as _, BufReader},
    net::{Ipv4Addr, Ipv6Addr},
    process::{Command, Stdio},
    thread,
};

use tokio::runtime::Handle;

use crate::{host::Host, ip};

/// The node's addresses on the bridge.
const NODE: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(10, 244, 0, 1), Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, 1));

/// Makes the calling thread's netns a node.
pub(crate) fn node(runtime: &Handle) -> Host {
    let node = Host::open("node", NODE, runtime.clone());
    quieten(&node);
    for (path, value) in [("net/ipv4/ip_forward", "1"), ("net/ipv6/conf/all/forwarding", "1")] {
        node.set_sysctl(path, value);
    }
    let (v4, v6) = NODE;
    node.ip(&format!(
        "link set lo up
         link add br0 type bridge mcast_snooping 0
         addr add {v4}/16 dev br0
         addr add {v6}/64 dev br0 nodad
         link set br0 up"
    ));
    node
}

/// The addresses of the pod with this number.
pub(crate) fn pod_addresses(number: u16) -> (Ipv4Addr, Ipv6Addr) {
    let [high, low] = number.to_be_bytes();
    (Ipv4Addr::new(10, 244, high, low), Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, 0, number))
}

/// A netns on the bridge.
pub(crate) fn pod(name: &str, number: u16, runtime: &Handle) -> Host {
    plug_in(empty(name, pod_addresses(number), runtime), number)
}

/// A netns on the bridge that belongs to a user namespace of its own, as with `hostUsers: false`.
pub(crate) fn pod_of_user_namespace(name: &str, number: u16, runtime: &Handle) -> Host {
    ip::batch(None, &format!("netns attach {name} {}", in_user_namespace()));
    plug_in(bare(name, pod_addresses(number), runtime), number)
}

/// Connects a netns to the bridge.
fn plug_in(host: Host, number: u16) -> Host {
    let (name, v4, v6) = (host.name(), host.v4(), host.v6());
    ip::batch(
        Some("node"),
        &format!(
            "link add veth-{number} type veth peer name eth0 netns {name}
             link set veth-{number} master br0 up"
        ),
    );
    let (via4, via6) = NODE;
    host.ip(&format!(
        "addr add {v4}/16 dev eth0
         addr add {v6}/64 dev eth0 nodad
         link set eth0 up
         route add default via {via4}
         route add default via {via6}"
    ));
    host
}

/// A netns behind a router, the node.
pub(crate) fn outside(name: &str, number: u16, runtime: &Handle) -> Host {
    let v4 = |last| Ipv4Addr::new(10, 245, number as u8, last);
    let v6 = |last| Ipv6Addr::new(0xfd00, 0x245, number, 0, 0, 0, 0, last);
    let host = empty(name, (v4(2), v6(2)), runtime);
    ip::batch(
        Some("node"),
        &format!(
            "link add out-{number} type veth peer name eth0 netns {name}
             addr add {}/24 dev out-{number}
             addr add {}/64 dev out-{number} nodad
             link set out-{number} up",
            v4(1),
            v6(1)
        ),
    );
    host.ip(&format!(
        "addr add {}/24 dev eth0
         addr add {}/64 dev eth0 nodad
         link set eth0 up
         route add default via {}
         route add default via {}",
        v4(2),
        v6(2),
        v4(1),
        v6(1)
    ));
    host
}

/// A netns with nothing but `lo`.
pub(crate) fn empty(name: &str, addresses: (Ipv4Addr, Ipv6Addr), runtime: &Handle) -> Host {
    // `ip -n` would do it in a mount namespace that nobody else sees.
    ip::batch(None, &format!("netns add {name}"));
    bare(name, addresses, runtime)
}

/// A netns that has its name already, with nothing but `lo`.
fn bare(name: &str, addresses: (Ipv4Addr, Ipv6Addr), runtime: &Handle) -> Host {
    let host = Host::open(name, addresses, runtime.clone());
    quieten(&host);
    host.ip("link set lo up");
    host
}

/// A process with a user namespace and a netns of its own; it ends when its netns has a name.
fn in_user_namespace() -> u32 {
    let mut process = Command::new("unshare");
    process.args(["--user", "--map-root-user", "--net", "sh", "-c", "echo; exec sleep 2"]);
    let mut process = process.stdout(Stdio::piped()).spawn().expect("unshare(1)");
    let mut said = String::new();
    let mut stdout = BufReader::new(process.stdout.take().expect("a pipe"));
    stdout.read_line(&mut said).expect("a line when it is there");
    let pid = process.id();
    thread::spawn(move || process.wait());
    pid
}

/// No address that is tentative for a second, no reverse path filter, no redirect past the router.
fn quieten(host: &Host) {
    for interfaces in ["all", "default"] {
        for (setting, value) in [
            ("ipv6/conf/{}/accept_dad", "0"),
            ("ipv6/conf/{}/dad_transmits", "0"),
            ("ipv4/conf/{}/rp_filter", "0"),
            ("ipv4/conf/{}/send_redirects", "0"),
        ] {
            host.set_sysctl(&format!("net/{}", setting.replace("{}", interfaces)), value);
        }
    }
}
