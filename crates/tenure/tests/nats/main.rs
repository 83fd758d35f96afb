//! NATS passes the whole suite: on one server of each version, on a cluster, and in nlock's form what that can promise.
#![cfg(all(unix, feature = "nats"))]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tenure::Store;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Liveness, QueueKind};

mod cluster;
mod examine;
mod faults;
mod input;
mod mixed;
#[path = "../network/mod.rs"]
mod network;
mod proxy;
mod raw;
mod reconnect;
#[path = "../services/mod.rs"]
mod services;
mod settings;
mod support;
mod trust;
mod turns;

use support::{Server, connect, unique, worker};

/// What every bucket of our own form can do.
const OURS: Capabilities = {
    let mut can = Capabilities::new(Liveness::Lease);
    can.push = true;
    can.shared = true;
    can.semaphore = true;
    can.detached = true;
    can.list = true;
    can.identities = true;
    can.evict = true;
    can.ordered_tokens = true;
    can.min_ttl = Duration::from_millis(200);
    can
};

/// The ttl of the bucket in nlock's form: what the suite asks for.
const BUCKET_TTL: Duration = Duration::from_millis(600);

struct OnNats {
    url: String,
    /// Where it is ours to restart.
    server: Option<Mutex<Server>>,
}

impl OnNats {
    fn new(server: &str, bucket: &str) -> Self {
        Self { url: format!("{server}/{}{bucket}", unique("suite")), server: None }
    }

    async fn check(&self, expected: Capabilities) {
        assert_eq!(connect(&self.url).await.store().capabilities(), expected);
    }
}

#[async_trait]
impl Harness for OnNats {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::clone(connect(&self.url).await.store())
    }

    async fn restart(&self) -> Option<Arc<dyn Store>> {
        {
            let mut server = self.server.as_ref()?.lock().expect("no test panics with it");
            server.kill();
            server.resume_after_kill();
        }
        Some(self.open().await)
    }

    fn worker(&self) -> Option<std::process::Command> {
        Some(worker(&self.url))
    }

    fn longest_ttl(&self) -> Duration {
        if self.url.contains("form=nlock") { BUCKET_TTL } else { Duration::MAX }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_server_passes_the_suite() {
    let Some(program) = services::nats_server() else { return };
    let server = Server::start(&program);
    let mut harness = OnNats::new(&server.url(), "");
    harness.server = Some(Mutex::new(server));
    harness.check(OURS).await;
    conformance::run(harness).await.expect(72);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_server_passes_the_suite() {
    let Some(url) = services::nats_older() else { return };
    let harness = OnNats::new(&url, "");
    harness.check(OURS).await;
    conformance::run(harness).await.expect(71);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_passes_the_suite() {
    let Some(url) = services::nats_cluster() else { return };
    let harness = OnNats::new(&url, "?replicas=3");
    harness.check(OURS).await;
    conformance::run(harness).await.expect(71);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_in_order_passes_the_suite() {
    let Some(url) = services::nats() else { return };
    let harness = OnNats::new(&url, "?fair=true");
    harness
        .check({
            let mut can = OURS;
            can.queue = QueueKind::Fifo;
            can
        })
        .await;
    conformance::run(harness).await.expect(78);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_form_of_nlock_passes_what_it_can_promise() {
    let Some(url) = services::nats() else { return };
    let harness = OnNats::new(&url, "?form=nlock&ttl=600ms");
    harness
        .check({
            let mut can = OURS;
            can.shared = false;
            can.semaphore = false;
            can.detached = false;
            can
        })
        .await;
    conformance::run(harness).await.expect(61);
}
