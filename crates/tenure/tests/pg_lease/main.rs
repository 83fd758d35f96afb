//! The store on lease rows of PostgreSQL passes the whole suite, against a real server.
#![cfg(feature = "postgres")]
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Handoff, Liveness, QueueKind};
use tenure::{PgLeaseStore, Store};

mod clocks;
mod crowds;
mod elections;
mod encryption;
#[cfg(feature = "jobs")]
mod failover;
mod faults;
#[allow(dead_code, reason = "shared with the tests of advisory locks")]
#[path = "../pg_advisory/link.rs"]
mod link;
mod refusals;
mod server;
#[path = "../services/mod.rs"]
mod services;
mod support;

use support::{Schema, Worker, with_schema};

struct OnRows(Schema);

#[async_trait]
impl Harness for OnRows {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.0.store())
    }

    async fn restart(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(self.0.store()))
    }

    fn worker(&self) -> Option<std::process::Command> {
        Some(Worker::command(&self.0, "conform"))
    }
}

const CAPABILITIES: Capabilities = Capabilities {
    queue: QueueKind::None,
    liveness: Liveness::Lease,
    push: true,
    handoff: Handoff::None,
    shared: true,
    semaphore: true,
    detached: true,
    list: true,
    identities: true,
    evict: true,
    ordered_tokens: true,
    min_ttl: Duration::from_secs(1),
};

/// The suite's processes count in a file that is named after this one: one suite at a time.
fn alone() -> MutexGuard<'static, ()> {
    static SUITE: Mutex<()> = Mutex::new(());
    SUITE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn lease_rows_pass_the_suite() {
    let Some(url) = services::postgres() else { return };
    let _alone = alone();
    with_schema(&url, async |schema| {
        assert_eq!(PgLeaseStore::open(&schema.url()).unwrap().capabilities(), CAPABILITIES);
        conformance::run(OnRows(schema)).await.expect(65);
    });
}

#[test]
fn lease_rows_pass_the_suite_through_a_pooler_in_transaction_mode() {
    let Some(url) = services::pgbouncer() else { return };
    let _alone = alone();
    with_schema(&url, async |schema| conformance::run(OnRows(schema)).await.expect(65));
}
