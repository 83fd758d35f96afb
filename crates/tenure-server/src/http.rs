//! What a server shows over HTTP: the page, its metrics, its health. A thread of its own, which asks the engine.
//!
//! | path | what |
//! |---|---|
//! | `/` | the page |
//! | `/events` | what the page shows, told as it changes |
//! | `/api/now`, `/api/key`, `/api/watched` | the same, once |
//! | `/api/break`, `/api/step-down` | breaks a hold, or asks its holder to give it up, for who knows the auth token |
//! | `/metrics` | for Prometheus |
//! | `/livez`, `/readyz` | whether the engine answers; whether it takes requests |

mod metrics;
mod now;
mod server_info;
mod watched;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tenure_core::Time;
use tenure_core::table::KeySpace;
use tokio::sync::{Semaphore, oneshot};

use crate::engine::{AdminOutcome, Engine};
use crate::server::Handle;
use watched::StoreMonitor;

pub use watched::{HolderView, InspectFuture, JobView, NameView, StoreView, WatchedStore};

/// How long the engine may take to answer.
const ENGINE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the page is told what there is now.
const PAGE_INTERVAL: Duration = Duration::from_millis(400);
/// How many pages may be open at once.
const MAX_VIEWERS: usize = 32;

/// How to serve.
#[derive(Debug)]
pub struct HttpOptions {
    /// Where.
    pub listener: TcpListener,
    /// The server to show.
    pub handle: Handle,
    /// Whether reading needs the auth token, too.
    pub auth_required: bool,
    /// The name that it is reached by, beside addresses and `localhost`.
    pub host: String,
    /// Stores that are shown beside the server's own keys.
    pub watched: Vec<Box<dyn WatchedStore>>,
}

/// Serves from a thread of its own, until the process ends.
///
/// # Errors
///
/// What the system says.
pub fn start(options: HttpOptions) -> io::Result<()> {
    options.listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let HttpOptions { listener, handle, auth_required, host, watched } = options;
    let viewers = Semaphore::new(MAX_VIEWERS);
    let monitors = watched.into_iter().map(|store| Arc::new(StoreMonitor::new(store))).collect();
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

struct Site {
    handle: Handle,
    auth_required: bool,
    host: String,
    viewers: Semaphore,
    monitors: Vec<Arc<StoreMonitor>>,
    since: Instant,
}

type SiteState = State<Arc<Site>>;

fn router(site: Arc<Site>) -> Router {
    let shown = Router::new()
        .route("/events", get(events))
        .route("/api/now", get(now_once))
        .route("/api/key", get(key_once))
        .route("/api/watched", get(watched_once))
        .route("/metrics", get(scrape))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&site), require_auth));
    Router::new()
        .route("/", get(|| async { file("text/html", include_str!("http/page/index.html")) }))
        .route("/page.css", get(|| async { file("text/css", include_str!("http/page/page.css")) }))
        .route(
            "/page.js",
            get(|| async { file("text/javascript", include_str!("http/page/page.js")) }),
        )
        .route("/livez", get(live))
        .route("/readyz", get(ready))
        .route("/api/break", post(break_hold))
        .route("/api/step-down", post(request_handoff))
        .merge(shown)
        .layer(middleware::from_fn_with_state(Arc::clone(&site), check_host))
        .with_state(site)
}

impl Site {
    /// Asks the engine; `None` where it does not answer in time.
    async fn query_engine<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Engine, Time) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        // Nobody to tell where the client went away.
        self.handle.run_on_engine(move |engine, now| drop(reply.send(question(engine, now))));
        tokio::time::timeout(ENGINE_TIMEOUT, answer).await.ok()?.ok()
    }
}

/// A file of the page. Nothing but what comes from here is run or shown.
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

/// A page of elsewhere must not be able to read this one by having its own name lead here. Where the token is asked for it
/// could not, and the server may have any name.
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
    (StatusCode::MISDIRECTED_REQUEST, "this server is not known by that name\n").into_response()
}

fn without_port(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

fn bearer(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    value.strip_prefix(b"Bearer ").map(<[u8]>::to_vec)
}

/// Where strangers can reach it, only those who know the token may look.
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
            (StatusCode::UNAUTHORIZED, challenge, "the auth token is needed\n").into_response()
        }
        None => engine_timed_out(),
    }
}

fn engine_timed_out() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the server does not answer\n").into_response()
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
        Some(figures) => ([(header::CONTENT_TYPE, KIND)], metrics::text(&figures)).into_response(),
        None => engine_timed_out(),
    }
}

/// What a page asks for.
#[derive(Clone, Debug)]
enum PageView {
    Now { filter: String },
    Key { space: KeySpace, name: Vec<u8> },
    Watched,
    Server,
}

type QueryParams = Query<std::collections::HashMap<String, String>>;

impl PageView {
    fn parse(Query(params): &QueryParams) -> Self {
        let text = |name: &str| params.get(name).cloned().unwrap_or_default();
        match text("view").as_str() {
            "key" => Self::Key { space: space(&text("kind")), name: text("name").into_bytes() },
            "watched" => Self::Watched,
            "server" => Self::Server,
            _ => Self::Now { filter: text("filter") },
        }
    }

    /// What there is to see; `None` where the engine does not answer.
    async fn render(&self, site: &Site) -> Option<Value> {
        let mut seen = match self {
            Self::Now { filter } => now::rows(site, filter).await?,
            Self::Key { space, name } => now::key(site, *space, name.clone()).await?,
            Self::Watched => {
                let stores: Vec<Value> = site.monitors.iter().map(StoreMonitor::view).collect();
                json!({ "stores": stores })
            }
            Self::Server => {
                let figures = site.query_engine(|engine, now| engine.metrics(now)).await?;
                json!({ "figures": server_info::json(&figures, site.since.elapsed()) })
            }
        };
        // Every view says so, for the page to offer the view of them.
        seen["watched"] = site.monitors.len().into();
        Some(seen)
    }
}

fn space(kind: &str) -> KeySpace {
    if kind == "semaphore" { KeySpace::Semaphore } else { KeySpace::Lock }
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

/// Tells a page what there is, again and again. A look that took long is followed by a longer pause.
async fn events(State(site): SiteState, params: QueryParams) -> Response {
    let view = PageView::parse(&params);
    let Ok(permit) = Arc::clone(&site).admit_viewer() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many pages are open\n").into_response();
    };
    let stream = futures_util::stream::unfold((permit, view, Duration::ZERO), |state| async move {
        let (permit, view, pause) = state;
        tokio::time::sleep(pause).await;
        let began = Instant::now();
        let value = view.render(&permit.site).await?;
        let pause = PAGE_INTERVAL.max(began.elapsed() * 9);
        let event = Event::default().data(value.to_string());
        Some((Ok::<_, Infallible>(event), (permit, view, pause)))
    });
    Sse::new(stream).keep_alive(KeepAlive::default()).into_response()
}

/// A page that is open.
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

/// What a page wants to do to a hold, and who wants it.
struct AdminRequest {
    secret: Vec<u8>,
    peer: IpAddr,
    space: KeySpace,
    name: String,
    number: u64,
    reason: String,
}

impl AdminRequest {
    fn parse(
        peer: SocketAddr,
        headers: &HeaderMap,
        body: Option<Json<Value>>,
    ) -> Result<Self, &'static str> {
        let Some(Json(body)) = body else { return Err("send JSON: name, kind, token, reason\n") };
        let text = |name: &str| body[name].as_str().unwrap_or_default();
        let number = text("token").parse().map_err(|_| "the token is a number\n")?;
        let reason = text("reason").trim().chars().filter(|c| !c.is_control()).take(50).collect();
        let (name, space) = (text("name").to_owned(), space(text("kind")));
        let secret = bearer(headers).unwrap_or_default();
        let request = Self { secret, peer: peer.ip(), space, name, number, reason };
        if request.name.is_empty() || request.reason.is_empty() {
            return Err("say which name, and why: it is written to the logs\n");
        }
        Ok(request)
    }

    fn key(&self) -> (KeySpace, &[u8]) {
        (self.space, self.name.as_bytes())
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
    let asked = |engine: &mut Engine, request: &AdminRequest, now| {
        let credentials = (&*request.secret, request.peer);
        engine.admin_request_handoff(
            credentials,
            request.key(),
            request.number,
            &request.reason,
            now,
        )
    };
    admin_response(&site, AdminRequest::parse(peer, &headers, body), asked).await
}

async fn admin_response(
    site: &Site,
    request: Result<AdminRequest, &'static str>,
    work: impl FnOnce(&mut Engine, &AdminRequest, Time) -> AdminOutcome + Send + 'static,
) -> Response {
    let request = match request {
        Ok(deed) => deed,
        Err(why) => return (StatusCode::BAD_REQUEST, why).into_response(),
    };
    let Some(done) = site.query_engine(move |engine, now| work(engine, &request, now)).await else {
        return engine_timed_out();
    };
    let (status, why) = match done {
        AdminOutcome::Done => return StatusCode::NO_CONTENT.into_response(),
        AdminOutcome::WrongSecret => (StatusCode::UNAUTHORIZED, "the auth token is wrong\n"),
        AdminOutcome::NoSecret => (
            StatusCode::FORBIDDEN,
            "this server has no auth token, so that nothing can be done by hand: start it with --auth-token-file\n",
        ),
        AdminOutcome::NotHeld => {
            (StatusCode::CONFLICT, "no hold has this token any more: look at who holds it now\n")
        }
        AdminOutcome::HolderUnreachable => (
            StatusCode::CONFLICT,
            "its holder cannot be told anything: wait for it, or break the hold\n",
        ),
    };
    (status, why).into_response()
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
