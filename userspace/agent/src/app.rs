//! Builds every part and joins them.
//!
//! Start: probe ► dataplane (adopts pins) ► records ► ZDS ► plugin's socket ► ready. Stop is the reverse;
//! links and maps stay pinned, so enrolled pods go on. One agent at a time owns the node: a new one asks the
//! old one for it, which then stands by and takes the node back should the new one end.

mod tenure;

use std::{
    fs,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, bail};
use culvert_zds::Ztunnels;
use tokio::{
    net::{TcpListener, UnixStream},
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use crate::{
    admin::{self, Pages},
    config::Config,
    membership::{Source, kubernetes::Kubernetes, standalone::Standalone},
    metrics::Metrics,
    ownership::Lock,
    readiness::Readiness,
    telemetry::Levels,
};
use tenure::End;

/// Part of the readiness: whether this agent owns the node.
const OWNERSHIP: &str = "node";

/// What lives as long as the process.
struct App<M> {
    config: Config,
    levels: Arc<Levels>,
    readiness: Arc<Readiness>,
    metrics: Arc<Metrics>,
    membership: Arc<M>,
    /// Those of the present tenure.
    ztunnels: Arc<Mutex<Option<Ztunnels>>>,
    stop: CancellationToken,
}

impl<M: Source> App<M> {
    fn show(&self, ztunnels: Option<Ztunnels>) {
        *self.ztunnels.lock().unwrap_or_else(PoisonError::into_inner) = ztunnels;
    }
}

/// Runs the agent until SIGTERM or SIGINT.
pub async fn run(config: Config, levels: Arc<Levels>) -> anyhow::Result<()> {
    let stop = stop_on_signals()?;
    refuse_beside_istio(&config.istio_socket).await?;
    make_directory(&config.run_dir)?;
    let (rule, metrics) = (config.rule()?, Arc::new(Metrics::default()));
    match (&config.standalone, &config.node_name) {
        (Some(file), _) => {
            let membership = Standalone::read(file.clone(), rule)?;
            run_with(Arc::new(membership), config, levels, metrics, stop).await
        }
        (None, Some(node)) => {
            let kubeconfig = config.kubeconfig.as_deref();
            let membership =
                Kubernetes::connect(kubeconfig, node.clone(), rule, Arc::clone(&metrics)).await?;
            run_with(Arc::new(membership), config, levels, metrics, stop).await
        }
        (None, None) => {
            bail!("the node's name is not known: set NODE_NAME from spec.nodeName, or give --node-name")
        }
    }
}

async fn run_with<M: Source>(
    membership: Arc<M>,
    config: Config,
    levels: Arc<Levels>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let app = App {
        levels,
        readiness: Arc::default(),
        metrics,
        membership,
        ztunnels: Arc::default(),
        stop: stop.clone(),
        config,
    };
    app.readiness.report(OWNERSHIP, "not taken yet");
    let http = app.config.http;
    let listener = TcpListener::bind(http).await.with_context(|| format!("listen on {http}"))?;
    let pages = tokio::spawn(admin::serve_pages(listener, Arc::new(pages(&app)), stop.clone()));

    let mut lock = stop.run_until_cancelled(Lock::acquire(&app.config.run_dir)).await.transpose()?;
    while let Some(owned) = lock {
        match tenure::serve(&app, owned).await? {
            End::Stopped => break,
            End::Broken => bail!("a part of the agent ended by itself"),
            End::HandedOver => {
                tracing::info!("standing by: another agent owns the node");
                lock = stop.run_until_cancelled(Lock::take_back(&app.config.run_dir)).await.transpose()?;
            }
        }
    }
    pages.await.context("pages")?.context("pages")
}

/// Two agents would take the same pods. Its ZDS socket is not touched: a connection there would be taken
/// for a ztunnel, and the newest one (`lifecycle.md` §8).
async fn refuse_beside_istio(socket: &Path) -> anyhow::Result<()> {
    if UnixStream::connect(socket).await.is_ok() {
        bail!(
            "istio-cni's agent listens on {}: remove it from this node first (the `cni` component of Istio)",
            socket.display()
        );
    }
    Ok(())
}

fn stop_on_signals() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stopping.cancel();
    });
    Ok(stop)
}

fn make_directory(path: &Path) -> anyhow::Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o700)))
        .with_context(|| format!("make {} for root only", path.display()))
}

fn pages<M>(app: &App<M>) -> Pages {
    let ztunnels = Arc::clone(&app.ztunnels);
    Pages {
        readiness: Arc::clone(&app.readiness),
        metrics: Arc::clone(&app.metrics),
        ztunnels: Box::new(move || {
            let ztunnels = ztunnels.lock().unwrap_or_else(PoisonError::into_inner);
            ztunnels.as_ref().map_or(0, |ztunnels| ztunnels.connected().borrow().len())
        }),
    }
}
