//! Go's `encoding/json` where it differs from serde: text of `net.IP` and `[]byte`, keys in any case.

use serde_json::{Map, Value};

/// A key in Go's spelling, and the keys of the object (or of the objects in the list) under it.
pub(super) struct Key(&'static str, &'static [Key]);

const ADDRESS: [Key; 2] = [Key("IP", &[]), Key("Mask", &[])];
const IP_CONFIG: [Key; 3] = [Key("Interface", &[]), Key("Address", &ADDRESS), Key("Gateway", &[])];

/// Keys of an ADD event.
pub(super) const ADD_EVENT: [Key; 11] = [
    Key("Netns", &[]),
    Key("PodName", &[]),
    Key("PodNamespace", &[]),
    Key("IPs", &IP_CONFIG),
    Key("ContainerID", &[]),
    Key("IfName", &[]),
    Key("NetworkName", &[]),
    Key("PodUID", &[]),
    Key("NetnsDev", &[]),
    Key("NetnsIno", &[]),
    Key("PluginVersion", &[]),
];

/// Spells all known keys as Go does. Of two keys that differ in case only the exact one counts, as in
/// Go when it comes last.
pub(super) fn restore_case(value: &mut Value, keys: &[Key]) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| restore_case(item, keys)),
        Value::Object(object) => {
            let mut restored = Map::new();
            for (name, mut value) in std::mem::take(object) {
                match keys.iter().find(|key| key.0.eq_ignore_ascii_case(&name)) {
                    Some(Key(exact, inner)) if name == *exact || !restored.contains_key(*exact) => {
                        restore_case(&mut value, inner);
                        restored.insert((*exact).to_owned(), value);
                    }
                    _ => {}
                }
            }
            *object = restored;
        }
        _ => {}
    }
}

/// `net.IP`: text, empty for nil, v4-mapped as IPv4.
pub(super) mod ip {
    use std::{borrow::Cow, net::IpAddr};

    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(in super::super) fn serialize<S: Serializer>(
        ip: &Option<IpAddr>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match ip {
            Some(ip) => serializer.collect_str(&ip.to_canonical()),
            None => serializer.serialize_str(""),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<IpAddr>, D::Error> {
        let text = Option::<Cow<'de, str>>::deserialize(deserializer)?.unwrap_or_default();
        if text.is_empty() {
            return Ok(None);
        }
        match text.parse::<IpAddr>() {
            Ok(ip) => Ok(Some(ip.to_canonical())),
            Err(error) => Err(D::Error::custom(format_args!("{text:?}: {error}"))),
        }
    }
}

/// `[]byte`: base64, `null` for nil.
pub(super) mod bytes {
    use std::borrow::Cow;

    use base64::{Engine as _, prelude::BASE64_STANDARD};
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(in super::super) fn serialize<S: Serializer>(
        bytes: &Option<Vec<u8>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match bytes {
            Some(bytes) => serializer.serialize_str(&BASE64_STANDARD.encode(bytes)),
            None => serializer.serialize_none(),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Vec<u8>>, D::Error> {
        let text = Option::<Cow<'de, str>>::deserialize(deserializer)?;
        text.map(|text| BASE64_STANDARD.decode(text.as_bytes()).map_err(D::Error::custom)).transpose()
    }
}
