//! The CNI specification, by `rscni-types`: versions, names, results, error objects. The only file that
//! knows the crate.
//!
//! Its companion `rscni-plugin` would also run the process, but for rules that it has no place for: a
//! limit for stdin, a DEL that always succeeds (also without `CNI_IFNAME` or a readable configuration),
//! code 50 of a STATUS, an error object in the configuration's version. What is left of it is one match.

use rscni_types::{
    error::Error,
    legacy,
    types::{CNIResult, CNIResultWithVersion, ContainerId, ErrorResult, InterfaceName, NetConf},
    version::PluginInfo,
};
use serde::Deserialize as _;

use crate::{answer::Refusal, codes::Code, config::Config, event};

pub(super) use rscni_types::{types::Cmd as Verb, version::SpecVersion as Version};

/// The versions that the plugin speaks.
const SUPPORTED: [Version; 4] =
    [Version::new(0, 3, 1), Version::new(0, 4, 0), Version::new(1, 0, 0), Version::new(1, 1, 0)];

fn info() -> PluginInfo {
    PluginInfo::new(Version::CURRENT, SUPPORTED.to_vec())
}

/// Answer to VERSION.
pub(super) fn version_json() -> Result<String, Refusal> {
    serde_json::to_string(&info()).map_err(unencodable)
}

pub(super) fn verb(command: &str) -> Result<Verb, Refusal> {
    Ok(command.parse::<Verb>()?)
}

/// The version that the configuration is written in; 0.1.0 if it does not say.
pub(super) fn declared(config: &Config) -> Result<Version, Refusal> {
    Ok(net_conf(config).version()?)
}

/// Whether the verb exists in the version, and the version is ours.
pub(super) fn negotiate(version: Version, verb: Verb) -> Result<(), Refusal> {
    version.allows(verb)?;
    Ok(info().validate(version)?)
}

/// Whether the network has a name that the specification allows.
pub(super) fn check_name(config: &Config) -> Result<(), Refusal> {
    Ok(net_conf(config).validate_name()?)
}

fn net_conf(config: &Config) -> NetConf {
    NetConf {
        cni_version: config.cni_version.clone().unwrap_or_default(),
        name: config.name.clone().unwrap_or_default(),
        ..NetConf::default()
    }
}

pub(super) fn container_id(text: String) -> Result<String, Refusal> {
    Ok(ContainerId::try_from(text)?.to_string())
}

pub(super) fn interface_name(text: String) -> Result<String, Refusal> {
    Ok(InterfaceName::try_from(text)?.to_string())
}

/// The error object that goes to stdout.
pub(super) fn error_json(version: Version, refusal: &Refusal) -> String {
    let Refusal { code, msg, details } = refusal.clone();
    let object = ErrorResult::new(version, &Error::Custom(code.number(), msg, details));
    // A struct of texts and a number: there is no error to have.
    serde_json::to_string(&object).unwrap_or_default()
}

/// Result of the plugin before, which an ADD gives back.
pub(super) struct PrevResult(CNIResult);

impl PrevResult {
    /// The configuration's result, an empty one if it has none.
    pub(super) fn of(config: &Config) -> Result<Self, Refusal> {
        let Some(value) = &config.prev_result else {
            return Ok(Self(CNIResult::default()));
        };
        let undecodable = |why: String| Refusal::new(Code::Undecodable, "prevResult cannot be decoded", why);
        // serde takes a list for a struct, too.
        if !value.is_object() {
            return Err(undecodable("not an object".to_owned()));
        }
        CNIResult::deserialize(value).map(Self).map_err(|error| undecodable(error.to_string()))
    }

    /// Its addresses, as the agent is told.
    pub(super) fn addresses(&self) -> Vec<event::IpConfig> {
        let addresses = self.0.ips.iter().map(|ip| event::IpConfig {
            interface: ip.interface.map(i64::from),
            address: event::IpNetwork::new(ip.address.addr(), ip.address.prefix_len()),
            gateway: ip.gateway,
        });
        addresses.collect()
    }

    /// The result in the layout of the version.
    pub(super) fn render(self, version: Version) -> Result<String, Refusal> {
        if version.is_legacy() {
            serde_json::to_string(&legacy::CNIResult::new(version, self.0))
        } else {
            serde_json::to_string(&CNIResultWithVersion::new(version, self.0))
        }
        .map_err(unencodable)
    }
}

fn unencodable(error: serde_json::Error) -> Refusal {
    Refusal::new(Code::Io, "the answer cannot be encoded", error.to_string())
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        // All that comes here has a code of ours; "invalid configuration" covers the rest of the crate.
        let code = Code::try_from(u32::from(&error)).unwrap_or(Code::InvalidConfig);
        Self::new(code, error.msg(), error.details())
    }
}

impl From<crate::config::Error> for Refusal {
    fn from(error: crate::config::Error) -> Self {
        use crate::config::Error;
        let (code, msg) = match error {
            Error::Undecodable(_) => (Code::Undecodable, "the network configuration cannot be decoded"),
            Error::Invalid { .. } => (Code::InvalidConfig, "the network configuration is invalid"),
        };
        Self::new(code, msg, error.to_string())
    }
}
