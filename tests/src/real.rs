//! The real ztunnel in place of the stand-in, when `ZTUNNEL_BIN` names it.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
};

use culvert_abi::ztunnel::{HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT};
use serde_json::Value;

use crate::{event::Event, host::Host, topology, ztunnel::Behaviour};

/// Name of the node in the configuration.
const NODE: &str = "culvert-lab";
/// Its readiness endpoint's port, in its own netns.
const READINESS: u16 = 15021;
/// Pods it knows of, those of a lab with few.
const PODS: std::ops::Range<u16> = 2..64;

/// How lines begin that nobody needs.
pub(crate) const CHATTER: &str = r#"{"level":"debug""#;

/// The binary, if it is asked for.
pub(crate) fn binary() -> Option<PathBuf> {
    std::env::var_os("ZTUNNEL_BIN").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// A command with ztunnel's environment (config.rs, read at 62d82653).
pub(crate) fn command(binary: &Path, behaviour: &Behaviour, socket: &Path, directory: &Path) -> Command {
    let xds = directory.join("xds.json");
    fs::write(&xds, configuration(behaviour)).expect("ztunnel's configuration");
    let mut command = Command::new(binary);
    command
        .arg("proxy")
        .env("INPOD_UDS", socket)
        .env("LOCAL_XDS_PATH", xds)
        .env("NODE_NAME", NODE)
        .env("PROXY_MODE", "shared")
        .env("FAKE_CA", "true")
        .env("XDS_ADDRESS", "")
        .env("CLUSTER_ID", "Kubernetes")
        .env("NETWORK", "")
        .env("IPV6_ENABLED", (!behaviour.v4_only).to_string())
        .env("LOG_FORMAT", "json")
        .env("RUST_LOG", if behaviour.quiet { "warn,access=off" } else { "warn,access=debug" });
    if behaviour.no_transparent {
        command.env("ENABLE_ORIG_SRC", "false");
    }
    command
}

/// Whether it has taken in a snapshot (`/healthz/ready`: "workload proxy manager").
pub(crate) fn is_ready(host: &Host) -> bool {
    let ask = || -> io::Result<bool> {
        let mut connection = host.connect((Ipv4Addr::LOCALHOST, READINESS))?;
        connection.send(b"GET /healthz/ready HTTP/1.0\r\n\r\n")?;
        Ok(connection.receive_to_end()?.starts_with(b"HTTP/1.0 200"))
    };
    ask().unwrap_or(false)
}

/// Every pod a test may make, by its number: ztunnel reads it once. JSON is YAML.
fn configuration(Behaviour { tunnel, services, .. }: &Behaviour) -> String {
    let workloads: Vec<_> = PODS
        .map(|number| {
            let (v4, v6) = topology::pod_addresses(number);
            let tunneled = tunnel.contains(&v4.into()) || tunnel.contains(&v6.into());
            serde_json::json!({
                "uid": format!("Kubernetes//Pod/default/pod-{number}"),
                "name": format!("pod-{number}"),
                "namespace": "default",
                "serviceAccount": format!("pod-{number}"),
                "trustDomain": "cluster.local",
                "workloadIps": [v4, v6],
                "protocol": if tunneled { "HBONE" } else { "TCP" },
                "node": NODE,
                "network": "",
                "clusterId": "Kubernetes",
                "services": ports_of(services, &[v4.into(), v6.into()]),
            })
        })
        .collect();
    let named: Vec<_> = services
        .iter()
        .map(|(vip, endpoint)| {
            serde_json::json!({
                "name": service_name(*vip),
                "namespace": "default",
                "hostname": format!("{}.default.svc.cluster.local", service_name(*vip)),
                "vips": [format!("/{}", vip.ip())],
                "ports": { vip.port().to_string(): endpoint.port() },
            })
        })
        .collect();
    let configuration = serde_json::json!({ "workloads": workloads, "services": named, "policies": [] });
    // Except that the keys of its maps of ports are numbers.
    services.iter().fold(configuration.to_string(), |text, (vip, _)| {
        text.replace(&format!("\"{}\":", vip.port()), &format!("{}: ", vip.port()))
    })
}

/// The services that lead to a pod with these addresses, as its entry has them.
fn ports_of(services: &[(SocketAddr, SocketAddr)], pod: &[IpAddr]) -> Value {
    let its_own = services.iter().filter(|(_, endpoint)| pod.contains(&endpoint.ip()));
    let ports = its_own.map(|(vip, endpoint)| {
        let hostname = format!("default/{}.default.svc.cluster.local", service_name(*vip));
        (hostname, serde_json::json!({ vip.port().to_string(): endpoint.port() }))
    });
    Value::Object(ports.collect())
}

fn service_name(vip: SocketAddr) -> String {
    format!("service-{}", vip.ip().to_string().replace(['.', ':'], "-"))
}

/// What a line of ztunnel's access log says, as far as the stand-in would have said it. The log has
/// no line for the moment of accepting; "connection opened" follows once the destination is known.
pub(crate) fn event(line: &str) -> Option<Event> {
    let log: Value = serde_json::from_str(line).ok()?;
    let text = |key: &str| log.get(key).and_then(Value::as_str);
    let address = |key: &str| text(key).and_then(|address| address.parse::<SocketAddr>().ok());
    if text("scope") != Some("access") {
        return None;
    }
    let (peer, destination) = (address("src.addr")?, address("dst.addr")?);
    let (workload, listener) = match (text("direction")?, destination.port()) {
        ("outbound", _) => ("src.workload", OUTBOUND_PORT),
        (_, HBONE_PORT) => ("dst.workload", HBONE_PORT),
        _ => ("dst.workload", INBOUND_PORT),
    };
    let pod = text(workload).unwrap_or_default().to_owned();
    // ztunnel numbers nothing; a client's port is unique for as long as a test looks.
    let connection = u64::from(peer.port());
    let bytes = |key: &str| log.get(key).and_then(Value::as_u64).unwrap_or_default();
    Some(match (text("message")?, text("error")) {
        ("connection opened", _) => Event::Accepted {
            pod,
            connection,
            listener,
            peer,
            destination: address("dst.hbone_addr").unwrap_or(destination),
        },
        (_, Some(reason)) => Event::Refused { pod, connection, reason: reason.to_owned() },
        (_, None) => {
            Event::Closed { pod, connection, sent: bytes("bytes_sent"), received: bytes("bytes_recv") }
        }
    })
}
