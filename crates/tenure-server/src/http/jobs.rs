//! Single jobs of watched queues: an operator reads, retries and cancels them.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::admin::{admin_refusal, engine_timed_out, reason};
use super::site::Site;
use super::watched::{
    INSPECT_TIMEOUT, JobError, JobFuture, JobView, StoreMonitor, WatchedJobs, job_json,
};
use crate::clock;

/// Status and text of a request that was refused or has failed.
type Refusal = (StatusCode, String);

/// JSON of a job.
pub(super) async fn read(site: &Site, store: &str, id: &str) -> Result<Value, Refusal> {
    let monitor = monitor(site, store)?;
    let job = show(queue(&monitor)?, id).await?;
    let now = clock::wall_micros() / 1_000;
    Ok(json!({ "store": store, "job": job_json(&job), "now": now }))
}

/// A change of a job by an operator.
#[derive(Clone, Copy, Debug)]
pub(super) enum JobChange {
    Retry,
    Cancel,
}

/// A request to change a job.
struct ChangeRequest {
    store: String,
    id: String,
    /// Token that the operator has read with the job.
    token: String,
    reason: String,
}

impl ChangeRequest {
    fn parse(body: Option<Json<Value>>) -> Result<Self, &'static str> {
        let Some(Json(body)) = body else { return Err("send JSON: store, id, token, reason\n") };
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        let request = Self {
            store: text("store"),
            id: text("id"),
            token: text("token"),
            reason: reason(&body),
        };
        if request.token.parse::<i64>().is_err() {
            return Err("the token must be a number\n");
        }
        if request.store.is_empty() || request.id.is_empty() || request.reason.is_empty() {
            return Err("store, id and reason are required: the reason is written to the logs\n");
        }
        Ok(request)
    }
}

/// Changes a job for an operator with the server's secret, under the same conditions as a break: the secret, a reason,
/// and the token of the claim that is meant.
pub(super) async fn change(
    site: Arc<Site>,
    (secret, peer): (Vec<u8>, IpAddr),
    change: JobChange,
    body: Option<Json<Value>>,
) -> Response {
    let request = match ChangeRequest::parse(body) {
        Ok(request) => request,
        Err(why) => return (StatusCode::BAD_REQUEST, why).into_response(),
    };
    let refusal =
        site.query_engine(move |engine, now| engine.operator_refusal((&secret, peer), now)).await;
    match refusal {
        None => return engine_timed_out(),
        Some(Some(outcome)) => return admin_refusal(outcome).into_response(),
        Some(None) => {}
    }
    // A task of its own: if the operator's connection ends, the handler is dropped, and the change might be made without
    // its line in the log.
    let work = async move { change_and_log(&site, &request, change, peer).await };
    match tokio::spawn(work).await {
        Ok(Ok(())) => StatusCode::NO_CONTENT.into_response(),
        Ok(Err(refusal)) => refusal.into_response(),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "the request failed\n").into_response(),
    }
}

async fn change_and_log(
    site: &Site,
    request: &ChangeRequest,
    change: JobChange,
    peer: IpAddr,
) -> Result<(), Refusal> {
    let ChangeRequest { store, id, token, reason } = request;
    let monitor = monitor(site, store)?;
    let jobs = queue(&monitor)?;
    let job = show(jobs, id).await?;
    if job.token.to_string() != *token {
        let why = format!("job {id} was claimed or cancelled since it was read: read it again\n");
        return Err((StatusCode::CONFLICT, why));
    }
    let (event, made) = match change {
        JobChange::Retry => ("job_retried", jobs.retry(id)),
        JobChange::Cancel => ("job_cancelled", jobs.cancel(id, reason)),
    };
    let made = in_time(made).await;
    monitor.invalidate();
    let (job, attempt) = (&**id, job.attempt);
    match &made {
        Ok(()) => {
            tracing::warn!(target: "tenure::server", store, job, attempt, reason, %peer, "{event}");
        }
        Err((StatusCode::CONFLICT, _)) => {}
        // The change may have been made.
        Err((_, error)) => {
            let error = error.trim_end();
            tracing::warn!(
                target: "tenure::server", store, job, attempt, reason, %peer, error, "{event}_or_not"
            );
        }
    }
    made
}

fn monitor(site: &Site, store: &str) -> Result<Arc<StoreMonitor>, Refusal> {
    let found = site.monitors.iter().find(|monitor| monitor.name() == store);
    found.cloned().ok_or_else(|| (StatusCode::NOT_FOUND, format!("no store is named {store}\n")))
}

fn queue(monitor: &StoreMonitor) -> Result<&dyn WatchedJobs, Refusal> {
    monitor
        .jobs()
        .ok_or_else(|| (StatusCode::NOT_FOUND, format!("{} is no queue of jobs\n", monitor.name())))
}

async fn show(jobs: &dyn WatchedJobs, id: &str) -> Result<JobView, Refusal> {
    // Reading has no wrong state: only an id that cannot be one is refused.
    let found = in_time(jobs.show(id)).await.map_err(|(status, why)| match status {
        StatusCode::CONFLICT => (StatusCode::BAD_REQUEST, why),
        _ => (status, why),
    })?;
    found.ok_or_else(|| (StatusCode::NOT_FOUND, format!("there is no job {id}\n")))
}

async fn in_time<T>(request: JobFuture<'_, T>) -> Result<T, Refusal> {
    match tokio::time::timeout(INSPECT_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(JobError::Refused(why))) => Err((StatusCode::CONFLICT, why + "\n")),
        Ok(Err(JobError::Failed(why))) => Err((StatusCode::BAD_GATEWAY, why + "\n")),
        Err(_) => {
            let why = format!("the queue did not respond within {} s\n", INSPECT_TIMEOUT.as_secs());
            Err((StatusCode::GATEWAY_TIMEOUT, why))
        }
    }
}
