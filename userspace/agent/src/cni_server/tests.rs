//! The server over a real socket, with the plugin's own client and with raw bytes.

use std::{io::Write as _, os::unix::net::UnixStream, path::PathBuf};

use culvert_cni::{
    client::{Client, Error},
    event::{IpConfig, IpNetwork, ValidAttachment},
};
use nix::unistd::Uid;
use rstest::rstest;
use tokio::sync::watch;

use super::*;
use crate::{
    enroll::{
        Pod,
        fakes::{Call, Dataplane, FakeZtunnel, Node, attachment},
    },
    membership::{Described, Undecided},
    unix_socket::OwnListener,
};

/// Namespace `shop` is in the mesh; nothing is known of `unknown`.
struct Shop;

impl Membership for Shop {
    async fn decide(&self, pod: &Named, _deadline: Instant) -> Result<Decision, Undecided> {
        let Named { namespace, name, uid } = pod.clone();
        match &*namespace {
            "shop" => {
                let uid = uid.unwrap_or_else(|| format!("{namespace}/{name}"));
                let pod = Pod { uid, namespace, name, service_account: "web".into() };
                Ok(Decision::Member { pod, bypass_inbound: false })
            }
            "unknown" => Err(Undecided::Unknown { namespace, name }),
            _ => Ok(Decision::Outside),
        }
    }

    fn changes(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }

    fn described(&self) -> Vec<Described> {
        Vec::new()
    }

    fn announce(&self, _pod: &Pod, _redirection: Redirection) {}

    fn report(&self, _pod: &Pod, _failure: &Failure) {}
}

struct Agent {
    node: Node,
    socket: PathBuf,
    _shutdown: tokio_util::sync::DropGuard,
}

impl Agent {
    fn start() -> Self {
        let node = Node::new();
        let socket = node.directory.path().join("cni.sock");
        let (listener, _file) = OwnListener::listen(&socket, Uid::effective().as_raw()).unwrap();
        let service: Service<Dataplane, FakeZtunnel, Shop> = Service {
            enrollment: Arc::clone(&node.enrollment),
            membership: Arc::new(Shop),
            readiness: Arc::default(),
            metrics: Arc::default(),
            add_deadline: Duration::from_secs(10),
            has_ztunnel: |ztunnel| *ztunnel.connected.borrow(),
        };
        let shutdown = CancellationToken::new();
        tokio::spawn(serve(listener, Arc::new(service), shutdown.clone()));
        Self { node, socket, _shutdown: shutdown.drop_guard() }
    }

    fn client(&self) -> Client {
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        Client::new(&self.socket, deadline).server_uid(Uid::effective().as_raw())
    }

    fn event(&self, namespace: &str, container: &str) -> AddEvent {
        self.node.netns(container);
        let address = IpNetwork::new("::ffff:10.0.0.7".parse().unwrap(), 128);
        AddEvent {
            netns: self.node.netns_path(container).display().to_string(),
            pod_name: "web-0".into(),
            pod_namespace: namespace.into(),
            ips: vec![IpConfig { address, ..IpConfig::default() }],
            container_id: Some(container.into()),
            if_name: Some("eth0".into()),
            network_name: Some("podnet".into()),
            pod_uid: Some("u1".into()),
            ..AddEvent::default()
        }
    }

    fn attachment(container: &str) -> event::Attachment {
        event::Attachment {
            container_id: container.into(),
            if_name: Some("eth0".into()),
            network_name: Some("podnet".into()),
            ..event::Attachment::default()
        }
    }

    /// Sends a body as any HTTP client may, and reads the whole answer.
    fn raw(&self, endpoint: &str, body: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        let length = body.len();
        write!(stream, "POST {endpoint} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        io::read_to_string(stream).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_the_mesh_is_enrolled_checked_and_removed() {
    let agent = Agent::start();
    let (client, named) = (agent.client(), Agent::attachment("c1"));
    let answer = client.add(&agent.event("shop", "c1")).await.unwrap();
    assert_eq!(answer.outcome, Outcome::Enrolled);
    let steps: Vec<_> = answer.steps.iter().map(|step| &*step.step).collect();
    let of_agent = Step::ALL.map(Step::name);
    assert_eq!(steps, [&["connect"], &of_agent[..], &["reply"]].concat());
    agent.node.assert_enrolled("u1", "c1");
    assert_eq!(agent.node.enrollment.dump()[0].addresses, ["10.0.0.7".parse().unwrap()].into());
    assert_eq!(client.check(&named).await.unwrap(), Outcome::Enrolled);
    assert_eq!(client.del(&named).await.unwrap(), Outcome::Removed);
    assert_eq!(client.del(&named).await.unwrap(), Outcome::Unknown);
    assert_eq!(client.check(&named).await.unwrap(), Outcome::Unknown);
    agent.node.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_outside_the_mesh_is_not_touched() {
    let agent = Agent::start();
    let answer = agent.client().add(&agent.event("plain", "c1")).await.unwrap();
    assert_eq!(answer.outcome, Outcome::NotInMesh);
    assert_eq!(agent.node.dataplane.state().calls, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_step_reaches_the_plugin_with_its_code() {
    let agent = Agent::start();
    agent.node.dataplane.state().failing.insert(Call::Activate);
    let error = agent.client().add(&agent.event("shop", "c1")).await.unwrap_err();
    let Error::Refused(refusal) = error else { panic!("{error}") };
    assert_eq!(refusal.code, Code::Attach);
    assert!(refusal.details.contains("fake failed"), "{refusal}");
    let error = agent.client().add(&agent.event("unknown", "c1")).await.unwrap_err();
    assert!(matches!(error, Error::Refused(refusal) if refusal.code == Code::TryLater));
}

#[tokio::test(flavor = "multi_thread")]
async fn check_says_when_a_pod_is_not_captured() {
    let agent = Agent::start();
    agent.client().add(&agent.event("shop", "c1")).await.unwrap();
    let cookie = agent.node.netns("c1");
    agent.node.dataplane.state().uncaptured.insert(cookie);
    let error = agent.client().check(&Agent::attachment("c1")).await.unwrap_err();
    assert!(matches!(error, Error::Refused(refusal) if refusal.code == Code::Attach));
}

#[tokio::test(flavor = "multi_thread")]
async fn gc_and_status_and_log_are_answered() {
    let agent = Agent::start();
    let client = agent.client();
    client.add(&agent.event("shop", "c1")).await.unwrap();
    let valid_attachments = vec![ValidAttachment { container_id: "c2".into(), if_name: "eth0".into() }];
    let request = GcRequest { network_name: "podnet".into(), valid_attachments, plugin_version: None };
    client.gc(&request).await.unwrap();
    agent.node.assert_clean();
    let status = client.status(&event::StatusRequest::default()).await.unwrap();
    assert_eq!(status, Status { ready: true, reasons: vec![] });
    agent.node.ztunnel.connected.send_replace(false);
    let status = client.status(&event::StatusRequest::default()).await.unwrap();
    assert_eq!(status.reasons, ["ztunnel: none is connected"]);
    client.log(&Batch(vec!["no json".into(), r#"{"level":"info","msg":"hello"}"#.into()])).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_was_killed_takes_its_add_with_it() {
    let agent = Agent::start();
    agent.node.dataplane.hold(Call::Activate);
    let event = agent.event("shop", "c1");
    let client = agent.client();
    tokio::select! {
        answer = client.add(&event) => panic!("{answer:?}"),
        () = async {
            while !agent.node.dataplane.state().reached.contains(&Call::Activate) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        } => {}
    }
    // The server learns of it by the closed connection.
    tokio::time::sleep(Duration::from_millis(100)).await;
    agent.node.dataplane.release(Call::Activate);
    agent.node.enrollment.drain().await;
    agent.node.assert_clean();
}

/// Bodies that Istio's plugin writes (ambient-behaviour §2.3).
#[rstest]
#[case::addresses(
    r#""IPs":[{"Interface":2,"Address":{"IP":"10.0.0.7","Mask":"/////w=="},"Gateway":"10.0.0.1"}]"#
)]
#[case::no_addresses(r#""IPs":null"#)]
#[case::no_gateway_and_no_interface(
    r#""IPs":[{"Interface":null,"Address":{"IP":"10.0.0.7","Mask":"////AA=="},"Gateway":""}]"#
)]
#[case::both_families(r#""IPs":[{"Address":{"IP":"10.0.0.7","Mask":"////AA=="}},{"Address":{"IP":"fd00::7","Mask":"//////////8AAAAAAAAAAA=="}}]"#)]
#[case::v4_mapped(r#""IPs":[{"Address":{"IP":"::ffff:10.0.0.7","Mask":"/////////////////////w=="}}]"#)]
#[tokio::test(flavor = "multi_thread")]
async fn events_of_istio_s_plugin(#[case] ips: &str) {
    let agent = Agent::start();
    agent.node.netns("c1");
    let netns = agent.node.netns_path("c1");
    let netns = netns.display();
    let body = format!(r#"{{"Netns":"{netns}","PodName":"web-0","PodNamespace":"shop",{ips}}}"#);
    let answer = tokio::task::block_in_place(|| agent.raw("/cmdadd", &body));
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    let dump = agent.node.enrollment.dump();
    assert_eq!((dump.len(), &*dump[0].pod.uid), (1, "shop/web-0"));
    assert!(!dump[0].addresses.is_empty());
}

#[rstest]
#[case::empty("")]
#[case::truncated(r#"{"Netns":"/n"#)]
#[case::list("[]")]
#[case::wrong_type(r#"{"PodName":7}"#)]
#[case::nested(&"[".repeat(100_000))]
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_no_event_is_the_caller_s_mistake(#[case] body: &str) {
    let agent = Agent::start();
    let answer = tokio::task::block_in_place(|| agent.raw("/cmdadd", body));
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(answer.contains(r#""code":6"#), "{answer}");
}

#[rstest]
#[case::ten_mebibytes(10 << 20, "longer than")]
#[case::one_that_never_comes(10, "not complete")]
#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_not_waited_for_without_bound(#[case] length: usize, #[case] why: &str) {
    let agent = Agent::start();
    let mut stream = UnixStream::connect(&agent.socket).unwrap();
    write!(
        stream,
        "POST /cmdadd HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )
    .unwrap();
    let answer = tokio::task::spawn_blocking(move || io::read_to_string(stream)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(why), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_user_is_not_served() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cni.sock");
    let (mut listener, _file) = OwnListener::listen(&path, Uid::effective().as_raw() + 1).unwrap();
    tokio::spawn(async move { axum::serve::Listener::accept(&mut listener).await });
    let text = tokio::task::spawn_blocking(move || io::read_to_string(UnixStream::connect(path).unwrap()));
    assert_eq!(text.await.unwrap().unwrap(), "");
}

#[test]
fn only_named_attachments_are_meant() {
    assert_eq!(super::attachment(Agent::attachment("c1")), attachment("podnet", "c1", "eth0"));
    assert_eq!(super::attachment(event::Attachment::default()), Attachment::default());
}
