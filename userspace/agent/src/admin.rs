//! What operators and kubelet ask: health and metrics by TCP, the rest on a socket of root's.
//!
//! | where | what | answer |
//! |---|---|---|
//! | TCP | `GET /healthz` | 200 while the process runs |
//! | TCP | `GET /readyz` | 200, or 503 with one reason a line |
//! | TCP | `GET /metrics` | Prometheus text |
//! | `admin.sock` | `GET /log-level` | the directives in force |
//! | `admin.sock` | `PUT /log-level` | takes directives as the body, 400 if they are none |
//! | `admin.sock` | `GET /dump` | the pods as JSON |
//! | `admin.sock` | `POST /hand-over` | 202: the lock will be free when requests under way have ended |

use std::{io, sync::Arc};

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    error_chain::Chain, metrics::Metrics, readiness::Readiness, record::Record, telemetry::Levels,
    unix_socket::OwnListener,
};

/// Of `prometheus_client`'s text format.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the pages show.
pub struct Pages {
    /// Reasons.
    pub readiness: Arc<Readiness>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Looked at for each page.
    pub ztunnels: Box<dyn Fn() -> usize + Send + Sync>,
}

/// Serves kubelet and Prometheus until `shutdown`.
pub async fn serve_pages(
    listener: TcpListener,
    pages: Arc<Pages>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(pages);
    axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned()).await
}

async fn readyz(State(pages): State<Arc<Pages>>) -> Response {
    match pages.readiness.reasons() {
        reasons if reasons.is_empty() => "ready\n".into_response(),
        reasons => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response(),
    }
}

async fn metrics(State(pages): State<Arc<Pages>>) -> Response {
    match pages.metrics.page(pages.readiness.reasons().is_empty(), (pages.ztunnels)()) {
        Ok(page) => ([(CONTENT_TYPE, OPENMETRICS)], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// What root may see and do.
pub struct Controls {
    /// Log levels.
    pub levels: Arc<Levels>,
    /// Pods as they are recorded.
    pub dump: Box<dyn Fn() -> Vec<Record> + Send + Sync>,
    /// Cancelled when another agent asks for the node.
    pub hand_over: CancellationToken,
}

/// Serves root until `shutdown`.
pub async fn serve_controls(
    listener: OwnListener,
    controls: Arc<Controls>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let router = Router::new()
        .route("/log-level", get(log_level).put(set_log_level))
        .route("/dump", get(dump))
        .route("/hand-over", post(hand_over))
        .with_state(controls);
    axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned()).await
}

async fn log_level(State(controls): State<Arc<Controls>>) -> String {
    controls.levels.get() + "\n"
}

async fn set_log_level(State(controls): State<Arc<Controls>>, directives: String) -> Response {
    match controls.levels.set(directives.trim()) {
        Ok(()) => StatusCode::OK.into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{}\n", Chain(&error))).into_response(),
    }
}

async fn dump(State(controls): State<Arc<Controls>>) -> Json<Vec<Record>> {
    Json((controls.dump)())
}

async fn hand_over(State(controls): State<Arc<Controls>>) -> StatusCode {
    tracing::info!("another agent asks for the node");
    controls.hand_over.cancel();
    StatusCode::ACCEPTED
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        net::{SocketAddr, TcpStream},
    };

    use super::*;

    fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        io::read_to_string(stream).unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn readiness_has_reasons_and_health_has_none() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let readiness = Arc::new(Readiness::default());
        let pages =
            Pages { readiness: Arc::clone(&readiness), metrics: Arc::default(), ztunnels: Box::new(|| 1) };
        tokio::spawn(serve_pages(listener, Arc::new(pages), CancellationToken::new()));
        let get = |path| tokio::task::block_in_place(|| get(address, path));
        assert!(get("/readyz").starts_with("HTTP/1.1 200"));
        readiness.report("scope file", "disk full");
        let answer = get("/readyz");
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("scope file: disk full"), "{answer}");
        assert!(get("/healthz").starts_with("HTTP/1.1 200"));
        let page = get("/metrics");
        assert!(page.contains("culvert_ready 0") && page.contains("culvert_ztunnels_connected 1"), "{page}");
        assert!(get("/dump").starts_with("HTTP/1.1 404"), "the dump is for root only");
    }
}
