//! `--metrics`: metrics and health of a command that holds a lock, leads or works on jobs. Served over HTTP by a
//! separate thread.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | the library's metrics, for Prometheus |
//! | `/livez` | 200 while the runtime that renews the hold makes progress |
//! | `/readyz` | 200 once the store was reached, also while another process holds or leads |
//! | `/leader` | 200 only while this process holds or leads |

use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use clap::Args;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tenure::election::Leadership;

use crate::guardian::protocol;
use crate::mutex::Mutex;
use crate::report;

/// Interval at which the runtime that renews the hold records that it makes progress.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Time without progress after which `/livez` fails.
const LIVENESS_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval at which measured values are moved into their buckets, even if no scrape comes.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(20);
/// Bucket bounds of all durations, in seconds.
const DURATION_BUCKETS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 60.0, 600.0, 3600.0];

/// The option `--metrics`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MetricsArgs {
    /// Serve /metrics, /livez, /readyz and /leader on this address, such as 127.0.0.1:9388
    #[arg(long, value_name = "ADDR")]
    metrics: Option<String>,
}

/// State behind `/livez`, `/readyz` and `/leader`.
#[derive(Default)]
pub(crate) struct HealthState {
    /// Time of the last heartbeat, on the clock that counts suspended time.
    last_heartbeat: AtomicU64,
    ready: AtomicBool,
    held: AtomicBool,
    leadership: Mutex<Option<Leadership>>,
}

impl MetricsArgs {
    /// True if the option was given.
    pub(crate) fn is_enabled(&self) -> bool {
        self.metrics.is_some()
    }

    /// Starts to serve, if the option was given. Must be called on the runtime that renews the hold.
    pub(crate) fn start(&self) -> Result<Arc<HealthState>, String> {
        let health = Arc::<HealthState>::default();
        let Some(address) = &self.metrics else { return Ok(health) };
        let listener = listen(address, "--metrics")?;
        let recorder = PrometheusBuilder::new()
            .set_buckets(&DURATION_BUCKETS)
            .map_err(|error| format!("--metrics: {error}"))?
            .build_recorder();
        let handle = recorder.handle();
        metrics::set_global_recorder(recorder).map_err(|error| format!("--metrics: {error}"))?;
        tenure::metrics::describe();
        health.last_heartbeat.store(protocol::boottime_nanos(), Ordering::Relaxed);
        let heartbeat = Arc::clone(&health);
        tokio::spawn(async move {
            loop {
                heartbeat.last_heartbeat.store(protocol::boottime_nanos(), Ordering::Relaxed);
                tokio::time::sleep(HEARTBEAT_INTERVAL).await;
            }
        });
        serve(listener, Arc::clone(&health), handle)
            .map_err(|error| format!("--metrics: {}", report::os_error_text(&error)))?;
        Ok(health)
    }
}

/// Listens on `HOST:PORT`, or on the loopback address for a port alone.
pub(crate) fn listen(address: &str, flag: &str) -> Result<TcpListener, String> {
    let failed = |error: std::io::Error| {
        format!("{flag}: cannot listen on {address}: {}", report::os_error_text(&error))
    };
    let local = address.parse::<u16>().ok().map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let addresses: Vec<SocketAddr> = match local {
        Some(local) => vec![local],
        None if !address.contains(':') => {
            return Err(format!("{flag}: cannot listen on {address}: give HOST:PORT, or a port"));
        }
        None => address.to_socket_addrs().map_err(failed)?.collect(),
    };
    TcpListener::bind(&*addresses).map_err(failed)
}

fn serve(
    listener: TcpListener,
    health: Arc<HealthState>,
    handle: PrometheusHandle,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    report::print_line(&format!("metrics are on http://{}/metrics", listener.local_addr()?));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let run = move || {
        let served = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let upkeep = handle.clone();
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(UPKEEP_INTERVAL).await;
                    upkeep.run_upkeep();
                }
            });
            axum::serve(listener, router(health, handle)).await
        });
        if let Err(error) = served {
            report::print_line(&format!(
                "--metrics: the HTTP server stopped: {}",
                report::os_error_text(&error)
            ));
        }
    };
    thread::Builder::new().name("metrics".to_owned()).spawn(run).map(drop)
}

fn router(health: Arc<HealthState>, handle: PrometheusHandle) -> Router {
    let answer = |good: bool, yes: &'static str, no: &'static str| -> Response {
        if good {
            yes.into_response()
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, no).into_response()
        }
    };
    let (live, ready, leader) = (Arc::clone(&health), Arc::clone(&health), health);
    let scrape = move || {
        let handle = handle.clone();
        async move {
            tenure::metrics::refresh();
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], handle.render())
        }
    };
    Router::new()
        .route("/metrics", get(scrape))
        .route("/livez", get(move || async move { answer(live.is_live(), "ok\n", "stuck\n") }))
        .route(
            "/readyz",
            get(move || async move {
                answer(ready.ready.load(Ordering::Relaxed), "ok\n", "not yet\n")
            }),
        )
        .route(
            "/leader",
            get(move || async move { answer(leader.is_leading(), "leading\n", "standing by\n") }),
        )
}

impl HealthState {
    /// Records that the store was reached.
    pub(crate) fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// Records whether the lock is held.
    pub(crate) fn set_held(&self, held: bool) {
        self.held.store(held, Ordering::Relaxed);
    }

    /// Records the current leadership of this process.
    pub(crate) fn set_leadership(&self, leadership: Leadership) {
        *self.leadership.lock() = Some(leadership);
    }

    /// True while this process holds or leads.
    fn is_leading(&self) -> bool {
        let leadership = self.leadership.lock();
        // By the deadline of the leadership, not by its events: the runtime that handles them may be stuck.
        self.held.load(Ordering::Relaxed) || leadership.as_ref().is_some_and(Leadership::is_held)
    }

    fn is_live(&self) -> bool {
        let since =
            protocol::boottime_nanos().saturating_sub(self.last_heartbeat.load(Ordering::Relaxed));
        u128::from(since) < LIVENESS_TIMEOUT.as_nanos()
    }
}
