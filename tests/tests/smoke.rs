//! The lab itself: if one of these fails, look here before anywhere else.

use std::time::Duration;

use culvert_tests::{Behaviour, Family, Lab};

#[test]
fn uncaptured_pods_talk_and_the_wire_shows_it() {
    let lab = Lab::builder().without_ztunnel().without_dataplane().start();
    let (client, server) = (lab.pod("client"), lab.pod("server"));
    let echo = server.serve("[::]:80");
    let wire = lab.wire();
    for family in Family::BOTH {
        assert_eq!(client.connect(server.at(family, 80)).unwrap().say(b"in clear"), b"in clear");
        assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
    }
    let frames = wire.stop();
    for family in Family::BOTH {
        let syns = frames.syns_to(server.at(family, 80));
        let path: Vec<_> = syns.iter().map(|syn| (&*syn.host, &*syn.interface)).collect();
        for hop in [("client", "eth0"), ("node", "veth-2"), ("node", "veth-3"), ("server", "eth0")] {
            assert!(path.contains(&hop), "{syns:?}");
        }
    }
    assert!(frames.contains_payload(b"in clear"));
    assert!(!frames.contains_payload(b"in secret"));
}

#[test]
fn a_captured_client_reaches_an_uncaptured_server_through_15001() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server"));
    let echo = server.serve("[::]:80");
    for family in Family::BOTH {
        let to = server.at(family, 80);
        let mut connection = client.connect(to).unwrap();
        assert_eq!(connection.say(b"hello"), b"hello");
        assert_eq!(connection.peer_addr(), to);
        assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
        let accepted = lab.ztunnel().wait_for_accepted(15001, 1);
        assert_eq!((accepted[0].peer, accepted[0].destination), (connection.local_addr(), to));
        lab.ztunnel().forget();
    }
}

#[test]
fn an_uncaptured_client_reaches_a_captured_server_through_15006_with_its_own_address() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client"), lab.pod("server").captured());
    let echo = server.serve("[::]:80");
    for family in Family::BOTH {
        let to = server.at(family, 80);
        let mut connection = client.connect(to).unwrap();
        assert_eq!(connection.say(b"hello"), b"hello");
        assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
        let accepted = lab.ztunnel().wait_for_accepted(15006, 1);
        assert_eq!((accepted[0].peer, accepted[0].destination), (connection.local_addr(), to));
        lab.ztunnel().forget();
    }
}

#[test]
fn a_process_of_the_node_reaches_a_captured_server_directly() {
    let lab = Lab::new();
    let server = lab.pod("server").captured();
    let echo = server.serve("[::]:80");
    for family in Family::BOTH {
        assert_eq!(lab.node().connect(server.at(family, 80)).unwrap().say(b"alive?"), b"alive?");
        assert_eq!(echo.next_accepted().peer.ip(), lab.node().address(family));
    }
    assert_eq!(lab.ztunnel().saw().accepted(), []);
}

#[test]
fn captured_pods_talk_through_a_tunnel() {
    // The second pod of a lab; ztunnel has to know before it starts.
    let server_v4 = "10.244.0.3".parse().unwrap();
    let tunnel =
        Behaviour { tunnel: vec![server_v4, "fd00:244::3".parse().unwrap()], ..Behaviour::default() };
    let lab = Lab::builder().ztunnel(tunnel).start();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server").captured());
    assert_eq!(server.v4(), server_v4);
    let echo = server.serve("[::]:80");
    let wire = lab.wire();
    for family in Family::BOTH {
        assert_eq!(client.connect(server.at(family, 80)).unwrap().say(b"tunneled"), b"tunneled");
        assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
    }
    let frames = wire.stop();
    for family in Family::BOTH {
        assert!(frames.syns_to(server.at(family, 80)).is_empty(), "{frames:?}");
        assert!(!frames.syns_to(server.at(family, 15008)).is_empty(), "{frames:?}");
    }
    assert_eq!(lab.ztunnel().wait_for_accepted(15001, 2).len(), 2);
    assert_eq!(lab.ztunnel().wait_for_accepted(15008, 2).len(), 2);
}

#[test]
fn a_ztunnel_can_be_killed_and_restarted_and_accompanied() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    let talk = || client.connect((server.v4(), 80))?.try_say(b"hello");
    assert_eq!(talk().unwrap(), b"hello");

    lab.ztunnel().kill();
    assert_eq!(talk().unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    lab.ztunnel().restart();
    assert_eq!(talk().unwrap(), b"hello");

    let mut old = client.connect((server.v4(), 80)).unwrap();
    assert_eq!(old.say(b"before"), b"before");
    let newer = lab.start_ztunnel(Behaviour::default());
    lab.ztunnel().terminate();
    assert_eq!(talk().unwrap(), b"hello");
    assert_eq!(old.say(b"drains"), b"drains");
    lab.ztunnel().wait_for_exit(Duration::from_secs(7));
    old.closed();
    newer.forget();
    assert_eq!(talk().unwrap(), b"hello");
    assert_eq!(newer.wait_for_accepted(15001, 1).len(), 1);
}

#[test]
fn the_lab_has_a_service_address_and_a_world_outside() {
    let lab = Lab::new();
    let (client, server) = (lab.pod("client").captured(), lab.pod("server"));
    let outside = lab.outside("outside");
    let echo = server.serve("[::]:80");
    for vip in ["10.96.0.10", "fd00:96::10"] {
        let vip = lab.vip(vip, &server);
        assert_eq!(client.connect((vip, 80)).unwrap().say(b"service"), b"service");
        assert_eq!(echo.next_accepted().local.ip(), vip);
    }
    let echo = outside.serve("[::]:80");
    for family in Family::BOTH {
        assert_eq!(client.connect(outside.at(family, 80)).unwrap().say(b"far"), b"far");
        assert_eq!(echo.next_accepted().peer.ip(), client.address(family));
    }
}

#[test]
fn an_agent_can_be_killed_and_another_takes_over() {
    let lab = Lab::builder().without_dataplane().without_ztunnel().start();
    let agent = lab.agent_process(&[]);
    let ztunnel = lab.start_ztunnel(Behaviour::default());
    let (client, server) = (lab.pod("client"), lab.pod("server"));
    let _echo = server.serve("[::]:80");
    agent.capture(&client);
    let talk = || client.connect((server.v4(), 80)).unwrap().say(b"hello");
    assert_eq!(talk(), b"hello");
    agent.kill();
    assert_eq!(talk(), b"hello");
    let agent = lab.agent_process(&[&client]);
    assert_eq!(talk(), b"hello");
    assert_eq!(ztunnel.wait_for_accepted(15001, 3).len(), 3);
    agent.release(&client);
    assert_eq!(talk(), b"hello");
    assert_eq!(ztunnel.wait_for_accepted(15001, 3).len(), 3);
}
