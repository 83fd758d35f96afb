//! The store of lock servers passes the whole suite, with our extension of the protocol and without.
#![cfg(feature = "server")]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Handoff, Liveness, QueueKind};
use tenure::{Client, Store};

mod fencing;
mod repeating;
mod script;
mod support;
mod talking;
mod trusting;

use support::{SECRET, TestServer, Worker};

struct OnServer(TestServer);

impl OnServer {
    async fn connect(&self) -> Arc<dyn Store> {
        Arc::clone(Client::connect(&self.0.url()).await.expect("it listens").store())
    }
}

#[async_trait]
impl Harness for OnServer {
    async fn open(&self) -> Arc<dyn Store> {
        self.connect().await
    }

    async fn restart(&self) -> Option<Arc<dyn Store>> {
        self.0.restart();
        Some(self.connect().await)
    }

    fn worker(&self) -> Option<std::process::Command> {
        Some(Worker::command(&self.0.url(), "conform"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_extension_passes_the_suite() {
    // Holds can be broken only where clients prove themselves.
    let server = OnServer(TestServer::start(|settings| settings.secret = Some(SECRET)));
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
    assert_eq!(server.connect().await.capabilities(), expected);
    conformance::run(server).await.expect(79);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plain_protocol_passes_the_suite() {
    let server = OnServer(TestServer::start(|setup| setup.settings.extension = false));
    let mut expected = Capabilities::new(Liveness::Both);
    expected.queue = QueueKind::Fifo;
    expected.semaphore = true;
    assert_eq!(server.connect().await.capabilities(), expected);
    conformance::run(server).await.expect(60);
}
