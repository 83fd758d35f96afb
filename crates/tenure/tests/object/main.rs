//! Object stores pass the whole suite: the fake of Google's JSON API in quick time and in its own, moto and azurite.
#![cfg(all(unix, feature = "object"))]

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Ends, Handoff, Queue};
use tenure::{Client, Store};

mod fake;
mod faults;

use fake::Fake;

struct OnFake {
    url: String,
}

const URL: &str = "TENURE_TEST_OBJECT_URL";

#[async_trait]
impl Harness for OnFake {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::clone(Client::connect(&self.url).await.expect("a good URL").store())
    }

    fn worker(&self) -> Option<Command> {
        let mut command = Command::new(std::env::current_exe().ok()?);
        command.args(["--exact", "worker", "--nocapture"]).env(URL, &self.url);
        command.stdout(std::process::Stdio::null());
        Some(command)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker() {
    let Ok(url) = std::env::var(URL) else { return };
    let client = Client::connect(&url).await.expect("a good URL");
    conformance::work(Arc::clone(client.store())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fake_passes_the_suite() {
    let fake = Fake::quick();
    let harness = OnFake { url: fake.store("suite") };
    let expected = Capabilities {
        queue: Queue::Single,
        ends: Ends::Lease,
        push: false,
        handoff: Handoff::Polled { every: Duration::from_millis(30) },
        shared: false,
        semaphore: false,
        detached: true,
        list: true,
        names: true,
        evict: true,
        min_ttl: Duration::from_millis(200),
    };
    assert_eq!(harness.open().await.capabilities(), expected);
    conformance::run(harness).await.expect(59);
}
