//! The store on PostgreSQL's advisory locks passes the whole suite, against a real server.
#![cfg(feature = "postgres")]
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

use std::sync::Arc;

use async_trait::async_trait;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Liveness, QueueKind};
use tenure::{PgAdvisoryStore, Store};

mod bigint;
mod elections;
mod faults;
mod fleet;
mod interop;
mod link;
#[path = "../network/mod.rs"]
mod network;
mod pool_modes;
mod refusals;
#[allow(dead_code, reason = "shared with the tests of lease rows")]
#[path = "../pg_lease/server.rs"]
mod server;
#[path = "../services/mod.rs"]
mod services;
mod support;
mod transactions;

use support::{Worker, advisory};

struct OnSessions(String);

#[async_trait]
impl Harness for OnSessions {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(PgAdvisoryStore::open(&self.0).unwrap())
    }

    async fn restart(&self) -> Option<Arc<dyn Store>> {
        Some(self.open().await)
    }

    fn worker(&self) -> Option<std::process::Command> {
        Some(Worker::command(&self.0, "conform", "any"))
    }
}

const CAPABILITIES: Capabilities = {
    let mut can = Capabilities::new(Liveness::Both);
    can.queue = QueueKind::Fifo;
    can.push = true;
    can.shared = true;
    can.list = true;
    can.identities = true;
    can.evict = true;
    can.ordered_tokens = true;
    can
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn advisory_locks_pass_the_suite() {
    let Some(url) = services::postgres() else { return };
    let url = advisory(&url);
    assert_eq!(PgAdvisoryStore::open(&url).unwrap().capabilities(), CAPABILITIES);
    conformance::run(OnSessions(url)).await.expect(71);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn advisory_locks_of_64_bits_pass_the_suite() {
    let Some(url) = services::postgres() else { return };
    let url = advisory(&format!("{url}?key=bigint"));
    conformance::run(OnSessions(url)).await.expect(71);
}
