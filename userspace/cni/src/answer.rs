//! What the agent answers.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::codes::Code;

/// What became of an attachment. Every outcome is a success for the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// ADD: attached, acknowledged by ztunnel, tested. CHECK: still captured.
    Enrolled,
    /// The pod is none of the mesh.
    NotInMesh,
    /// DEL, CHECK: no such attachment.
    Unknown,
    /// DEL, GC: removed, or being removed.
    Removed,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Enrolled => "enrolled",
            Self::NotInMesh => "not in the mesh",
            Self::Unknown => "no such attachment",
            Self::Removed => "removed",
        })
    }
}

/// Body of a 200 to ADD, DEL, CHECK and GC.
///
/// Istio's agent answers an ADD with an empty body: the status alone is the answer there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// What became of it.
    pub outcome: Outcome,
    /// ADD: the agent's steps in order, one after the other, each once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepTime>,
}

impl Answer {
    /// An answer without steps.
    pub const fn new(outcome: Outcome) -> Self {
        Self { outcome, steps: Vec::new() }
    }
}

/// How long a step of an ADD took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTime {
    /// Name of the step.
    pub step: String,
    /// Microseconds.
    pub us: u64,
}

impl StepTime {
    /// A step's time.
    pub fn new(step: impl Into<String>, time: Duration) -> Self {
        Self { step: step.into(), us: u64::try_from(time.as_micros()).unwrap_or(u64::MAX) }
    }
}

/// As in the log: `netns 0.13 ms`.
impl fmt::Display for StepTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}.{:02} ms", self.step, self.us / 1000, self.us % 1000 / 10)
    }
}

/// Body of a 200 to STATUS. Never decides anything, the plugin logs it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Whether an ADD of a mesh pod would succeed now.
    pub ready: bool,
    /// Why not.
    #[serde(default)]
    pub reasons: Vec<String>,
}

/// Body of every answer that is not a 200, and the plugin's own failures: a CNI error but for its
/// `cniVersion`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{msg} (code {code}): {details}")]
pub struct Refusal {
    /// Which step failed.
    pub code: Code,
    /// What happened, in a few words.
    pub msg: String,
    /// Why. The plugin adds the step, the pod and what to do ([`Code::remedy`]).
    #[serde(default)]
    pub details: String,
}

impl Refusal {
    /// A refusal with both its texts.
    pub fn new(code: Code, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: details.into() }
    }

    /// HTTP status that the agent sends it with. The plugin reads the code only.
    pub const fn status(&self) -> u16 {
        match self.code {
            Code::TryLater | Code::Unavailable => 503,
            Code::Deadline => 504,
            Code::Netns | Code::Attach | Code::Ztunnel | Code::SelfTest | Code::Io => 500,
            Code::IncompatibleVersion
            | Code::InvalidEnvironment
            | Code::Undecodable
            | Code::InvalidConfig => 400,
        }
    }

    /// Reads the body of an answer that is not a 200; none if it is not of this protocol (Istio's agent
    /// answers in plain text). A code that this version does not know becomes "try later": the agent
    /// may be newer than the plugin.
    pub fn decode(body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Wire {
            code: u32,
            msg: String,
            #[serde(default)]
            details: String,
        }
        let Wire { code, msg, details } = serde_json::from_slice(body).ok()?;
        Some(match Code::try_from(code) {
            Ok(code) => Self { code, msg, details },
            Err(unknown) => {
                Self::new(Code::TryLater, msg, format!("{details} [the agent's code: {unknown}]"))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_reads_on_the_wire_like_a_cni_error() {
        let refusal = Refusal::new(Code::Ztunnel, "ztunnel refused the pod", "address in use");
        let json = serde_json::to_string(&refusal).unwrap();
        assert_eq!(json, r#"{"code":102,"msg":"ztunnel refused the pod","details":"address in use"}"#);
        assert_eq!(Refusal::decode(json.as_bytes()), Some(refusal));
    }

    #[test]
    fn a_code_of_a_newer_agent_means_try_later() {
        let refusal = Refusal::decode(br#"{"code":999,"msg":"odd"}"#).unwrap();
        assert_eq!(refusal.code, Code::TryLater);
        assert!(refusal.details.contains("999"), "{refusal}");
    }

    #[test]
    fn plain_text_is_no_refusal() {
        assert_eq!(Refusal::decode(b"failed to add pod to mesh\n"), None);
        assert_eq!(Refusal::decode(b""), None);
    }

    #[test]
    fn steps_come_in_microseconds_and_an_older_agent_sends_none() {
        let steps = vec![StepTime::new("netns", Duration::from_nanos(1_234_567))];
        let answer = Answer { outcome: Outcome::Enrolled, steps };
        let json = serde_json::to_string(&answer).unwrap();
        assert_eq!(json, r#"{"outcome":"enrolled","steps":[{"step":"netns","us":1234}]}"#);
        assert_eq!(answer.steps[0].to_string(), "netns 1.23 ms");
        let older: Answer = serde_json::from_str(r#"{"outcome":"enrolled"}"#).unwrap();
        assert_eq!(older, Answer::new(Outcome::Enrolled));
    }

    #[test]
    fn outcomes_have_stable_names() {
        let names = [Outcome::Enrolled, Outcome::NotInMesh, Outcome::Unknown, Outcome::Removed]
            .map(|outcome| serde_json::to_string(&Answer::new(outcome)).unwrap());
        assert_eq!(
            names,
            [
                r#"{"outcome":"enrolled"}"#,
                r#"{"outcome":"not-in-mesh"}"#,
                r#"{"outcome":"unknown"}"#,
                r#"{"outcome":"removed"}"#
            ]
        );
    }
}
