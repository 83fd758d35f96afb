//! Holds that are released in one call: the guard releases them, and the keeper is only notified.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tenure::store::{
    Answer, Capabilities, Claim, Grant, Hold, KeySpace, KeyState, LeaseStart, ReleaseInline,
    Renewed, Store, unsupported,
};
use tenure::{Client, Error, ErrorKind, FencingToken, Key, MemoryStore, Result};
use tokio::sync::Notify;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A store whose renewals last until the hold is released, and are then refused.
#[derive(Clone, Debug, Default)]
struct Slow(Arc<State>);

#[derive(Debug, Default)]
struct State {
    renewing: Notify,
    over: Notify,
    let_go: AtomicBool,
    /// A renewal is in flight.
    in_renewal: AtomicBool,
    /// Another client had the hold before it was released.
    taken: AtomicBool,
}

impl ReleaseInline for State {
    fn release_now(&self) -> bool {
        self.let_go.store(true, Ordering::Release);
        self.over.notify_one();
        // The renewal is refused before the guard can tell the keeper why.
        let begun = Instant::now();
        while self.in_renewal.load(Ordering::Acquire) {
            assert!(begun.elapsed() < Duration::from_secs(20), "the renewal does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        !self.taken.load(Ordering::Acquire)
    }
}

#[async_trait]
impl Store for Slow {
    fn capabilities(&self) -> Capabilities {
        MemoryStore::new().capabilities()
    }
    async fn claim(&self, _: &Claim, _: Duration) -> Result<Answer> {
        let mut grant = Grant::new(FencingToken::new(0, 1), Box::new(self.clone()));
        grant.lease_start = LeaseStart::NoLease;
        Ok(Answer::Granted(grant))
    }
    async fn inspect(&self, _: &Key, _: KeySpace) -> Result<KeyState> {
        Err(unsupported(self, "do that"))
    }
}

#[async_trait]
impl Hold for Slow {
    async fn renew(&mut self, _: Duration, _: Duration) -> Result<Renewed> {
        self.0.in_renewal.store(true, Ordering::Release);
        self.0.renewing.notify_one();
        self.0.over.notified().await;
        self.0.in_renewal.store(false, Ordering::Release);
        Err(Error::new(ErrorKind::NotHeld, "the hold has ended"))
    }
    async fn release(&mut self, _: Duration) -> Result<()> {
        panic!("the guard lets go by itself")
    }
    fn release_inline(&self) -> Option<Weak<dyn ReleaseInline>> {
        let state: Arc<dyn ReleaseInline> = Arc::clone(&self.0) as _;
        Some(Arc::downgrade(&state))
    }
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("slow:")
    }
}

/// Writes down the names of events.
#[derive(Clone, Default)]
struct Ear(Arc<Mutex<Vec<&'static str>>>);

impl Subscriber for Ear {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("tenure")
    }
    fn event(&self, event: &Event<'_>) {
        self.0.lock().expect("no test panics with it").push(event.metadata().name());
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_refused_because_the_guard_let_go_is_no_loss() {
    let ear = Ear::default();
    tracing::subscriber::set_global_default(ear.clone()).expect("the only one who listens");
    let store = Slow::default();
    let client = Client::with_store(Arc::new(store.clone()));
    let ttl = Duration::from_millis(300);
    let guard = client.lock("key").ttl(ttl).acquire().await.expect("free");
    store.0.renewing.notified().await;
    guard.release().await.expect("given back, whatever the renewal does");
    assert!(store.0.let_go.load(Ordering::Acquire));
    while !ear.0.lock().expect("whole").contains(&"tenure.ended") {
        tokio::task::yield_now().await;
    }
    let heard = ear.0.lock().expect("whole").clone();
    assert!(!heard.contains(&"tenure.lost"), "{heard:?}");
}

#[tokio::test]
async fn release_of_a_hold_taken_by_another_reports_the_loss() {
    let store = Slow::default();
    let client = Client::with_store(Arc::new(store.clone()));
    let guard = client.lock("key").acquire().await.expect("free");
    store.0.taken.store(true, Ordering::Release);
    let error = guard.release().await.expect_err("it was taken");
    assert_eq!(error.kind(), ErrorKind::Lost);
}
