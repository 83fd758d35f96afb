//! Requests of an operator: their fields, their conditions, and the responses of refused ones.

use std::net::{IpAddr, SocketAddr};

use axum::Json;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tenure_core::Time;
use tenure_core::table::KeySpace;

use super::site::Site;
use crate::engine::{AdminOutcome, Engine};

/// An operator's request to break a hold or to hand it off.
pub(super) struct AdminRequest {
    pub(super) secret: Vec<u8>,
    pub(super) peer: IpAddr,
    pub(super) space: KeySpace,
    pub(super) name: String,
    pub(super) number: u64,
    pub(super) reason: String,
}

impl AdminRequest {
    pub(super) fn parse(
        peer: SocketAddr,
        headers: &HeaderMap,
        body: Option<Json<Value>>,
    ) -> Result<Self, &'static str> {
        let Some(Json(body)) = body else { return Err("send JSON: name, kind, token, reason\n") };
        let text = |name: &str| body[name].as_str().unwrap_or_default();
        let number = text("token").parse().map_err(|_| "the token must be a number\n")?;
        let reason = reason(&body);
        let (name, space) = (text("name").to_owned(), space(text("kind")));
        let secret = bearer(headers).unwrap_or_default();
        let request = Self { secret, peer: peer.ip(), space, name, number, reason };
        if request.name.is_empty() || request.reason.is_empty() {
            return Err("name and reason are required: the reason is written to the logs\n");
        }
        Ok(request)
    }

    pub(super) fn key(&self) -> (KeySpace, &[u8]) {
        (self.space, self.name.as_bytes())
    }
}

/// Reason of an operator's request, for the logs.
pub(super) fn reason(body: &Value) -> String {
    let text = body["reason"].as_str().unwrap_or_default();
    text.trim().chars().filter(|c| !c.is_control()).take(50).collect()
}

pub(super) async fn admin_response(
    site: &Site,
    request: Result<AdminRequest, &'static str>,
    work: impl FnOnce(&mut Engine, &AdminRequest, Time) -> AdminOutcome + Send + 'static,
) -> Response {
    let request = match request {
        Ok(request) => request,
        Err(why) => return (StatusCode::BAD_REQUEST, why).into_response(),
    };
    let outcome = site.query_engine(move |engine, now| work(engine, &request, now)).await;
    let Some(outcome) = outcome else { return engine_timed_out() };
    match outcome {
        AdminOutcome::Done => StatusCode::NO_CONTENT.into_response(),
        refused => admin_refusal(refused).into_response(),
    }
}

/// Status and text of a request that was refused.
pub(super) fn admin_refusal(outcome: AdminOutcome) -> (StatusCode, &'static str) {
    match outcome {
        AdminOutcome::Done => (StatusCode::NO_CONTENT, ""),
        AdminOutcome::WrongSecret => (StatusCode::UNAUTHORIZED, "the auth token is wrong\n"),
        AdminOutcome::NoSecret => (
            StatusCode::FORBIDDEN,
            "this server has no auth token, which all changes from its page need: start it with --auth-token-file\n",
        ),
        AdminOutcome::NotHeld => {
            (StatusCode::CONFLICT, "no hold has this token: check the present holder\n")
        }
        AdminOutcome::HolderUnreachable => (
            StatusCode::CONFLICT,
            "the holder cannot be notified: wait until the hold ends, or break it\n",
        ),
    }
}

pub(super) fn bearer(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    value.strip_prefix(b"Bearer ").map(<[u8]>::to_vec)
}

pub(super) fn engine_timed_out() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the server does not respond\n").into_response()
}

pub(super) fn space(kind: &str) -> KeySpace {
    if kind == "semaphore" { KeySpace::Semaphore } else { KeySpace::Lock }
}
