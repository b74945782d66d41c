use proptest::{option, prelude::*};
use rstest::rstest;

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn istio(ips: Vec<IpConfig>) -> AddEvent {
    AddEvent {
        netns: "/var/run/netns/cni-1".into(),
        pod_name: "web-0".into(),
        pod_namespace: "shop".into(),
        ips,
        ..AddEvent::default()
    }
}

fn address(address: &str, prefix: u8, gateway: Option<&str>, interface: Option<i64>) -> IpConfig {
    IpConfig { interface, address: IpNetwork::new(ip(address), prefix), gateway: gateway.map(ip) }
}

#[rstest]
#[case::no_addresses(
    vec![],
    r#"{"Netns":"/var/run/netns/cni-1","PodName":"web-0","PodNamespace":"shop","IPs":null}"#
)]
#[case::one_address(
    vec![address("10.1.2.3", 24, Some("10.1.2.1"), Some(2))],
    r#"{"Netns":"/var/run/netns/cni-1","PodName":"web-0","PodNamespace":"shop","IPs":[{"Interface":2,"Address":{"IP":"10.1.2.3","Mask":"////AA=="},"Gateway":"10.1.2.1"}]}"#
)]
#[case::no_gateway_no_interface(
    vec![address("fd00::7", 128, None, None)],
    r#"{"Netns":"/var/run/netns/cni-1","PodName":"web-0","PodNamespace":"shop","IPs":[{"Interface":null,"Address":{"IP":"fd00::7","Mask":"/////////////////////w=="},"Gateway":""}]}"#
)]
#[case::v4_mapped(
    vec![address("::ffff:10.1.2.3", 120, Some("::ffff:10.1.2.1"), Some(0))],
    r#"{"Netns":"/var/run/netns/cni-1","PodName":"web-0","PodNamespace":"shop","IPs":[{"Interface":0,"Address":{"IP":"10.1.2.3","Mask":"////////////////////AA=="},"Gateway":"10.1.2.1"}]}"#
)]
fn the_event_is_istio_s_byte_for_byte(#[case] ips: Vec<IpConfig>, #[case] json: &str) {
    assert_eq!(serde_json::to_string(&istio(ips.clone())).unwrap(), json);
    let mut canonical = istio(ips);
    for ip in &mut canonical.ips {
        ip.gateway = ip.gateway.map(|gateway| gateway.to_canonical());
    }
    assert_eq!(AddEvent::decode(json.as_bytes()).unwrap(), canonical);
}

#[test]
fn our_own_keys_follow_istio_s() {
    let event = AddEvent {
        container_id: Some("c1".into()),
        if_name: Some("eth0".into()),
        network_name: Some("podnet".into()),
        pod_uid: Some("u1".into()),
        netns_dev: Some(4),
        netns_ino: Some(4_026_532_000),
        plugin_version: Some("0.1.0".into()),
        ..istio(vec![])
    };
    let json = serde_json::to_string(&event).unwrap();
    assert_eq!(
        json,
        r#"{"Netns":"/var/run/netns/cni-1","PodName":"web-0","PodNamespace":"shop","IPs":null,"ContainerID":"c1","IfName":"eth0","NetworkName":"podnet","PodUID":"u1","NetnsDev":4,"NetnsIno":4026532000,"PluginVersion":"0.1.0"}"#
    );
    assert_eq!(AddEvent::decode(json.as_bytes()).unwrap(), event);
}

#[test]
fn keys_match_in_any_case() {
    let event = AddEvent::decode(
        br#"{"NETNS":"/n","podname":"a","podNamespace":"b","ips":[{"interface":1,"address":{"ip":"10.0.0.1","MASK":"/wAAAA=="},"gateWay":""}],"netnsino":7,"poduid":"u"}"#,
    )
    .unwrap();
    assert_eq!(
        (event.netns.as_str(), event.pod_name.as_str(), event.pod_namespace.as_str()),
        ("/n", "a", "b")
    );
    assert_eq!(event.ips, [address("10.0.0.1", 8, None, Some(1))]);
    assert_eq!((event.netns_ino, event.pod_uid.as_deref()), (Some(7), Some("u")));
}

#[test]
fn the_exact_key_wins_over_another_spelling() {
    for json in [r#"{"podname":"a","PodName":"b"}"#, r#"{"PodName":"b","podname":"a"}"#] {
        assert_eq!(AddEvent::decode(json.as_bytes()).unwrap().pod_name, "b");
    }
}

#[test]
fn null_and_absent_are_the_same_and_unknown_keys_are_ignored() {
    let event = AddEvent::decode(
        br#"{"Netns":null,"IPs":[{"Address":null},{"Address":{"IP":"","Mask":null},"Gateway":null}],"Later":{}}"#,
    )
    .unwrap();
    assert_eq!(
        event,
        AddEvent { ips: vec![IpConfig::default(), IpConfig::default()], ..AddEvent::default() }
    );
}

#[rstest]
#[case::empty("")]
#[case::truncated(r#"{"Netns":"/n""#)]
#[case::a_list("[]")]
#[case::wrong_type(r#"{"Netns":7}"#)]
#[case::no_address(r#"{"IPs":[{"Address":{"IP":"10.0.0"}}]}"#)]
#[case::no_base64(r#"{"IPs":[{"Address":{"IP":"10.0.0.1","Mask":"%"}}]}"#)]
fn what_is_no_event_is_refused(#[case] body: &str) {
    assert!(AddEvent::decode(body.as_bytes()).is_err());
}

#[test]
fn masks_have_the_bytes_of_their_prefix() {
    let mask = |prefix| IpNetwork::new(ip("10.0.0.1"), prefix).mask.unwrap();
    assert_eq!(mask(0), [0, 0, 0, 0]);
    assert_eq!(mask(20), [255, 255, 240, 0]);
    assert_eq!(mask(32), [255, 255, 255, 255]);
    assert_eq!(mask(255), [255, 255, 255, 255]);
}

#[test]
fn requests_read_as_documented() {
    let attachment = Attachment {
        container_id: "c1".into(),
        if_name: Some("eth0".into()),
        network_name: Some("podnet".into()),
        ..Attachment::default()
    };
    assert_eq!(
        serde_json::to_string(&attachment).unwrap(),
        r#"{"ContainerID":"c1","IfName":"eth0","NetworkName":"podnet"}"#
    );
    let gc = GcRequest {
        network_name: "podnet".into(),
        valid_attachments: vec![ValidAttachment { container_id: "c1".into(), if_name: "eth0".into() }],
        plugin_version: None,
    };
    assert_eq!(
        serde_json::to_string(&gc).unwrap(),
        r#"{"NetworkName":"podnet","ValidAttachments":[{"ContainerID":"c1","IfName":"eth0"}]}"#
    );
}

fn any_ip() -> impl Strategy<Value = IpAddr> {
    any::<IpAddr>().prop_map(|ip| ip.to_canonical())
}

fn any_ip_config() -> impl Strategy<Value = IpConfig> {
    let mask = option::of(prop::collection::vec(any::<u8>(), 0..17));
    (any::<Option<i64>>(), option::of(any_ip()), mask, option::of(any_ip())).prop_map(
        |(interface, ip, mask, gateway)| IpConfig { interface, address: IpNetwork { ip, mask }, gateway },
    )
}

prop_compose! {
    fn any_event()(
        (netns, pod_name, pod_namespace) in any::<(String, String, String)>(),
        ips in prop::collection::vec(any_ip_config(), 0..4),
        (container_id, if_name, network_name) in any::<(Option<String>, Option<String>, Option<String>)>(),
        (pod_uid, plugin_version) in any::<(Option<String>, Option<String>)>(),
        (netns_dev, netns_ino) in any::<(Option<u64>, Option<u64>)>(),
    ) -> AddEvent {
        AddEvent {
            netns, pod_name, pod_namespace, ips, container_id, if_name, network_name, pod_uid, netns_dev,
            netns_ino, plugin_version,
        }
    }
}

proptest! {
    #[test]
    fn an_event_survives_the_wire(event in any_event()) {
        let json = serde_json::to_vec(&event).unwrap();
        prop_assert_eq!(AddEvent::decode(&json).unwrap(), event);
    }

    #[test]
    fn any_bytes_are_an_event_or_an_error(bytes in any::<Vec<u8>>()) {
        drop(AddEvent::decode(&bytes));
    }
}
