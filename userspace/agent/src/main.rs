//! The node agent.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context as _;
use clap::Parser as _;
use culvert_agent::{app, config::Config, telemetry::Levels};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// For sockets and messages, which take little time: one for each CPU would only take memory.
const WORKERS: usize = 2;
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
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .context("runtime")?;
    let outcome = runtime.block_on(app::run(config, levels));
    runtime.shutdown_background();
    outcome
}

/// Each pod takes four descriptors. The soft limit is mostly 1,024, for programs that use select(2).
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(errno) = raised {
        tracing::warn!(%errno, "cannot raise the limit of open files; with many pods it may be too low");
    }
}
