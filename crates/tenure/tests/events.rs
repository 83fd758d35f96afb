//! Events that the library emits through `tracing`: names and fields that programs may rely on.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tenure::conformance::{Fault, Faults, Op};
use tenure::{Client, Clock, MemoryStore};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Metadata, Subscriber};

/// Writes down the events of this crate.
#[derive(Clone, Default)]
struct Ear(Arc<Mutex<Vec<Heard>>>);

#[derive(Clone, Debug)]
struct Heard {
    name: &'static str,
    fields: BTreeMap<&'static str, String>,
}

impl Ear {
    /// Listens to this thread until the guard is dropped.
    fn open() -> (Self, DefaultGuard) {
        let ear = Self::default();
        (ear.clone(), tracing::subscriber::set_default(ear))
    }

    fn heard(&self) -> MutexGuard<'_, Vec<Heard>> {
        self.0.lock().expect("no test panics with it")
    }

    fn names(&self) -> Vec<&'static str> {
        self.heard().iter().map(|heard| heard.name).collect()
    }

    fn the(&self, name: &str) -> BTreeMap<&'static str, String> {
        let heard = self.heard();
        let found = heard.iter().find(|heard| heard.name == name);
        found.unwrap_or_else(|| panic!("no {name} in {heard:?}")).fields.clone()
    }
}

impl Subscriber for Ear {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("tenure")
    }
    fn event(&self, event: &Event<'_>) {
        let mut heard = Heard { name: event.metadata().name(), fields: BTreeMap::new() };
        event.record(&mut heard);
        self.heard().push(heard);
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut heard = Heard { name: span.metadata().name(), fields: BTreeMap::new() };
        span.record(&mut heard);
        self.heard().push(heard);
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl Visit for Heard {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }
}

async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_life_of_a_hold_is_told_with_stable_names() {
    let (ear, _listening) = Ear::open();
    let (clock, hand) = Clock::manual();
    let memory = Arc::new(MemoryStore::with_clock(clock.clone()));
    let (store, faults) = Faults::wrap(memory, clock.clone());
    let client = Client::with_store(Arc::new(store)).with_clock(clock);
    let ttl = Duration::from_secs(6);

    let guard = client.lock("reports").ttl(ttl).acquire().await.unwrap();
    let token = guard.fencing_token().to_string();
    let waiter = client.lock("reports").ttl(ttl).enqueue().await.unwrap();
    faults.next(Op::Renew, Fault::LoseRequest);
    for _ in 0..4 {
        hand.advance(Duration::from_secs(1));
        settle().await;
    }
    guard.release().await.unwrap();
    let next = waiter.wait().await.unwrap();
    faults.set_down(true);
    hand.advance(Duration::from_secs(60));
    settle().await;
    let lost = next.lost().await;

    let acquired = ear.the("tenure.acquired");
    assert_eq!((&*acquired["key"], &*acquired["store"]), ("reports", "memory:"));
    assert_eq!(acquired["token"], token);
    assert!(ear.the("tenure.renew_failed")["error"].contains("injected fault"));
    assert_eq!(ear.the("tenure.handoff_requested")["token"], token);
    assert_eq!(ear.the("tenure.ended")["end"], "Released");
    assert_eq!(ear.the("tenure.lost")["reason"], lost.reason.to_string());
    for span in ["lock.acquire", "lock.hold"] {
        let span = ear.the(span);
        assert_eq!((&*span["key"], &*span["store"]), ("reports", "memory:"));
    }
    let names = ear.names();
    for name in ["tenure.renewed", "tenure.release_failed"] {
        assert!(names.contains(&name), "{name} is missing from {names:?}");
    }
}

#[tokio::test]
async fn no_event_tells_the_handle() {
    let (ear, _listening) = Ear::open();
    let client = Client::with_store(Arc::new(MemoryStore::new()));
    let guard = client.lock("reports").acquire().await.unwrap();
    let secret = guard.handle().unwrap().expose()[17..].to_owned();
    assert!(!format!("{guard:?}").contains(&secret));
    guard.release().await.unwrap();
    let told = format!("{:?}", ear.heard());
    assert!(told.contains("tenure.acquired") && !told.contains(&secret), "{told}");
}
