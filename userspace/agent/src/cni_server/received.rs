//! The body of a request, bounded in size and time.

use std::time::Duration;

use axum::{
    body::{Body, Bytes, HttpBody as _, to_bytes},
    extract::{FromRequest, Request},
    response::Response,
};
use culvert_cni::{answer::Refusal, codes::Code};
use tokio::time::timeout;

use super::answers::refused;

/// Longest body. The plugin's own limit for its configuration is the same.
const LIMIT: usize = 1 << 20;
/// A plugin writes its request in one go.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) struct Received(pub(super) Bytes);

impl<S: Sync> FromRequest<S> for Received {
    type Rejection = Response;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Response> {
        read(request.into_body())
            .await
            .map(Self)
            .map_err(|why| refused(Refusal::new(Code::Undecodable, "the request cannot be received", why)))
    }
}

async fn read(body: Body) -> Result<Bytes, String> {
    let announced = body.size_hint().lower();
    if usize::try_from(announced).is_ok_and(|announced| announced <= LIMIT) {
        match timeout(PATIENCE, to_bytes(body, LIMIT)).await {
            Ok(received) => received.map_err(|error| error.to_string()),
            Err(tokio::time::error::Elapsed { .. }) => Err(format!("not complete within {PATIENCE:?}")),
        }
    } else {
        Err(format!("{announced} bytes are longer than {LIMIT}"))
    }
}
