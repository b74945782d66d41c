//! What the plugin sends.
//!
//! An ADD is Istio's event, byte for byte as its plugin writes it (Go's `encoding/json` of
//! `CNIPluginAddEvent`, `cni/pkg/plugin`), with optional keys after Istio's own: either plugin works with either
//! agent. Keys are Go's field names, which Go matches in any case; so does [`AddEvent::decode`].

use std::net::IpAddr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _, ser::SerializeSeq as _};
use serde_json::Value;

mod go;

/// The version of this crate, for [`AddEvent::plugin_version`].
pub const PLUGIN_VERSION: &str = env!("CARGO_PKG_VERSION");

/// A pod's network namespace exists and is configured; enroll the pod before it starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct AddEvent {
    /// Path of the network namespace, in the host's mount namespace.
    #[serde(deserialize_with = "null_as_default")]
    pub netns: String,
    /// Name of the pod.
    #[serde(deserialize_with = "null_as_default")]
    pub pod_name: String,
    /// Namespace of the pod.
    #[serde(deserialize_with = "null_as_default")]
    pub pod_namespace: String,
    /// Addresses that the plugins before have assigned. `null` on the wire if there are none.
    #[serde(rename = "IPs", serialize_with = "empty_as_null", deserialize_with = "null_as_default")]
    pub ips: Vec<IpConfig>,
    /// `CNI_CONTAINERID`. Not in Istio's event, like all that follow.
    #[serde(rename = "ContainerID", skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// `CNI_IFNAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub if_name: Option<String>,
    /// `name` of the network configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// `K8S_POD_UID`: the uid of the API, or a static pod's hash.
    #[serde(rename = "PodUID", skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Device of the network namespace as the plugin sees it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub netns_dev: Option<u64>,
    /// Inode of the network namespace as the plugin sees it. With the device it names the namespace;
    /// the agent refuses a path that names another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub netns_ino: Option<u64>,
    /// Version of the plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin_version: Option<String>,
}

impl AddEvent {
    /// Reads an event of ours or of Istio's plugin. As in Go, keys match in any case, `null` is an
    /// absent key and unknown keys are ignored.
    pub fn decode(body: &[u8]) -> Result<Self, serde_json::Error> {
        let mut event: Value = serde_json::from_slice(body)?;
        // serde takes a list for a struct, too.
        if !event.is_object() {
            return Err(serde_json::Error::custom("an event is an object"));
        }
        go::restore_case(&mut event, &go::ADD_EVENT);
        serde_json::from_value(event)
    }
}

/// One address of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct IpConfig {
    /// Index into the interfaces of the previous plugin's result.
    pub interface: Option<i64>,
    /// The address with its network.
    #[serde(deserialize_with = "null_as_default")]
    pub address: IpNetwork,
    /// Gateway of the network, an empty text on the wire if there is none.
    #[serde(with = "go::ip")]
    pub gateway: Option<IpAddr>,
}

/// Go's `net.IPNet`. Go writes a v4-mapped address as IPv4 and keeps the length of the mask.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct IpNetwork {
    /// The address. [`None`] is Go's nil, an empty text on the wire.
    #[serde(rename = "IP", with = "go::ip")]
    pub ip: Option<IpAddr>,
    /// Bytes of the mask, base64 on the wire.
    #[serde(rename = "Mask", with = "go::bytes")]
    pub mask: Option<Vec<u8>>,
}

impl IpNetwork {
    /// `address/prefix`, where the prefix has the length of the address as it is written (a v4-mapped
    /// address has up to 128 bits of prefix).
    pub fn new(address: IpAddr, prefix: u8) -> Self {
        let length = if address.is_ipv4() { 4 } else { 16 };
        let mask = (0..length).map(|byte| {
            let bits = u32::from(prefix).saturating_sub(byte * 8).min(8);
            !u8::try_from(0xff_u32 >> bits).unwrap_or(0)
        });
        Self { ip: Some(address.to_canonical()), mask: Some(mask.collect()) }
    }
}

/// Names an attachment. Body of `/cmddel` and `/check`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Attachment {
    /// `CNI_CONTAINERID`.
    #[serde(rename = "ContainerID")]
    pub container_id: String,
    /// `CNI_IFNAME`. A DEL may come without: then all interfaces of the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub if_name: Option<String>,
    /// `name` of the network configuration. A DEL whose configuration is damaged comes without: then
    /// all networks of the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// `CNI_NETNS`. Often missing in a DEL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// Name of the pod, for messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// Namespace of the pod, for messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
    /// `K8S_POD_UID`, for messages.
    #[serde(rename = "PodUID", skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Version of the plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin_version: Option<String>,
}

/// Body of `/gc`: which attachments of one network are still valid. Says nothing of other networks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct GcRequest {
    /// `name` of the network configuration.
    pub network_name: String,
    /// The runtime's list, complete for this network.
    pub valid_attachments: Vec<ValidAttachment>,
    /// Version of the plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin_version: Option<String>,
}

/// One attachment that the runtime knows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValidAttachment {
    /// Container id.
    #[serde(rename = "ContainerID")]
    pub container_id: String,
    /// Interface.
    #[serde(rename = "IfName")]
    pub if_name: String,
}

/// Body of `/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct StatusRequest {
    /// `name` of the network configuration.
    pub network_name: String,
    /// Version of the plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin_version: Option<String>,
}

fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// An empty list is a nil slice in Istio's plugin.
fn empty_as_null<S: Serializer>(ips: &[IpConfig], serializer: S) -> Result<S::Ok, S::Error> {
    if ips.is_empty() {
        return serializer.serialize_none();
    }
    let mut list = serializer.serialize_seq(Some(ips.len()))?;
    for ip in ips {
        list.serialize_element(ip)?;
    }
    list.end()
}

#[cfg(test)]
mod tests;
