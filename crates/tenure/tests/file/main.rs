//! The file store passes the whole suite, between tasks and between processes.
#![cfg(all(unix, feature = "file"))]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure::Store;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Handoff, Liveness, QueueKind};

mod folders;
mod holders;
#[path = "../../../tenure-server/tests/skip/mod.rs"]
mod skip;
mod support;
mod turns;

use support::{Folder, Worker};

struct InFiles(Folder);

#[async_trait]
impl Harness for InFiles {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.0.open())
    }

    async fn restart(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(self.0.open()))
    }

    fn worker(&self) -> Option<std::process::Command> {
        Some(Worker::command(&self.0, "conform"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_pass_the_suite() {
    let folder = Folder::new();
    let mut expected = Capabilities::new(Liveness::Session);
    expected.queue = QueueKind::Fifo;
    expected.push = true;
    expected.handoff = Handoff::Pushed;
    expected.shared = true;
    expected.semaphore = true;
    expected.list = true;
    expected.identities = true;
    expected.evict = true;
    expected.ordered_tokens = true;
    expected.min_ttl = Duration::from_millis(1);
    assert_eq!(folder.open().capabilities(), expected);
    let report = conformance::run(InFiles(folder)).await;
    report.expect(67);
}
