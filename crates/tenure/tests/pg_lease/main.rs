//! The store on lease rows of PostgreSQL passes the whole suite, against a real server.
#![cfg(feature = "postgres")]
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, which clippy cannot see")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Handoff, Liveness};
use tenure::{PgLeaseStore, Store};

mod clocks;
mod conninfo;
mod credentials;
mod crowds;
mod elections;
mod encryption;
#[cfg(feature = "jobs")]
mod failover;
mod faults;
#[allow(dead_code, reason = "shared with the tests of advisory locks")]
#[path = "../pg_advisory/link.rs"]
mod link;
#[cfg(feature = "jobs")]
mod old_primary;
mod primaries;
mod refusals;
mod server;
#[path = "../services/mod.rs"]
mod services;
mod support;
mod waiters;

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

const CAPABILITIES: Capabilities = {
    let mut can = Capabilities::new(Liveness::Lease);
    can.push = true;
    can.handoff = Handoff::OnRenewal;
    can.shared = true;
    can.semaphore = true;
    can.detached = true;
    can.list = true;
    can.identities = true;
    can.evict = true;
    can.ordered_tokens = true;
    can
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
        conformance::run(OnRows(schema)).await.expect(74);
    });
}

#[test]
fn lease_rows_pass_the_suite_through_a_pooler_in_transaction_mode() {
    let Some(url) = services::pgbouncer() else { return };
    let _alone = alone();
    with_schema(&url, async |schema| conformance::run(OnRows(schema)).await.expect(74));
}
