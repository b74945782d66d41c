//! An API server that does what a test says: lists, watches and patches over plain JSON.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    sync::{Arc, Mutex, MutexGuard},
};

use bytes::Bytes;
use futures::channel::mpsc::{UnboundedSender, unbounded};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Frame;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch;
use tower::Service;

type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

/// What the server has and was asked.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) pods: BTreeMap<String, Value>,
    pub(crate) namespaces: BTreeMap<String, Value>,
    /// Lines of `VERB resource status`.
    pub(crate) requests: Vec<String>,
    /// Query strings of lists and watches.
    pub(crate) queries: Vec<String>,
    pub(crate) patches: Vec<Value>,
    pub(crate) events: Vec<Value>,
    /// Answers that come first, by verb and resource.
    failures: BTreeMap<&'static str, Vec<StatusCode>>,
    watches: BTreeMap<&'static str, UnboundedSender<Result<Frame<Bytes>, io::Error>>>,
    version: u64,
}

/// See the module. Clones are the same server.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    state: Arc<Mutex<State>>,
    asked: watch::Sender<u64>,
}

impl Api {
    pub(crate) fn new() -> Self {
        Self { state: Arc::default(), asked: watch::Sender::new(0) }
    }

    pub(crate) fn service(
        &self,
    ) -> impl Service<Request<Body>, Response = Answer, Error = Infallible, Future: Send + 'static> + Send + 'static
    {
        let api = self.clone();
        tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move { Ok(api.answer(request).await) }
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Creates or replaces an object, and tells the watch.
    pub(crate) fn apply(&self, object: Value) {
        let mut state = self.state();
        let version = state.next_version();
        let (resource, key) = (resource_of(&object), key_of(&object));
        let object = with_version(object, version);
        let known = state.objects(resource).insert(key, object.clone()).is_some();
        state.tell(resource, if known { "MODIFIED" } else { "ADDED" }, &object);
    }

    /// Deletes an object, and tells the watch.
    pub(crate) fn delete(&self, resource: &'static str, key: &str) {
        let mut state = self.state();
        let version = state.next_version();
        let object = state.objects(resource).remove(key).unwrap();
        state.tell(resource, "DELETED", &with_version(object, version));
    }

    /// Changes the server's state behind the back of every watch.
    pub(crate) fn behind_the_watch(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
    }

    /// The watch ends as one whose events are gone.
    pub(crate) fn expire(&self, resource: &'static str) {
        let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "too old", "reason": "Expired", "code": 410 });
        let mut state = self.state();
        state.tell(resource, "ERROR", &status);
        state.watches.remove(resource);
    }

    /// The connection of the watch breaks.
    pub(crate) fn cut(&self, resource: &'static str) {
        let mut state = self.state();
        if let Some(watch) = state.watches.remove(resource) {
            drop(watch.unbounded_send(Err(io::ErrorKind::ConnectionReset.into())));
        }
    }

    /// The next requests of that kind (`list pods`) are answered with these.
    pub(crate) fn fail(&self, kind: &'static str, codes: &[u16]) {
        let codes = codes.iter().rev().map(|code| StatusCode::from_u16(*code).unwrap()).collect();
        self.state().failures.insert(kind, codes);
    }

    /// Waits until the state is as told.
    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&State) -> bool) {
        let mut asked = self.asked.subscribe();
        let wait = async {
            while !holds(&self.state()) {
                drop(tokio::time::timeout(std::time::Duration::from_millis(20), asked.changed()).await);
            }
        };
        let waited = tokio::time::timeout(std::time::Duration::from_secs(60), wait).await;
        assert!(waited.is_ok(), "{what}: {:?}", self.state().requests);
    }

    async fn answer(&self, request: Request<Body>) -> Answer {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let query = parts.uri.query().unwrap_or_default().to_owned();
        let answer = self.respond(&parts.method, parts.uri.path(), &query, &body);
        self.asked.send_modify(|count| *count += 1);
        answer
    }

    fn respond(&self, method: &Method, path: &str, query: &str, body: &[u8]) -> Answer {
        let mut state = self.state();
        let resource = match path.rsplit('/').next() {
            Some("pods" | "status") => "pods",
            Some("namespaces") => "namespaces",
            _ => "events",
        };
        let kind = match (method, resource) {
            (&Method::GET, "pods") if query.contains("watch=true") => "watch pods",
            (&Method::GET, "pods") => "list pods",
            (&Method::GET, _) if query.contains("watch=true") => "watch namespaces",
            (&Method::GET, _) => "list namespaces",
            (&Method::PATCH, "pods") => "patch pods",
            (&Method::PATCH, _) => "patch events",
            _ => "create events",
        };
        let failure = state.failures.get_mut(kind).and_then(Vec::pop);
        let code = failure.unwrap_or(StatusCode::OK);
        state.requests.push(format!("{kind} {}", code.as_u16()));
        if failure.is_some() {
            let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "as the test says", "code": code.as_u16() });
            return json_answer(code, &status);
        }
        match kind {
            "watch pods" | "watch namespaces" => {
                state.queries.push(query.to_owned());
                let (send, events) = unbounded();
                state.watches.insert(resource, send);
                Response::new(StreamBody::new(events).boxed_unsync())
            }
            "list pods" | "list namespaces" => {
                state.queries.push(query.to_owned());
                let version = state.version;
                let items: Vec<_> = state.objects(resource).values().cloned().collect();
                let list = json!({ "kind": "List", "apiVersion": "v1", "metadata": { "resourceVersion": version.to_string() }, "items": items });
                json_answer(code, &list)
            }
            "patch pods" => {
                let patch: Value = serde_json::from_slice(body).unwrap();
                state.patches.push(patch.clone());
                let mut parts = path.rsplit('/').skip(1);
                let name = parts.next().unwrap();
                let namespace = parts.nth(1).unwrap();
                let key = format!("{namespace}/{name}");
                drop(state);
                self.patch(&key, &patch)
            }
            _ => {
                let event: Value = serde_json::from_slice(body).unwrap();
                state.events.push(event.clone());
                json_answer(code, &event)
            }
        }
    }

    fn patch(&self, key: &str, patch: &Value) -> Answer {
        let known = self.state().pods.get(key).cloned();
        let Some(mut pod) = known.filter(|pod| pod["metadata"]["uid"] == patch["metadata"]["uid"]) else {
            let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no such pod", "code": 404 });
            return json_answer(StatusCode::NOT_FOUND, &status);
        };
        for (name, value) in patch["metadata"]["annotations"].as_object().unwrap() {
            let annotations = pod["metadata"]["annotations"].as_object_mut().unwrap();
            match value {
                Value::Null => drop(annotations.remove(name)),
                value => drop(annotations.insert(name.clone(), value.clone())),
            }
        }
        self.apply(pod.clone());
        json_answer(StatusCode::OK, &pod)
    }
}

impl State {
    fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn objects(&mut self, resource: &str) -> &mut BTreeMap<String, Value> {
        if resource == "pods" { &mut self.pods } else { &mut self.namespaces }
    }

    fn tell(&mut self, resource: &'static str, kind: &str, object: &Value) {
        if let Some(watch) = self.watches.get(resource) {
            let line = format!("{}\n", json!({ "type": kind, "object": object }));
            drop(watch.unbounded_send(Ok(Frame::data(line.into()))));
        }
    }

    /// What a pod's annotation says.
    pub(crate) fn redirection(&self, key: &str) -> Option<&str> {
        self.pods.get(key)?["metadata"]["annotations"][super::super::pod::REDIRECTION].as_str()
    }
}

fn json_answer(code: StatusCode, value: &Value) -> Answer {
    let body = Full::from(value.to_string()).map_err(|never: Infallible| match never {}).boxed_unsync();
    let mut answer = Response::new(body);
    *answer.status_mut() = code;
    answer
}

fn with_version(mut object: Value, version: u64) -> Value {
    object["metadata"]["resourceVersion"] = version.to_string().into();
    object
}

fn resource_of(object: &Value) -> &'static str {
    if object["kind"] == "Pod" { "pods" } else { "namespaces" }
}

fn key_of(object: &Value) -> String {
    let (namespace, name) = (&object["metadata"]["namespace"], object["metadata"]["name"].as_str().unwrap());
    namespace.as_str().map_or_else(|| name.to_owned(), |namespace| format!("{namespace}/{name}"))
}

/// A namespace with these labels, as the metadata API has it.
pub(crate) fn namespace(name: &str, labels: Value) -> Value {
    json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": { "name": name, "labels": labels } })
}

/// A running pod at 10.0.0.7.
pub(crate) fn pod(namespace: &str, name: &str, uid: &str) -> Value {
    json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": { "namespace": namespace, "name": name, "uid": uid, "labels": {}, "annotations": {}, "managedFields": [{ "manager": "kubelet" }] },
        "spec": { "nodeName": "node-1", "serviceAccountName": "web", "containers": [{ "name": "app", "image": "app:1" }] },
        "status": { "phase": "Running", "podIP": "10.0.0.7", "podIPs": [{ "ip": "10.0.0.7" }, { "ip": "fd00::7" }], "conditions": [] },
    })
}
