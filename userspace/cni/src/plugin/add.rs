//! ADD: a pod of the mesh starts only after the agent's yes, any other pod is not kept waiting.

use std::{cell::LazyCell, fs, os::unix::fs::MetadataExt as _, pin::pin, time::Duration};

use tokio::time;

use super::{Call, PATIENCE, Plugin, conversation::block_on, spec::PrevResult};
use crate::{
    answer::{Answer, Refusal, StepTime},
    client::{Client, Error},
    codes::Code,
    config::Config,
    event::{AddEvent, PLUGIN_VERSION},
    log::Level,
    scope::{self, Scope},
};

impl Plugin {
    pub(super) fn add(&mut self, call: &Call, config: &Config) -> Result<String, Refusal> {
        let previous = PrevResult::of(config)?;
        if let Some(why) = passes_unasked(call, config) {
            self.log.line(Level::Debug, format!("passes: {why}"));
            return previous.render(self.version);
        }
        let event = self.event(call, config, &previous);
        // Rendered before the agent acts: a pod is not enrolled for an ADD that then fails.
        let result = previous.render(self.version)?;
        let prepared = StepTime::new("prepare", self.started.elapsed());

        let client = super::client(config.socket(), self.started + config.timeout());
        let scope = LazyCell::new(|| Scope::read(&config.scope_file()));
        let answer = block_on(&client, ask(&client, &event, || is_outside(&scope, &call.args.namespace)));
        self.note_absence(&answer);
        match answer {
            Ok(answer) => self.log.line(Level::Debug, describe(prepared, &answer, self.started.elapsed())),
            Err(error) => {
                let why = without_agent(error, &scope, &call.args.namespace)?;
                self.log.line(Level::Warn, format!("passes without the agent: {why}"));
            }
        }
        Ok(result)
    }

    fn event(&mut self, call: &Call, config: &Config, previous: &PrevResult) -> AddEvent {
        // The agent opens the path itself, and is to find the same namespace there.
        let netns = match fs::metadata(&call.netns) {
            Ok(metadata) => Some((metadata.dev(), metadata.ino())),
            Err(error) => {
                self.log.line(Level::Warn, format!("network namespace {}: {error}", call.netns));
                None
            }
        };
        AddEvent {
            netns: call.netns.clone(),
            pod_name: call.args.name.clone(),
            pod_namespace: call.args.namespace.clone(),
            ips: previous.addresses(),
            container_id: Some(call.container_id.clone()),
            if_name: Some(call.ifname.clone()),
            network_name: config.name.clone(),
            pod_uid: Some(call.args.uid.clone()).filter(|uid| !uid.is_empty()),
            netns_dev: netns.map(|(device, _)| device),
            netns_ino: netns.map(|(_, inode)| inode),
            plugin_version: Some(PLUGIN_VERSION.to_owned()),
        }
    }
}

/// The whole ADD in one line, from the start of this process to the answer.
fn describe(prepared: StepTime, answer: &Answer, total: Duration) -> String {
    let steps = [&prepared].into_iter().chain(&answer.steps).map(ToString::to_string);
    let total = StepTime::new("total", total).to_string();
    let steps: Vec<_> = steps.chain([total]).collect();
    format!("the agent's answer: {}; {}", answer.outcome, steps.join(", "))
}

/// Why the pod is no business of the agent, by what the plugin knows itself.
pub(super) fn passes_unasked(call: &Call, config: &Config) -> Option<&'static str> {
    let args = &call.args;
    if !args.is_pod() {
        Some("not a Kubernetes pod")
    } else if config.exempts(&args.namespace, &args.name) {
        Some("a pod of an exempt DaemonSet")
    } else if config.excludes(&args.namespace) {
        Some("an excluded namespace")
    } else {
        None
    }
}

/// Asks until the deadline; only for a while if the pod may pass without an answer.
async fn ask(client: &Client, event: &AddEvent, may_pass: impl FnOnce() -> bool) -> Result<Answer, Error> {
    let mut answer = pin!(client.add(event));
    match time::timeout(PATIENCE, &mut answer).await {
        Ok(answer) => answer,
        Err(_) if may_pass() => Err(Error::TimedOut { path: client.socket().to_owned() }),
        Err(_) => answer.await,
    }
}

fn is_outside(scope: &Result<Scope, scope::Error>, namespace: &str) -> bool {
    matches!(scope, Ok(scope) if !scope.contains(namespace))
}

/// Decides over a pod that the agent gave no good answer for: why it may pass, or the failure.
pub(super) fn without_agent(
    error: Error,
    scope: &Result<Scope, scope::Error>,
    namespace: &str,
) -> Result<String, Refusal> {
    let code = match error {
        // The agent's word stands, whatever the scope.
        Error::Refused(refusal) => return Err(refusal),
        Error::TimedOut { .. } => Code::Deadline,
        Error::Unreachable { .. } | Error::Lost(_) | Error::Foreign { .. } => Code::TryLater,
    };
    let msg = match error {
        Error::TimedOut { .. } => "the culvert agent did not answer in time",
        Error::Foreign { .. } => "something else than the culvert agent answered",
        _ => "the culvert agent is not there",
    };
    match scope {
        Ok(scope) if !scope.contains(namespace) => {
            Ok(format!("{error}; namespace {namespace} is not in the scope of the mesh"))
        }
        Ok(_) => Err(Refusal::new(
            code,
            msg,
            format!(
                "{error}; namespace {namespace} is in the scope of the mesh, so the pod may not start alone"
            ),
        )),
        Err(damage) => Err(Refusal::new(
            code,
            msg,
            format!(
                "{error}; and {damage}, so no pod may start alone but those of excludeNamespaces and exempt: \
                 start the culvert agent on this node, which writes the file"
            ),
        )),
    }
}
