//! The file store passes the whole suite, between tasks and between processes.
#![cfg(all(unix, feature = "file"))]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tenure::conformance::{self, Harness};
use tenure::store::{Capabilities, Ends, Handoff, Queue};
use tenure::{FileStore, Store};

/// A folder of its own, removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("tenure-test-{}-{made}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn open(&self) -> FileStore {
        FileStore::open(&self.0).expect("a folder of our own")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

struct InFiles(Folder);

#[async_trait]
impl Harness for InFiles {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.0.open())
    }

    async fn restart(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(self.0.open()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_pass_the_suite() {
    let folder = Folder::new();
    let expected = Capabilities {
        queue: Queue::Fifo,
        ends: Ends::Session,
        push: true,
        handoff: Handoff::Pushed,
        shared: true,
        semaphore: true,
        detached: false,
        list: true,
        min_ttl: Duration::from_millis(1),
    };
    assert_eq!(folder.open().capabilities(), expected);
    let report = conformance::run(InFiles(folder)).await;
    report.expect(44);
}
