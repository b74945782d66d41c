//! An agent that answers as it is told, and remembers what it was asked.

use std::{
    convert::Infallible,
    fs, future,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    thread::{self, JoinHandle},
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{net::UnixListener, runtime, sync::oneshot};

/// What the agent does with a request.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    /// Status and body.
    Answer(u16, &'static str),
    /// Reads it and says nothing.
    Silence,
}

type Requests = Arc<Mutex<Vec<(String, Value)>>>;

pub(crate) struct Agent {
    requests: Requests,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    /// Listens at the socket. Replies to `/log` with 200, to all else with `reply`.
    pub(crate) fn listen(socket: &Path, reply: Reply) -> Self {
        let requests = Requests::default();
        let (stop, stopped) = oneshot::channel();
        let runtime = runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
        // A dead socket may be there.
        drop(fs::remove_file(socket));
        let listener = {
            let _inside = runtime.enter();
            UnixListener::bind(socket).unwrap()
        };
        let served = Arc::clone(&requests);
        let thread = thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, reply, served) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { requests, stop: Some(stop), thread: Some(thread) }
    }

    fn requests(&self) -> MutexGuard<'_, Vec<(String, Value)>> {
        self.requests.lock().unwrap()
    }

    /// Which endpoints were asked, in order, without the log.
    pub(crate) fn endpoints(&self) -> Vec<String> {
        self.requests().iter().map(|(path, _)| path.clone()).filter(|path| path != "/log").collect()
    }

    /// Body of the only request to the endpoint.
    pub(crate) fn request(&self, endpoint: &str) -> Value {
        let requests = self.requests();
        let mut bodies = requests.iter().filter(|(path, _)| path == endpoint).map(|(_, body)| body.clone());
        let body = bodies.next().unwrap_or_else(|| panic!("{endpoint} was not asked"));
        assert_eq!(bodies.next(), None, "{endpoint} was asked twice");
        body
    }

    /// The log lines it was sent, joined.
    pub(crate) fn log(&self) -> String {
        let requests = self.requests();
        let batches = requests.iter().filter(|(path, _)| path == "/log").map(|(_, body)| body.to_string());
        batches.collect()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

async fn serve(listener: UnixListener, reply: Reply, requests: Requests) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (reply, requests) = (reply.clone(), Arc::clone(&requests));
        let service = service_fn(move |request| answer(request, reply.clone(), Arc::clone(&requests)));
        tokio::spawn(async move {
            drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    reply: Reply,
    requests: Requests,
) -> Result<Response<Full<Bytes>>, Infallible> {
    assert_eq!((request.method().as_str(), &request.headers()["host"]), ("POST", &"unix".parse().unwrap()));
    assert_eq!(request.headers()["content-type"], "application/json");
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    requests.lock().unwrap().push((path.clone(), serde_json::from_slice(&body).unwrap()));
    let (status, body) = match reply {
        _ if path == "/log" => (200, ""),
        Reply::Answer(status, body) => (status, body),
        Reply::Silence => future::pending().await,
    };
    Ok(Response::builder().status(status).body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap())
}
