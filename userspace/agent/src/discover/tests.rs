//! Against a `/proc` of plain files.

use super::*;
use crate::enroll::fakes::Node;

const U1: &str = "11111111-29e7-460b-9bfe-9e5d8a1c4f60";
const U2: &str = "22222222-29e7-460b-9bfe-9e5d8a1c4f60";

fn wanted(uid: &str, address: &str) -> Wanted {
    Wanted { uid: uid.into(), hash: None, addresses: [address.parse().unwrap()].into() }
}

fn scan(node: &Node, wanted: &[Wanted]) -> BTreeMap<String, Result<Found, Unfound>> {
    let host = id_of(&node.netns_path("host"));
    let paths = HostPaths { proc: node.directory.path().join("proc"), netns_prefix: "/nowhere".into() };
    super::scan(&*node.dataplane, &paths, host, wanted).unwrap()
}

fn netns(node: &Node, name: &str) -> NetnsId {
    id_of(&node.netns_path(name)).unwrap()
}

#[test]
fn one_scan_finds_every_pod_by_its_oldest_process() {
    let node = Node::new();
    node.process(30, U1, "n1", "10.0.0.1");
    node.process(20, U2, "n2", "10.0.0.2 fd00::2");
    fs::create_dir_all(node.directory.path().join("proc/40/ns")).unwrap();
    let found = scan(&node, &[wanted(U1, "10.0.0.1"), wanted(U2, "fd00::2")]);
    let first = found[U1].as_ref().unwrap();
    assert_eq!((&first.path, first.id), (&PathBuf::from("/proc/30/ns/net"), netns(&node, "n1")));
    assert_eq!(first.container, Some(format!("{:064x}", 30)));
    assert_eq!(found[U2].as_ref().unwrap().id, netns(&node, "n2"));
}

#[test]
fn a_process_in_another_netns_is_not_taken_for_the_pod_s() {
    let node = Node::new();
    node.process(10, U1, "host", "10.0.0.1");
    node.process(20, U1, "foreign", "172.17.0.1");
    let found = scan(&node, &[wanted(U1, "10.0.0.1")]);
    let Err(Unfound::NotItsAddress { candidates }) = &found[U1] else {
        panic!("{found:?}");
    };
    assert!(candidates.to_string().starts_with("pid 20 in "), "{candidates}");
    node.process(30, U1, "own", "10.0.0.1");
    let found = scan(&node, &[wanted(U1, "10.0.0.1")]);
    assert_eq!(found[U1].as_ref().unwrap().id, netns(&node, "own"));
}

#[test]
fn of_two_netns_with_the_address_the_older_process_s_is_the_sandbox() {
    let node = Node::new();
    node.process(30, U1, "made-later", "10.0.0.1");
    node.process(20, U1, "sandbox", "10.0.0.1");
    let found = scan(&node, &[wanted(U1, "10.0.0.1")]);
    assert_eq!(found[U1].as_ref().unwrap().id, netns(&node, "sandbox"));
}

#[test]
fn a_static_pod_is_found_by_its_hash() {
    let node = Node::new();
    let hash = "2c48913c29e7460b9bfe9e5d8a1c4f60";
    node.process(30, hash, "n1", "10.0.0.1");
    let pod = Wanted { hash: Some(hash.into()), ..wanted(U1, "10.0.0.1") };
    assert_eq!(scan(&node, &[pod])[U1].as_ref().unwrap().id, netns(&node, "n1"));
}

#[test]
fn a_container_of_crio_without_a_uid_is_known_by_a_unique_address() {
    let node = Node::new();
    for (pid, name, addresses) in [(20, "n1", "10.0.0.1"), (30, "n2", "10.0.0.2"), (40, "n3", "10.0.0.2")] {
        node.process(pid, "-", name, addresses);
        let cgroup = format!("0::/machine.slice/crio-{pid:064x}.scope\n");
        fs::write(node.directory.path().join(format!("proc/{pid}/cgroup")), cgroup).unwrap();
    }
    let found = scan(&node, &[wanted(U1, "10.0.0.1"), wanted(U2, "10.0.0.2"), wanted("u3", "10.0.0.3")]);
    assert_eq!(found[U1].as_ref().unwrap().id, netns(&node, "n1"));
    let Err(Unfound::Ambiguous { candidates }) = &found[U2] else {
        panic!("{found:?}");
    };
    let candidates = candidates.to_string();
    assert!(candidates.contains("pid 30 in ") && candidates.contains("pid 40 in "), "{candidates}");
    assert_eq!(found["u3"], Err(Unfound::NoProcess));
}
