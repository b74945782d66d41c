//! The log: one line per event on stderr, levels per scope at run time.
//!
//! Scopes are the modules (`culvert_agent::enroll`), crates (`culvert_zds`) and [`PLUGIN`] for the lines
//! of the CNI plugin. A level is set by directives as in `RUST_LOG`: `info,culvert_agent::enroll=debug`.

use std::sync::{Mutex, PoisonError};

use culvert_cni::log::{Level, Line};
use tracing_subscriber::{
    EnvFilter, Registry, fmt, layer::SubscriberExt as _, reload, util::SubscriberInitExt as _,
};

/// The scope of the plugin's lines.
pub const PLUGIN: &str = "culvert_cni";

/// A level cannot be set.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No directives.
    #[error("{0:?} are no log levels; an example: info,culvert_agent::enroll=debug")]
    Directives(String, #[source] tracing_subscriber::filter::ParseError),
    /// The log has ended.
    #[error("the log has ended")]
    Ended(#[from] reload::Error),
    /// Somebody else has set up the log of this process.
    #[error("this process has a log already")]
    Taken(#[from] tracing_subscriber::util::TryInitError),
}

/// The levels in force.
#[derive(Debug)]
pub struct Levels {
    filter: reload::Handle<EnvFilter, Registry>,
    text: Mutex<String>,
}

impl Levels {
    /// Begins the log of the process.
    pub fn start(directives: &str) -> Result<Self, Error> {
        let (filter, handle) = reload::Layer::new(parse(directives)?);
        let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
        tracing_subscriber::registry().with(filter).with(lines).try_init()?;
        Ok(Self { filter: handle, text: Mutex::new(directives.to_owned()) })
    }

    /// Replaces the levels.
    pub fn set(&self, directives: &str) -> Result<(), Error> {
        self.filter.reload(parse(directives)?)?;
        directives.clone_into(&mut self.text.lock().unwrap_or_else(PoisonError::into_inner));
        tracing::info!(directives, "log levels set");
        Ok(())
    }

    /// The directives in force.
    pub fn get(&self) -> String {
        self.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn parse(directives: &str) -> Result<EnvFilter, Error> {
    EnvFilter::builder().parse(directives).map_err(|error| Error::Directives(directives.to_owned(), error))
}

/// Writes a line of the plugin into the agent's log, in its own scope and with its own time.
pub fn plugin_line(line: &Line) {
    let Line { level, time, msg, scope: _, labels } = line;
    let text = |label: &str| labels.get(label).and_then(|value| value.as_str()).unwrap_or_default();
    let (pod, uid, container) = (text("pod"), text("uid"), text("container"));
    match level {
        Level::Debug => tracing::debug!(target: PLUGIN, time, pod, uid, container, "{msg}"),
        Level::Info => tracing::info!(target: PLUGIN, time, pod, uid, container, "{msg}"),
        Level::Warn => tracing::warn!(target: PLUGIN, time, pod, uid, container, "{msg}"),
        Level::Error => tracing::error!(target: PLUGIN, time, pod, uid, container, "{msg}"),
    }
}
