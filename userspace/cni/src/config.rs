//! The plugin's entry of the network configuration, as it comes on stdin.

use std::{path::PathBuf, time::Duration};

use serde::Deserialize;
use serde_json::Value;

use crate::{document, event::ValidAttachment, exempt::Exempt, log::Level, scope};

/// Directory of the agent's sockets unless the configuration says otherwise.
pub const DEFAULT_RUN_DIR: &str = "/var/run/culvert";
/// Name of the agent's socket in the run directory.
pub const SOCKET: &str = "cni.sock";
/// Total time of an ADD unless the configuration says otherwise. Kubelet's limit is four minutes.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(20);

/// What the plugin reads of its stdin. The installer writes our keys, the runtime the others; keys
/// that are neither are ignored, and `null` is an absent key, as in Go.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Config {
    /// Version of the specification. Not judged here.
    pub cni_version: Option<String>,
    /// Name of the network. Not judged here.
    pub name: Option<String>,
    /// Result of the plugin before, in any version's layout. Not judged here.
    pub prev_result: Option<Value>,
    /// GC: attachments of this network that the runtime knows.
    #[serde(rename = "cni.dev/valid-attachments")]
    valid_attachments: Option<Vec<RuntimeAttachment>>,
    run_dir: Option<PathBuf>,
    scope_file: Option<PathBuf>,
    exclude_namespaces: Option<Vec<String>>,
    timeout_seconds: Option<u64>,
    log_level: Option<String>,
    exempt: Option<Vec<Exempt>>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct RuntimeAttachment {
    #[serde(rename = "containerID")]
    container_id: String,
    ifname: String,
}

/// A configuration that the plugin cannot work with.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No JSON, a key twice, nested too deep, or a key of ours with a wrong type.
    #[error("the network configuration cannot be decoded: {0}")]
    Undecodable(#[from] serde_json::Error),
    /// A key of ours with a value that makes no sense.
    #[error("{key} of the network configuration: {why}")]
    Invalid {
        /// Which key.
        key: &'static str,
        /// What is wrong.
        why: String,
    },
}

impl Config {
    /// Reads the configuration. [`check`](Self::check) judges the values.
    pub fn decode(stdin: &[u8]) -> Result<Self, Error> {
        document::check(stdin)?;
        Ok(serde_json::from_slice(stdin)?)
    }

    /// Where the agent is and what the network is called, if a damaged configuration still says so. A
    /// DEL goes on with that.
    pub fn salvage(stdin: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(stdin).ok()?;
        let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let run_dir = text("runDir").map(PathBuf::from).filter(|path| path.is_absolute())?;
        Some(Self { name: text("name"), run_dir: Some(run_dir), ..Self::default() })
    }

    /// Judges our own keys.
    pub fn check(&self) -> Result<(), Error> {
        for (key, path) in [("runDir", &self.run_dir), ("scopeFile", &self.scope_file)] {
            if let Some(path) = path.as_ref().filter(|path| !path.is_absolute()) {
                return Err(Error::Invalid { key, why: format!("{path:?} is not an absolute path") });
            }
        }
        match self.timeout_seconds {
            Some(seconds) if !(1..=240).contains(&seconds) => Err(Error::Invalid {
                key: "timeoutSeconds",
                why: format!("{seconds} is not between 1 and 240, kubelet's own limit"),
            }),
            _ => Ok(()),
        }
    }

    /// Where the agent listens.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.clone().unwrap_or_else(|| DEFAULT_RUN_DIR.into()).join(SOCKET)
    }

    /// Where the scope file is.
    pub fn scope_file(&self) -> PathBuf {
        self.scope_file.clone().unwrap_or_else(|| scope::DEFAULT_PATH.into())
    }

    /// Total time of an ADD.
    pub fn timeout(&self) -> Duration {
        self.timeout_seconds.map_or(DEFAULT_TIMEOUT, Duration::from_secs)
    }

    /// From which level on lines are delivered; the default if the configuration's is none of ours: a
    /// pod is not refused for that.
    pub fn log_level(&self) -> Level {
        self.log_level.as_deref().and_then(Level::parse).unwrap_or_default()
    }

    /// Whether pods of the namespace are never of the mesh.
    pub fn excludes(&self, namespace: &str) -> bool {
        self.exclude_namespaces.iter().flatten().any(|excluded| excluded == namespace)
    }

    /// Whether the pod always passes.
    pub fn exempts(&self, namespace: &str, pod: &str) -> bool {
        self.exempt.iter().flatten().any(|exempt| exempt.covers(namespace, pod))
    }

    /// The attachments that the runtime knows; none if it does not say, which is not the same as an
    /// empty list.
    pub fn valid_attachments(&self) -> Option<Vec<ValidAttachment>> {
        let valid = |attachment: &RuntimeAttachment| ValidAttachment {
            container_id: attachment.container_id.clone(),
            if_name: attachment.ifname.clone(),
        };
        self.valid_attachments.as_ref().map(|attachments| attachments.iter().map(valid).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[test]
    fn the_installer_s_entry_is_read() {
        let config = Config::decode(
            br#"{"cniVersion":"1.0.0","name":"podnet","type":"culvert-cni","runDir":"/run/c","scopeFile":"/s.json",
                "excludeNamespaces":["kube-system"],"timeoutSeconds":7,"logLevel":"debug","later":{"a":1},
                "exempt":[{"namespace":"culvert-system","daemonset":"culvert-node"}]}"#,
        )
        .unwrap();
        config.check().unwrap();
        assert_eq!(config.socket(), PathBuf::from("/run/c/cni.sock"));
        assert_eq!(config.scope_file(), PathBuf::from("/s.json"));
        assert_eq!((config.timeout(), config.log_level()), (Duration::from_secs(7), Level::Debug));
        assert!(config.excludes("kube-system") && !config.excludes("shop"));
        assert!(config.exempts("culvert-system", "culvert-node-abcde"));
    }

    #[rstest]
    #[case::absent("{}")]
    #[case::null(
        r#"{"runDir":null,"scopeFile":null,"excludeNamespaces":null,"timeoutSeconds":null,"logLevel":null,"exempt":null}"#
    )]
    fn every_key_of_ours_has_a_default(#[case] text: &str) {
        let config = Config::decode(text.as_bytes()).unwrap();
        config.check().unwrap();
        assert_eq!(config.socket(), PathBuf::from("/var/run/culvert/cni.sock"));
        assert_eq!(config.scope_file(), PathBuf::from("/var/lib/culvert/scope.json"));
        assert_eq!((config.timeout(), config.log_level()), (Duration::from_secs(20), Level::Info));
        assert!(!config.excludes("kube-system") && !config.exempts("a", "b-abcde"));
    }

    #[rstest]
    #[case::a_list("[]")]
    #[case::wrong_type(r#"{"runDir":7}"#)]
    #[case::wrong_type_inside(r#"{"excludeNamespaces":[7]}"#)]
    #[case::negative_time(r#"{"timeoutSeconds":-1}"#)]
    #[case::incomplete_exemption(r#"{"exempt":[{"namespace":"a"}]}"#)]
    #[case::a_key_twice(r#"{"runDir":"/a","runDir":"/b"}"#)]
    #[case::a_foreign_key_twice(r#"{"foo":1,"foo":2}"#)]
    fn a_damaged_configuration_is_refused(#[case] text: &str) {
        assert!(matches!(Config::decode(text.as_bytes()), Err(Error::Undecodable(_))));
    }

    #[rstest]
    #[case::relative_directory(r#"{"runDir":"run"}"#, "runDir")]
    #[case::relative_file(r#"{"scopeFile":"scope.json"}"#, "scopeFile")]
    #[case::no_time(r#"{"timeoutSeconds":0}"#, "timeoutSeconds")]
    #[case::more_than_kubelet_waits(r#"{"timeoutSeconds":241}"#, "timeoutSeconds")]
    fn a_senseless_value_is_named(#[case] text: &str, #[case] key: &str) {
        let error = Config::decode(text.as_bytes()).unwrap().check().unwrap_err();
        assert!(error.to_string().starts_with(key), "{error}");
    }

    #[test]
    fn an_unknown_log_level_refuses_no_pod() {
        assert_eq!(Config::decode(br#"{"logLevel":"loud"}"#).unwrap().log_level(), Level::Info);
    }

    #[test]
    fn no_list_of_attachments_is_not_an_empty_list() {
        let valid = |text: &str| Config::decode(text.as_bytes()).unwrap().valid_attachments();
        assert_eq!(valid("{}"), None);
        assert_eq!(valid(r#"{"cni.dev/valid-attachments":null}"#), None);
        assert_eq!(valid(r#"{"cni.dev/valid-attachments":[]}"#), Some(vec![]));
    }

    #[test]
    fn a_damaged_configuration_still_says_where_the_agent_is() {
        let damaged = br#"{"name":"podnet","runDir":"/run/c","timeoutSeconds":"x"}"#;
        let config = Config::salvage(damaged).unwrap();
        assert_eq!((config.socket(), config.name.as_deref()), ("/run/c/cni.sock".into(), Some("podnet")));
        assert_eq!(Config::salvage(br#"{"runDir":7}"#), None);
        assert_eq!(Config::salvage(b"\xff"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_configuration_or_an_error(bytes in any::<Vec<u8>>()) {
            drop(Config::decode(&bytes));
            Config::salvage(&bytes);
        }
    }
}
