//! Bodies.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use culvert_cni::{
    answer::{Answer, Refusal},
    codes::Code,
};
use serde::de::DeserializeOwned;

/// Reads a request whatever its content type says, as Istio's agent does.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body)
        .map_err(|error| Refusal::new(Code::Undecodable, "the request cannot be read", error.to_string()))
}

pub(super) fn answered(answer: &Answer) -> Response {
    Json(answer).into_response()
}

pub(super) fn refused(refusal: Refusal) -> Response {
    let status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, Json(refusal)).into_response()
}
