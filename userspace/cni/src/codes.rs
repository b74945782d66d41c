//! The error codes of the plugin, and what each of them tells an operator.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Code of a CNI error object. Below 100 as the specification names them, from 100 on the steps of an
/// ADD. There is no code for "something went wrong": each failure belongs to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "u32", try_from = "u32")]
#[repr(u32)]
pub enum Code {
    /// The configuration's `cniVersion` is not ours, or older than the verb.
    IncompatibleVersion = 1,
    /// A variable of the environment is missing or malformed; the message names it.
    InvalidEnvironment = 4,
    /// Stdin cannot be read, or not in time.
    Io = 5,
    /// The configuration is no JSON, has wrong types, says a thing twice or is too long.
    Undecodable = 6,
    /// The configuration can be read and makes no sense.
    InvalidConfig = 7,
    /// The agent or ztunnel is not there. The runtime's retry is the remedy.
    TryLater = 11,
    /// STATUS: every ADD would fail.
    Unavailable = 50,
    /// The pod's network namespace cannot be opened, or is not the pod's.
    Netns = 100,
    /// The programs could not be attached to the network namespace; CHECK: they are gone.
    Attach = 101,
    /// ztunnel refused the pod.
    Ztunnel = 102,
    /// Everything is in place and a connection was not captured.
    SelfTest = 103,
    /// No step failed and the time is over.
    Deadline = 104,
}

impl Code {
    /// All of them, in order.
    pub const ALL: [Self; 12] = [
        Self::IncompatibleVersion,
        Self::InvalidEnvironment,
        Self::Io,
        Self::Undecodable,
        Self::InvalidConfig,
        Self::TryLater,
        Self::Unavailable,
        Self::Netns,
        Self::Attach,
        Self::Ztunnel,
        Self::SelfTest,
        Self::Deadline,
    ];

    /// The number on the wire.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The step that failed, for messages.
    pub const fn step(self) -> &'static str {
        match self {
            Self::IncompatibleVersion | Self::Undecodable | Self::InvalidConfig | Self::Unavailable => {
                "read the network configuration"
            }
            Self::InvalidEnvironment => "read the CNI environment",
            Self::Io => "read stdin",
            Self::TryLater => "reach the agent and ztunnel",
            Self::Netns => "open the network namespace",
            Self::Attach => "attach capture",
            Self::Ztunnel => "hand the pod to ztunnel",
            Self::SelfTest => "test capture",
            Self::Deadline => "finish in time",
        }
    }

    /// What an operator can do about it.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::IncompatibleVersion => {
                "set cniVersion of the conflist to one of 0.3.1, 0.4.0, 1.0.0, 1.1.0"
            }
            Self::InvalidEnvironment => "this is the caller's mistake: see how the runtime invokes plugins",
            Self::Io => "see the runtime's journal; it writes the configuration to the plugin's stdin",
            Self::Undecodable | Self::InvalidConfig | Self::Unavailable => {
                "correct the culvert-cni entry of the conflist"
            }
            Self::TryLater => {
                "the runtime tries again by itself; if this stays, see that the culvert agent and ztunnel run \
                 on this node"
            }
            Self::Netns => {
                "see that the agent sees the runtime's network namespaces (--netns-prefix, --host-proc)"
            }
            Self::Attach => "see the agent's log",
            Self::Ztunnel => "see ztunnel's log on this node; the runtime tries again by itself",
            Self::SelfTest => {
                "see the agent's log; another program in the pod or on the node takes its traffic"
            }
            Self::Deadline => {
                "see the agent's log for the step that took long; timeoutSeconds of the conflist entry is the \
                 limit"
            }
        }
    }
}

impl From<Code> for u32 {
    fn from(code: Code) -> Self {
        code.number()
    }
}

/// A number that no [`Code`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not an error code of this protocol")]
pub struct UnknownCode(pub u32);

impl TryFrom<u32> for Code {
    type Error = UnknownCode;

    fn try_from(number: u32) -> Result<Self, UnknownCode> {
        Self::ALL.into_iter().find(|code| code.number() == number).ok_or(UnknownCode(number))
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_lifecycle_rules() {
        let numbers: Vec<u32> = Code::ALL.into_iter().map(Code::number).collect();
        assert_eq!(numbers, [1, 4, 5, 6, 7, 11, 50, 100, 101, 102, 103, 104]);
        for code in Code::ALL {
            assert_eq!(Code::try_from(code.number()), Ok(code));
        }
    }

    #[test]
    fn no_catch_all_code_exists() {
        assert_eq!(Code::try_from(999), Err(UnknownCode(999)));
        assert!(serde_json::from_str::<Code>("999").is_err());
    }
}
