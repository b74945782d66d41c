//! The `CNI_*` variables.

use std::{
    env,
    ffi::{OsStr, OsString},
};

use super::spec::{self, Verb};
use crate::{answer::Refusal, args::Args, codes::Code};

const COMMAND: &str = "CNI_COMMAND";
const CONTAINER_ID: &str = "CNI_CONTAINERID";
const NETNS: &str = "CNI_NETNS";
const IFNAME: &str = "CNI_IFNAME";
const ARGS: &str = "CNI_ARGS";
const PATH: &str = "CNI_PATH";

/// The variables as they are. An empty one is an unset one.
#[derive(Clone, Debug, Default)]
pub(super) struct Environment(Vec<(&'static str, OsString)>);

/// Which container a verb is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) container_id: String,
    /// Empty only in a DEL.
    pub(super) ifname: String,
    /// Empty only in a DEL.
    pub(super) netns: String,
    pub(super) args: Args,
}

impl Environment {
    pub(super) fn of_process() -> Self {
        Self::new(env::var_os)
    }

    pub(super) fn new(variable: impl Fn(&'static str) -> Option<OsString>) -> Self {
        let set = |name| variable(name).filter(|value| !value.is_empty()).map(|value| (name, value));
        Self([COMMAND, CONTAINER_ID, NETNS, IFNAME, ARGS, PATH].into_iter().filter_map(set).collect())
    }

    pub(super) fn command(&self) -> Option<&OsStr> {
        self.get(COMMAND)
    }

    pub(super) fn verb(&self) -> Result<Verb, Refusal> {
        spec::verb(&self.required(COMMAND)?)
    }

    /// The container of an ADD or CHECK.
    pub(super) fn call(&self) -> Result<Call, Refusal> {
        let missing: Vec<_> =
            [CONTAINER_ID, NETNS, IFNAME].into_iter().filter(|name| self.get(name).is_none()).collect();
        if !missing.is_empty() {
            return Err(invalid(format!("{} not set", missing.join(", "))));
        }
        Ok(Call {
            container_id: spec::container_id(self.required(CONTAINER_ID)?)?,
            ifname: spec::interface_name(self.required(IFNAME)?)?,
            netns: self.required(NETNS)?,
            args: Args::parse(&self.text(ARGS)?.unwrap_or_default())
                .map_err(|error| invalid(error.to_string()))?,
        })
    }

    /// The container of a DEL: only its id has to be there. What else cannot be read is left out.
    pub(super) fn call_for_del(&self) -> Result<Call, Refusal> {
        let container_id =
            self.get(CONTAINER_ID).ok_or_else(|| invalid(format!("{CONTAINER_ID} not set")))?;
        let lenient = |name| self.text(name).ok().flatten().unwrap_or_default();
        Ok(Call {
            container_id: container_id.to_string_lossy().into_owned(),
            ifname: lenient(IFNAME),
            netns: lenient(NETNS),
            args: Args::parse(&lenient(ARGS)).unwrap_or_default(),
        })
    }

    /// A GC has to say where plugins are, though we call none.
    pub(super) fn require_path(&self) -> Result<(), Refusal> {
        self.get(PATH).map(drop).ok_or_else(|| invalid(format!("{PATH} not set")))
    }

    fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.iter().find(|(set, _)| *set == name).map(|(_, value)| value.as_os_str())
    }

    fn text(&self, name: &str) -> Result<Option<String>, Refusal> {
        let text = |value: &OsStr| value.to_str().map(str::to_owned);
        self.get(name)
            .map(|value| text(value).ok_or_else(|| invalid(format!("{name} is not UTF-8"))))
            .transpose()
    }

    fn required(&self, name: &str) -> Result<String, Refusal> {
        self.text(name)?.ok_or_else(|| invalid(format!("{name} not set")))
    }
}

fn invalid(why: String) -> Refusal {
    Refusal::new(Code::InvalidEnvironment, "invalid environment", why)
}
