//! The driver of elections: in logical time where time matters, on the memory store.

mod callbacks;
mod leading;
mod observing;
mod running;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure::conformance::Faults;
use tenure::election::{Election, ElectionRequest, Event, Events};
use tenure::{Client, Clock, ManualClock, MemoryStore};

const KEY: &str = "scheduler";

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A store, its faults, and the hand that moves the time of all.
struct Stage {
    client: Client,
    other: Client,
    faults: Faults,
    hand: ManualClock,
}

impl Stage {
    fn new() -> Self {
        let (clock, hand) = Clock::manual();
        let memory = MemoryStore::with_clock(clock.clone());
        let (store, faults) = Faults::wrap(Arc::new(memory.clone()), clock.clone());
        let client = Client::with_store(Arc::new(store)).with_clock(clock.clone());
        let other = Client::with_store(Arc::new(memory)).with_clock(clock);
        Self { client, other, faults, hand }
    }

    /// Health every 5 s, a ttl of 15 s, so a deadline 12.5 s after each proof.
    fn election(&self) -> ElectionRequest {
        self.client.election(KEY)
    }

    async fn leading(&self, request: ElectionRequest) -> (Election, Events) {
        let election = request.build().expect("good settings");
        let mut events = election.events();
        election.start().await.expect("started");
        until(&mut events, |event| matches!(event, Event::Acquired(_))).await;
        (election, events)
    }

    /// Advances time in small steps, so that all participants keep up.
    async fn pass(&self, span: Duration) {
        let step = ms(250);
        for _ in 0..span.as_nanos() / step.as_nanos() {
            settle().await;
            self.hand.advance(step);
        }
        settle().await;
    }
}

/// Lets every task do what it can without time passing.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

async fn until(events: &mut Events, wanted: impl Fn(&Event) -> bool) -> Event {
    loop {
        let event = events.next().await.expect("the election is there");
        if wanted(&event) {
            return event;
        }
    }
}

/// The names of what was told meanwhile, without changes of state.
fn told(events: &mut Events) -> Vec<&'static str> {
    let mut names = Vec::new();
    while let Some(Some(event)) = now_or_never(events.next()) {
        match event {
            Event::Acquired(_) => names.push("acquired"),
            Event::Released => names.push("released"),
            Event::Lost(_) => names.push("lost"),
            Event::AcquireFailed(_) => names.push("failed"),
            Event::Error(_) => names.push("error"),
            Event::Stopped(_) => names.push("stopped"),
            _ => {}
        }
    }
    names
}

fn now_or_never<T>(future: impl Future<Output = T>) -> Option<T> {
    // A test that reads much at once must not be told to wait its turn.
    let mut future = std::pin::pin!(tokio::task::unconstrained(future));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut cx) {
        std::task::Poll::Ready(output) => Some(output),
        std::task::Poll::Pending => None,
    }
}

/// What callbacks heard.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Heard {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().expect("no panic").push(what.into());
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().expect("no panic").clone()
    }
}
