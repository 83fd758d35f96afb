//! HTTP interface of a server: status page, metrics, health. It runs on a thread of its own and queries the engine.
//!
//! | path | content |
//! |---|---|
//! | `/` | the status page |
//! | `/events` | data of the page, as a stream of server-sent events |
//! | `/api/now`, `/api/key`, `/api/watched`, `/api/job` | the same data, once |
//! | `/api/break`, `/api/step-down` | break a hold, or request a hand-off; both need the auth token |
//! | `/api/job/retry`, `/api/job/cancel` | retry or cancel a job of a watched queue; both need the auth token |
//! | `/metrics` | metrics for Prometheus |
//! | `/livez`, `/readyz` | health: the engine responds; the engine accepts requests |

mod admin;
mod jobs;
mod metrics;
mod now;
mod server_info;
mod site;
mod watched;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tenure_core::table::KeySpace;
use tokio::sync::Semaphore;

use crate::clock;
use crate::engine::Engine;
use crate::server::Handle;
use admin::{AdminRequest, admin_response, bearer, engine_timed_out, space};
use jobs::JobChange;
use site::Site;
use watched::StoreMonitor;

pub use watched::{
    HolderView, InspectFuture, JobError, JobFuture, JobView, NameView, QueueView, StoreView,
    WatchedJobs, WatchedStore,
};

/// Minimum interval between two updates of a page.
const PAGE_INTERVAL: Duration = Duration::from_millis(400);
/// Minimum interval between two readings of a job for a page.
const JOB_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of open pages.
const MAX_VIEWERS: usize = 32;

/// Options of the HTTP interface.
#[derive(Debug)]
pub struct HttpOptions {
    /// Listener to serve on.
    pub listener: TcpListener,
    /// The server to show.
    pub handle: Handle,
    /// True if reading needs the auth token, too.
    pub auth_required: bool,
    /// Host name that requests may name, beside addresses and `localhost`.
    pub host: String,
    /// Stores that are shown beside the server's own keys.
    pub watched: Vec<Box<dyn WatchedStore>>,
}

/// Serves on a thread of its own until the process ends.
///
/// # Errors
///
/// The listener cannot be configured, or the runtime or the thread cannot be started.
pub fn start(options: HttpOptions) -> io::Result<()> {
    options.listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let HttpOptions { listener, handle, auth_required, host, watched } = options;
    let viewers = Semaphore::new(MAX_VIEWERS);
    let monitors = watched::monitors(watched);
    let site =
        Arc::new(Site { handle, auth_required, host, viewers, monitors, since: Instant::now() });
    let serve = async move {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let service = router(site).into_make_service_with_connect_info::<SocketAddr>();
        axum::serve(listener, service).await
    };
    let run = move || {
        if let Err(error) = runtime.block_on(serve) {
            tracing::error!(target: "tenure::server", %error, "http_stopped");
        }
    };
    thread::Builder::new().name("http".to_owned()).spawn(run).map(drop)
}

type SiteState = State<Arc<Site>>;

fn router(site: Arc<Site>) -> Router {
    let protected = Router::new()
        .route("/events", get(events))
        .route("/api/now", get(now_once))
        .route("/api/key", get(key_once))
        .route("/api/watched", get(watched_once))
        .route("/api/job", get(job_once))
        .route("/metrics", get(scrape))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&site), require_auth));
    Router::new()
        .route("/", get(|| async { file("text/html", include_str!("http/page/index.html")) }))
        .route("/page.css", get(|| async { file("text/css", include_str!("http/page/page.css")) }))
        .route("/page.js", get(|| async { script(include_str!("http/page/page.js")) }))
        .route("/jobs.js", get(|| async { script(include_str!("http/page/jobs.js")) }))
        .route("/livez", get(live))
        .route("/readyz", get(ready))
        .route("/api/break", post(break_hold))
        .route("/api/step-down", post(request_handoff))
        .route("/api/job/{change}", post(change_job))
        .merge(protected)
        .layer(middleware::from_fn_with_state(Arc::clone(&site), check_host))
        .with_state(site)
}

fn script(text: &'static str) -> Response {
    file("text/javascript", text)
}

/// Response with a file of the page. Its content security policy allows scripts and styles of this server only.
fn file(kind: &'static str, text: &'static str) -> Response {
    const RULES: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                         base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers: [(HeaderName, HeaderValue); 4] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(RULES)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, text).into_response()
}

/// Rejects requests for an unknown host name, as a defence against DNS rebinding.
///
/// A foreign web page could otherwise point its own name at this server and read the responses. If the token is
/// required the page cannot read anything, and any host name is accepted.
async fn check_host(State(site): SiteState, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let name = host.map(without_port).unwrap_or_default();
    let own = site.auth_required
        || name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.eq_ignore_ascii_case(&site.host);
    if own {
        return next.run(request).await;
    }
    (StatusCode::MISDIRECTED_REQUEST, "unknown host name: use the server's address\n")
        .into_response()
}

fn without_port(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

/// Requires the auth token for reading if [`HttpOptions::auth_required`].
async fn require_auth(
    State(site): SiteState,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    if !site.auth_required {
        return next.run(request).await;
    }
    let given = bearer(request.headers()).unwrap_or_default();
    let known = if given.is_empty() {
        Some(false)
    } else {
        site.query_engine(move |engine, now| engine.verify_secret(&given, peer.ip(), now)).await
    };
    match known {
        Some(true) => next.run(request).await,
        Some(false) => {
            let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
            (StatusCode::UNAUTHORIZED, challenge, "the auth token is required\n").into_response()
        }
        None => engine_timed_out(),
    }
}

async fn live(State(site): SiteState) -> Response {
    match site.query_engine(|_, _| ()).await {
        Some(()) => "ok\n".into_response(),
        None => engine_timed_out(),
    }
}

async fn ready(State(site): SiteState) -> Response {
    match site.query_engine(|engine, now| engine.metrics(now).draining).await {
        Some(false) => "ok\n".into_response(),
        Some(true) => (StatusCode::SERVICE_UNAVAILABLE, "stopping\n").into_response(),
        None => engine_timed_out(),
    }
}

async fn scrape(State(site): SiteState) -> Response {
    const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";
    match site.query_engine(|engine, now| engine.metrics(now)).await {
        Some(metrics) => ([(header::CONTENT_TYPE, KIND)], metrics::text(&metrics)).into_response(),
        None => engine_timed_out(),
    }
}

/// View that a page shows.
#[derive(Clone, Debug)]
enum PageView {
    Now { filter: String },
    Key { space: KeySpace, name: Vec<u8> },
    Watched,
    Job { store: String, id: String },
    Server,
}

type QueryParams = Query<std::collections::HashMap<String, String>>;

impl PageView {
    fn parse(Query(params): &QueryParams) -> Self {
        let text = |name: &str| params.get(name).cloned().unwrap_or_default();
        match text("view").as_str() {
            "key" => Self::Key { space: space(&text("kind")), name: text("name").into_bytes() },
            "watched" => Self::Watched,
            "job" => Self::Job { store: text("store"), id: text("id") },
            "server" => Self::Server,
            _ => Self::Now { filter: text("filter") },
        }
    }

    /// JSON of the view; `None` if the engine does not respond.
    async fn render(&self, site: &Site) -> Option<Value> {
        let mut view = match self {
            Self::Now { filter } => now::rows(site, filter).await?,
            Self::Key { space, name } => now::key(site, *space, name.clone()).await?,
            Self::Watched => {
                let stores: Vec<Value> = site.monitors.iter().map(StoreMonitor::view).collect();
                json!({ "stores": stores, "now": clock::wall_micros() / 1_000 })
            }
            // The page shows the reason, and reads again: the job may appear, and the queue may come back.
            Self::Job { store, id } => match jobs::read(site, store, id).await {
                Ok(job) => job,
                Err((_, why)) => json!({ "error": why.trim_end() }),
            },
            Self::Server => {
                let metrics = site.query_engine(|engine, now| engine.metrics(now)).await?;
                json!({ "figures": server_info::json(&metrics, site.since.elapsed()) })
            }
        };
        // Part of every view: the page shows the link to the watched stores if there are any.
        view["watched"] = site.monitors.len().into();
        Some(view)
    }

    /// Minimum interval between two updates of a page.
    fn interval(&self) -> Duration {
        if matches!(self, Self::Job { .. }) { JOB_INTERVAL } else { PAGE_INTERVAL }
    }

    /// True if `new` shows the same as `last`. A job is the only view that does not change by itself, and may be large.
    fn is_unchanged(&self, last: &Value, new: &Value) -> bool {
        let timeless = |value: &Value| {
            let mut job = value["job"].clone();
            (job["left_ms"], job["running_ms"]) = (Value::Null, Value::Null);
            (job, value["error"].clone())
        };
        matches!(self, Self::Job { .. }) && timeless(last) == timeless(new)
    }
}

async fn now_once(State(site): SiteState, params: QueryParams) -> Response {
    let filter = params.0.get("filter").cloned().unwrap_or_default();
    PageView::Now { filter }
        .render(&site)
        .await
        .map_or_else(engine_timed_out, |value| Json(value).into_response())
}

async fn key_once(State(site): SiteState, params: QueryParams) -> Response {
    let mut params = params;
    params.0.insert("view".to_owned(), "key".to_owned());
    let value = PageView::parse(&params).render(&site).await;
    value.map_or_else(engine_timed_out, |value| Json(value).into_response())
}

async fn watched_once(State(site): SiteState) -> Response {
    PageView::Watched
        .render(&site)
        .await
        .map_or_else(engine_timed_out, |value| Json(value).into_response())
}

async fn job_once(State(site): SiteState, Query(params): QueryParams) -> Response {
    let text = |name: &str| params.get(name).map_or("", String::as_str);
    match jobs::read(&site, text("store"), text("id")).await {
        Ok(job) => Json(job).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

/// A page that follows a view.
struct Follower {
    permit: ViewerPermit,
    view: PageView,
    pause: Duration,
    sent: Value,
}

impl Follower {
    /// Next update, after a pause of nine times the duration of the last one, but at least the view's interval: open
    /// pages must not keep the engine busy. `None` if the engine does not respond.
    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::time::sleep(self.pause).await;
            let began = Instant::now();
            let value = self.view.render(&self.permit.site).await?;
            self.pause = self.view.interval().max(began.elapsed() * 9);
            if !self.view.is_unchanged(&self.sent, &value) {
                let event = Event::default().data(value.to_string());
                self.sent = value;
                return Some(event);
            }
        }
    }
}

/// Streams a view to a page.
async fn events(State(site): SiteState, params: QueryParams) -> Response {
    let view = PageView::parse(&params);
    let Ok(permit) = Arc::clone(&site).admit_viewer() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many pages are open\n").into_response();
    };
    let follower = Follower { permit, view, pause: Duration::ZERO, sent: Value::Null };
    let stream = futures_util::stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await?;
        Some((Ok::<_, Infallible>(event), follower))
    });
    Sse::new(stream).keep_alive(KeepAlive::default()).into_response()
}

/// Permit of an open page, returned when it is dropped.
struct ViewerPermit {
    site: Arc<Site>,
}

impl Site {
    fn admit_viewer(self: Arc<Self>) -> Result<ViewerPermit, ()> {
        match self.viewers.try_acquire() {
            Ok(permit) => permit.forget(),
            Err(_) => return Err(()),
        }
        Ok(ViewerPermit { site: self })
    }
}

impl Drop for ViewerPermit {
    fn drop(&mut self) {
        self.site.viewers.add_permits(1);
    }
}

async fn break_hold(
    State(site): SiteState,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Option<Json<Value>>,
) -> Response {
    let broken = |engine: &mut Engine, request: &AdminRequest, now| {
        let credentials = (&*request.secret, request.peer);
        engine.admin_break(credentials, request.key(), request.number, &request.reason, now)
    };
    admin_response(&site, AdminRequest::parse(peer, &headers, body), broken).await
}

async fn request_handoff(
    State(site): SiteState,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Option<Json<Value>>,
) -> Response {
    let requested = |engine: &mut Engine, request: &AdminRequest, now| {
        let credentials = (&*request.secret, request.peer);
        engine.admin_request_handoff(
            credentials,
            request.key(),
            request.number,
            &request.reason,
            now,
        )
    };
    admin_response(&site, AdminRequest::parse(peer, &headers, body), requested).await
}

/// Changes a job of a watched queue.
async fn change_job(
    State(site): SiteState,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path(change): Path<String>,
    headers: HeaderMap,
    body: Option<Json<Value>>,
) -> Response {
    let change = match change.as_str() {
        "retry" => JobChange::Retry,
        "cancel" => JobChange::Cancel,
        _ => return StatusCode::NOT_FOUND.into_response(),
    };
    let credentials = (bearer(&headers).unwrap_or_default(), peer.ip());
    jobs::change(site, credentials, change, body).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_what_stands_before_its_port() {
        for (host, name) in [
            ("localhost:80", "localhost"),
            ("127.0.0.1", "127.0.0.1"),
            ("[::1]:8388", "::1"),
            ("evil.example:8388", "evil.example"),
            ("", ""),
        ] {
            assert_eq!(without_port(host), name);
        }
    }
}
