//! The plugin's log, and how it gets to the agent.
//!
//! A line is a JSON object as Istio's plugin writes it: `level`, `time`, `msg`, sometimes `scope`, and
//! labels. A [`Batch`] is a JSON list of texts, each of them such a line.

use std::{fmt, time::SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// How much a line matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// What happens with each pod.
    Debug,
    /// What an operator wants to read.
    #[default]
    Info,
    /// A pod passed without the agent, or something is odd.
    Warn,
    /// A pod was refused.
    Error,
}

impl Level {
    /// The level of that name, as the configuration spells it.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "debug" => Some(Self::Debug),
            "info" => Some(Self::Info),
            "warn" | "warning" => Some(Self::Warn),
            "error" => Some(Self::Error),
            _ => None,
        }
    }
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// How much it matters.
    pub level: Level,
    /// When it was written, RFC 3339.
    #[serde(default)]
    pub time: String,
    /// What happened.
    #[serde(default)]
    pub msg: String,
    /// The part of Istio's plugin that wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// Anything else, such as the pod.
    #[serde(flatten)]
    pub labels: Map<String, Value>,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let json = serde_json::to_string(self).map_err(|serde_json::Error { .. }| fmt::Error)?;
        f.write_str(&json)
    }
}

/// Body of `/log`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Batch(pub Vec<String>);

impl Batch {
    /// The lines. One that cannot be read becomes the message of a warning: nothing is lost.
    pub fn lines(&self) -> impl Iterator<Item = Line> {
        self.0.iter().map(|text| {
            serde_json::from_str(text).unwrap_or_else(|_| Line {
                level: Level::Warn,
                time: String::new(),
                msg: text.clone(),
                scope: None,
                labels: Map::new(),
            })
        })
    }
}

/// Lines of one invocation of the plugin, kept until it ends.
#[derive(Debug, Default)]
pub struct Log {
    lines: Vec<Line>,
    labels: Map<String, Value>,
}

impl Log {
    /// Adds a label to all lines from now on. Empty values are left out.
    pub fn label(&mut self, key: &str, value: &str) {
        if !value.is_empty() {
            self.labels.insert(key.to_owned(), value.into());
        }
    }

    /// Adds a line.
    pub fn line(&mut self, level: Level, msg: impl Into<String>) {
        self.lines.push(Line {
            level,
            time: humantime::format_rfc3339_micros(SystemTime::now()).to_string(),
            msg: msg.into(),
            scope: None,
            labels: self.labels.clone(),
        });
    }

    /// The lines of that level and above.
    pub fn batch(&self, level: Level) -> Batch {
        Batch(self.lines.iter().filter(|line| line.level >= level).map(ToString::to_string).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_is_one_that_istio_s_agent_reads() {
        let mut log = Log::default();
        log.label("pod", "shop/web-0");
        log.label("uid", "");
        log.line(Level::Debug, "asked");
        log.line(Level::Warn, "passed");
        let batch = log.batch(Level::Info);
        let line: Value = serde_json::from_str(&batch.0[0]).unwrap();
        assert_eq!((batch.0.len(), &line["level"], &line["msg"]), (1, &"warn".into(), &"passed".into()));
        assert_eq!((&line["pod"], line.get("uid")), (&"shop/web-0".into(), None));
        let time = humantime::parse_rfc3339(line["time"].as_str().unwrap()).unwrap();
        assert!(time <= SystemTime::now());
    }

    #[test]
    fn istio_s_lines_are_read() {
        let batch: Batch = serde_json::from_str(
            r#"["{\"level\":\"info\",\"time\":\"2026-01-01T00:00:00Z\",\"scope\":\"cni-plugin\",\"msg\":\"hello\",\"pod\":\"a\",\"if\":2}","no json"]"#,
        )
        .unwrap();
        let lines: Vec<Line> = batch.lines().collect();
        assert_eq!((lines[0].level, lines[0].scope.as_deref()), (Level::Info, Some("cni-plugin")));
        assert_eq!((&lines[0].labels["pod"], &lines[0].labels["if"]), (&"a".into(), &2.into()));
        assert_eq!((lines[1].level, lines[1].msg.as_str()), (Level::Warn, "no json"));
    }

    proptest! {
        #[test]
        fn any_text_is_a_line(text in any::<String>()) {
            prop_assert_eq!(Batch(vec![text]).lines().count(), 1);
        }
    }
}
