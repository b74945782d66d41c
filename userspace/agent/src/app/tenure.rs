//! The time in which this process owns the node: from the lock to its release.

use std::{fs, io, path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use culvert_dataplane::{Dataplane, probe};
use culvert_zds::{Server, SocketFile};
use nix::unistd::Uid;
use tokio::time::timeout;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::App;
use crate::{
    admin::{self, Controls},
    cni_server,
    config::Config,
    discover,
    enroll::{Enrollment, HostPaths},
    membership::Source,
    ownership::Lock,
    readiness::Readiness,
    reconcile::Reconciler,
    record::Records,
    scope_file::ScopeFile,
    unix_socket::OwnListener,
    workloads::Workloads,
};

/// Between looks for netns that vanished.
const REAP: Duration = Duration::from_secs(5);
/// Between looks whether the sockets are still ours.
const SOCKETS: Duration = Duration::from_secs(2);
/// For requests under way at the end; an ADD may take that long.
const LAST_REQUESTS: Duration = Duration::from_secs(25);

const CNI_SOCKET: &str = "plugin's socket";
const ZDS_SOCKET: &str = "ztunnel's socket";

/// Why it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The process is to end.
    Stopped,
    /// Another agent asked for the node.
    HandedOver,
    /// A part of the agent ended by itself.
    Broken,
}

/// Serves the node until told to stop, or to hand it over. When this returns the lock is free and nothing
/// of the node is held any more; links and maps stay pinned.
pub(super) async fn serve<M: Source>(app: &App<M>, lock: Lock) -> anyhow::Result<End> {
    let App { config, readiness, metrics, membership, .. } = app;
    let dataplane = Arc::new(start_dataplane(config).await?);

    let zds_directory = config.zds_socket.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(zds_directory).with_context(|| format!("create {}", zds_directory.display()))?;
    let zds = Server::bind(culvert_zds::Config::new(&config.zds_socket))
        .with_context(|| format!("listen on {}", config.zds_socket.display()))?;
    app.show(Some(zds.ztunnels()));
    let ztunnels = zds.ztunnels().connected();
    let workloads = Arc::new(Workloads::new(Arc::clone(&dataplane), zds.ztunnels(), Arc::clone(metrics)));
    let enrollment = Enrollment::new(
        dataplane,
        Arc::clone(&workloads),
        Records::open(config.run_dir.join("pods"))?,
        HostPaths { proc: config.host_proc.clone(), netns_prefix: config.netns_prefix.clone() },
        Arc::clone(metrics),
    );
    enrollment.resume().await?;
    tracing::info!(pods = enrollment.enrolled(), "pods of an earlier agent taken up");

    let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
    // ZDS ends last: requests under way need it.
    let zds_shutdown = CancellationToken::new();
    let zds_socket = zds.socket().clone();
    let zds_task = tokio::spawn(zds.run(workloads, zds_shutdown.clone()));

    let (listener, cni_socket) = listen(&config.run_dir.join("cni.sock"))?;
    let service = cni_server::Service {
        enrollment: Arc::clone(&enrollment),
        membership: Arc::clone(membership),
        readiness: Arc::clone(readiness),
        metrics: Arc::clone(metrics),
        add_deadline: config.add_deadline(),
        has_ztunnel: Workloads::has_ztunnel,
    };
    let (controls, admin_socket) = listen(&config.run_dir.join("admin.sock"))?;
    let (broken, hand_over) = (CancellationToken::new(), CancellationToken::new());
    let spawn = Spawn { tasks: &tasks, broken: &broken };
    spawn.io("cni server", cni_server::serve(listener, Arc::new(service), shutdown.clone()));
    let dump = Arc::clone(&enrollment);
    let shown = Controls {
        levels: Arc::clone(&app.levels),
        dump: Box::new(move || dump.dump()),
        hand_over: hand_over.clone(),
    };
    spawn.io("controls", admin::serve_controls(controls, Arc::new(shown), shutdown.clone()));
    spawn.until(&shutdown, "reaper", Arc::clone(&enrollment).reap(REAP));
    spawn.until(&shutdown, "sockets", {
        let (readiness, cni_socket) = (Arc::clone(readiness), cni_socket.clone());
        async move { watch_sockets(&readiness, &cni_socket, || zds_socket.is_ours()).await }
    });
    let scope = ScopeFile::new(config.scope_file.clone());
    spawn.until(&shutdown, "membership", Arc::clone(membership).follow(scope, Arc::clone(readiness)));
    let reconciler = Reconciler {
        enrollment: Arc::clone(&enrollment),
        membership: Arc::clone(membership),
        metrics: Arc::clone(metrics),
        host: discover::id_of(&config.dataplane().host_netns),
    };
    spawn.until(&shutdown, "reconciler", reconciler.run(ztunnels));
    readiness.clear(super::OWNERSHIP);
    tracing::info!(http = %config.http, run_dir = %config.run_dir.display(), "ready");

    let end = tokio::select! {
        () = app.stop.cancelled() => End::Stopped,
        () = hand_over.cancelled() => End::HandedOver,
        () = broken.cancelled() => End::Broken,
    };
    readiness.report(super::OWNERSHIP, format!("ended: {end:?}"));
    tracing::info!(?end, "ending; enrolled pods stay captured");
    cni_socket.remove();
    shutdown.cancel();
    tasks.close();
    let finished = timeout(LAST_REQUESTS, async {
        tasks.wait().await;
        enrollment.drain().await;
    });
    if finished.await.is_err() {
        tracing::warn!("requests were still under way; the next agent finishes them by their records");
    }
    app.show(None);
    zds_shutdown.cancel();
    zds_task.await.context("zds")?;
    admin_socket.remove();
    readiness.clear(CNI_SOCKET);
    readiness.clear(ZDS_SOCKET);
    // The next agent watches the pods from here on.
    drop(enrollment);
    drop(lock);
    Ok(end)
}

/// Names what the node lacks before anything is changed.
async fn start_dataplane(config: &Config) -> anyhow::Result<Dataplane> {
    let (skip_probe, config) = (config.skip_probe, config.dataplane());
    tokio::task::spawn_blocking(move || {
        if !skip_probe {
            let report = probe::run(&config);
            anyhow::ensure!(report.is_ready(), "this node lacks what capture needs:\n{report}");
        }
        Ok(Dataplane::start(&config)?)
    })
    .await
    .context("start of the dataplane")?
}

fn listen(path: &Path) -> anyhow::Result<(OwnListener, SocketFile)> {
    OwnListener::listen(path, Uid::effective().as_raw())
        .with_context(|| format!("listen on {}", path.display()))
}

/// Somebody who binds over our sockets gets our requests: kubelet's, or ztunnel's (`lifecycle.md` §8).
async fn watch_sockets(readiness: &Readiness, cni: &SocketFile, zds_is_ours: impl Fn() -> bool) {
    let mut ticks = tokio::time::interval(SOCKETS);
    let mut known = [true; 2];
    loop {
        ticks.tick().await;
        let ours = [(CNI_SOCKET, cni.is_ours()), (ZDS_SOCKET, zds_is_ours())];
        for ((part, is_ours), known) in ours.into_iter().zip(&mut known) {
            if is_ours {
                readiness.clear(part);
            } else {
                readiness.report(part, "another process has bound over it or removed it; restart this agent");
                if *known {
                    tracing::error!(socket = part, "another process has bound over a socket or removed it");
                }
            }
            *known = is_ours;
        }
    }
}

/// Parts that run as long as the agent: one that ends early ends the process.
struct Spawn<'a> {
    tasks: &'a TaskTracker,
    broken: &'a CancellationToken,
}

impl Spawn<'_> {
    fn io(&self, part: &'static str, work: impl Future<Output = io::Result<()>> + Send + 'static) {
        let guard = self.broken.clone().drop_guard();
        self.tasks.spawn(async move {
            let _broken = guard;
            if let Err(error) = work.await {
                tracing::error!(part, %error, "a part of the agent failed");
            }
        });
    }

    fn until(
        &self,
        shutdown: &CancellationToken,
        part: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let (guard, shutdown) = (self.broken.clone().drop_guard(), shutdown.clone());
        self.tasks.spawn(async move {
            let _broken = guard;
            if shutdown.run_until_cancelled(work).await.is_some() {
                tracing::error!(part, "a part of the agent ended");
            }
        });
    }
}
