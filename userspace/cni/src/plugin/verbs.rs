//! DEL, CHECK, STATUS and GC: none of them fails because the agent is away.

use std::time::Instant;

use super::{Call, PATIENCE, Plugin, conversation::block_on};
use crate::{
    answer::Refusal,
    client::{Client, Error},
    codes::Code,
    config::Config,
    event::{Attachment, GcRequest, PLUGIN_VERSION, StatusRequest},
    log::Level,
};

impl Plugin {
    /// Always succeeds: a pod that cannot be deleted is worse than one that the agent finds gone by
    /// itself.
    pub(super) fn del(&mut self, call: &Call, stdin: Result<Vec<u8>, Refusal>) {
        let config = match configuration_for_del(stdin) {
            Ok(config) => config,
            Err(refusal) => {
                self.log.line(Level::Warn, format!("DEL without a configuration tells nobody: {refusal}"));
                return;
            }
        };
        self.adopt(&config);
        let attachment = attachment(call, &config);
        match self.ask(&config, async |client| client.del(&attachment).await) {
            Ok(outcome) => self.log.line(Level::Debug, format!("DEL: {outcome:?}")),
            Err(error) => self.log.line(Level::Warn, format!("the agent was not told of the DEL: {error}")),
        }
    }

    /// Fails only if the agent says that a pod of its own is not captured. A runtime may CHECK for a
    /// status right after the ADD, or when the agent is being replaced.
    pub(super) fn check(&mut self, call: &Call, config: &Config) -> Result<(), Refusal> {
        if !call.args.is_pod() {
            return Ok(());
        }
        let attachment = attachment(call, config);
        match self.ask(config, async |client| client.check(&attachment).await) {
            Ok(outcome) => self.log.line(Level::Debug, format!("CHECK: {outcome:?}")),
            Err(Error::Refused(refusal)) if refusal.code == Code::Attach => return Err(refusal),
            Err(error) => self.log.line(Level::Warn, format!("CHECK passes unchecked: {error}")),
        }
        Ok(())
    }

    /// Succeeds with any configuration that can be read. Kubelet takes a failure for a node without a
    /// network, and then does not even start the agent or ztunnel.
    pub(super) fn status(&mut self, config: &Config) {
        let request = StatusRequest {
            network_name: config.name.clone().unwrap_or_default(),
            plugin_version: Some(PLUGIN_VERSION.to_owned()),
        };
        match self.ask(config, async |client| client.status(&request).await) {
            Ok(status) if status.ready => self.log.line(Level::Debug, "STATUS: the agent is ready"),
            Ok(status) => {
                let reasons = status.reasons.join("; ");
                self.log.line(Level::Warn, format!("STATUS: the agent is not ready: {reasons}"));
            }
            Err(error) => self.log.line(Level::Warn, format!("STATUS: {error}")),
        }
    }

    /// Hands the runtime's list on. A configuration without a list says nothing, not "none".
    pub(super) fn gc(&mut self, config: &Config) -> Result<(), Refusal> {
        let Some(valid_attachments) = config.valid_attachments() else {
            self.log.line(Level::Warn, "GC without cni.dev/valid-attachments: nothing done");
            return Ok(());
        };
        let request = GcRequest {
            network_name: config.name.clone().unwrap_or_default(),
            valid_attachments,
            plugin_version: Some(PLUGIN_VERSION.to_owned()),
        };
        match self.ask(config, async |client| client.gc(&request).await) {
            Ok(()) => {}
            Err(Error::Refused(refusal)) => return Err(refusal),
            Err(error) => self.log.line(Level::Warn, format!("GC: {error}")),
        }
        Ok(())
    }

    fn ask<T>(
        &mut self,
        config: &Config,
        request: impl AsyncFnOnce(&Client) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let client = super::client(config.socket(), Instant::now() + PATIENCE);
        let answer = block_on(&client, request(&client));
        self.note_absence(&answer);
        answer
    }

    /// An agent that gave no answer takes no log either.
    pub(super) fn note_absence<T>(&mut self, answer: &Result<T, Error>) {
        if matches!(answer, Err(Error::Unreachable { .. } | Error::TimedOut { .. } | Error::Lost(_))) {
            self.agent = None;
        }
    }
}

/// The configuration, or what can be salvaged of it.
fn configuration_for_del(stdin: Result<Vec<u8>, Refusal>) -> Result<Config, Refusal> {
    let stdin = stdin?;
    let decoded = Config::decode(&stdin).and_then(|config| config.check().map(|()| config));
    decoded.or_else(|error| Config::salvage(&stdin).ok_or_else(|| error.into()))
}

/// The one case in which a STATUS fails.
pub(super) fn every_add_would_fail(refusal: Refusal) -> Refusal {
    match refusal.code {
        Code::Undecodable | Code::InvalidConfig => Refusal { code: Code::Unavailable, ..refusal },
        _ => refusal,
    }
}

fn attachment(call: &Call, config: &Config) -> Attachment {
    let set = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    Attachment {
        container_id: call.container_id.clone(),
        if_name: set(&call.ifname),
        network_name: config.name.clone().filter(|name| !name.is_empty()),
        netns: set(&call.netns),
        pod_name: set(&call.args.name),
        pod_namespace: set(&call.args.namespace),
        pod_uid: set(&call.args.uid),
        plugin_version: Some(PLUGIN_VERSION.to_owned()),
    }
}
