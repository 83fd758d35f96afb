//! The memory store passes the whole suite.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Handoff, Liveness, QueueKind};
use tenure::{Client, Store};

/// A named store: dropping its last user simulates a restart.
struct InMemory(Mutex<Option<Arc<dyn Store>>>);

impl InMemory {
    async fn connect() -> Arc<dyn Store> {
        let client = Client::connect("memory:conformance").await.expect("memory needs nothing");
        Arc::clone(client.store())
    }
}

#[async_trait]
impl Harness for InMemory {
    async fn open(&self) -> Arc<dyn Store> {
        Self::connect().await
    }

    async fn restart(&self) -> Option<Arc<dyn Store>> {
        drop(self.0.lock().expect("no test panics with it").take());
        Some(Self::connect().await)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_passes_the_suite() {
    let store = InMemory::connect().await;
    let mut expected = Capabilities::new(Liveness::Both);
    expected.queue = QueueKind::Fifo;
    expected.push = true;
    expected.handoff = Handoff::Pushed;
    expected.shared = true;
    expected.semaphore = true;
    expected.detached = true;
    expected.list = true;
    expected.identities = true;
    expected.evict = true;
    expected.ordered_tokens = true;
    expected.min_ttl = Duration::from_millis(1);
    assert_eq!(store.capabilities(), expected);
    let report = conformance::run(InMemory(Mutex::new(Some(store)))).await;
    report.expect(77);
}
