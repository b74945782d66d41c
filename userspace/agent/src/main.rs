//! The node agent.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context as _;
use clap::Parser as _;
use culvert_agent::{app, config::Config, telemetry::Levels};

/// For the dataplane's work. Pods start by the hundred on a few cores: more threads would only take memory.
const BLOCKING_THREADS: usize = 64;

fn main() -> ExitCode {
    let config = Config::parse();
    let levels = match Levels::start(&config.log) {
        Ok(levels) => Arc::new(levels),
        Err(error) => {
            let error = anyhow::Error::new(error);
            clap::Error::raw(clap::error::ErrorKind::ValueValidation, format!("{error:#}\n")).exit()
        }
    };
    match start(config, levels) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(config: Config, levels: Arc<Levels>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .context("runtime")?;
    let outcome = runtime.block_on(app::run(config, levels));
    runtime.shutdown_background();
    outcome
}
