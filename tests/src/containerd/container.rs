//! Containers of a sandbox.

use std::{fs, path::PathBuf, time::Duration};

use serde_json::{Value, json};

use super::{Sandbox, answer};
use crate::eventually::within;

/// A busy machine takes its time.
const PATIENCE: Duration = Duration::from_secs(30);

/// A container that was started.
#[derive(Clone, Debug)]
pub struct Container {
    log: PathBuf,
}

impl Container {
    /// CreateContainer and StartContainer. `more` is the rest of its ContainerConfig (api.proto of CRI).
    #[track_caller]
    pub(crate) fn start(
        sandbox: &Sandbox<'_>,
        name: &str,
        image: &str,
        arguments: &[&str],
        more: &Value,
    ) -> Self {
        let Sandbox { containerd, id, spec, config } = sandbox;
        let log = format!("{name}.log");
        let mut container = json!({
            "metadata": { "name": name },
            "image": { "image": image },
            "args": arguments,
            "log_path": log,
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            container[key] = value.clone();
        }
        let file = containerd.file(&format!("{id}-{name}.json"), &container).expect("the container's file");
        let created = answer(containerd.crictl(&["create", "--no-pull", id, &file, config]).output());
        let created = created.unwrap_or_else(|error| panic!("create {name}: {error}"));
        answer(containerd.crictl(&["start", &created]).output())
            .unwrap_or_else(|error| panic!("start {name}: {error}"));
        Self { log: containerd.logs().join(spec.uid()).join(log) }
    }

    /// Its output until now: CRI's log without time, stream and tag.
    pub fn output(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().map(|line| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned() + "\n").collect()
    }

    /// Waits for a line of its output with these words.
    #[track_caller]
    pub fn wait_for(&self, words: &str) -> String {
        within(PATIENCE, &format!("{words:?} in {}", self.log.display()), || {
            self.output().lines().find(|line| line.contains(words)).map(str::to_owned)
        })
    }
}
