//! A case of the suite: its form, its environment and the conditions under which it is skipped.

use std::future::Future;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::faults::Faults;
use super::needs::Need;
use super::outcome::Outcome as _;
use crate::store::{Capabilities, Claim, Identity, KeySpace, KeyState, Mode, Store};
use crate::{Client, Clock, FencingToken, Guard, Key, LockRequest};

/// Access of the suite to a store.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// Opens another client of the store. All clients see the same locks.
    async fn open(&self) -> Arc<dyn Store>;

    /// Restarts the server behind the store, keeping its data, and opens a client. `None`, if nothing can be restarted,
    /// skips the case. No client that was opened before is used afterwards.
    async fn restart(&self) -> Option<Arc<dyn Store>> {
        None
    }

    /// Command of another process that opens the same store and calls [`work`](super::work) with it. The suite passes the task in
    /// the environment. A test program can start itself again, restricted to the test that calls [`work`](super::work). `None`, if
    /// processes cannot share the store, skips the cases.
    fn worker(&self) -> Option<Command> {
        None
    }

    /// The longest ttl that the suite may request, if this test setup limits it further than
    /// [`Store::max_ttl`]; [`Duration::MAX`] by default.
    fn longest_ttl(&self) -> Duration {
        Duration::MAX
    }
}

/// One clause of the contract.
pub(super) struct Case {
    pub(super) name: &'static str,
    /// The requirement, in a sentence.
    pub(super) says: &'static str,
    pub(super) needs: &'static [Need],
    pub(super) run: fn(Fixture) -> Running,
}

pub(super) type Running = Pin<Box<dyn Future<Output = CaseOutcome> + Send>>;

/// Result of a case that did not panic.
pub(super) enum CaseOutcome {
    Passed,
    /// The case found, while it ran, that this is missing.
    Skipped(Need),
}

impl From<()> for CaseOutcome {
    fn from((): ()) -> Self {
        Self::Passed
    }
}

/// Lists the cases of a file. A case is `name: "sentence", [needs];`, and `name` is also the case's function.
macro_rules! cases {
    ($($name:ident: $says:literal, [$($need:ident),*];)*) => {
        pub(super) fn cases() -> Vec<super::case::Case> {
            vec![$(super::case::Case {
                name: stringify!($name),
                says: $says,
                needs: &[$(super::needs::$need),*],
                run: |scene| Box::pin(async move { $name(scene).await.into() }),
            }),*]
        }
    };
}
pub(super) use cases;

/// Environment of a case.
pub(super) struct Fixture {
    pub(super) harness: Arc<dyn Harness>,
    pub(super) name: &'static str,
    /// Two clients. Requests of the first one can be made to fail.
    pub(super) one: Client,
    pub(super) two: Client,
    pub(super) faults: Faults,
    pub(super) clock: Clock,
}

impl Fixture {
    pub(super) async fn new(harness: Arc<dyn Harness>, name: &'static str) -> Self {
        let clock = Clock::system();
        let (store, faults) = Faults::wrap(harness.open().await, clock.clone());
        let one = Client::with_store(Arc::new(store));
        let two = Client::with_store(harness.open().await);
        Self { harness, name, one, two, faults, clock }
    }

    pub(super) fn can(&self) -> Capabilities {
        self.two.store().capabilities()
    }

    /// The key of this case. It is unique per process, because the suite may run twice on one store.
    pub(super) fn key(&self) -> Key {
        self.key_of("")
    }

    pub(super) fn key_of(&self, part: &str) -> Key {
        let run = std::process::id();
        Key::new(&format!("conformance/{run}/{}{part}", self.name)).expect("made of plain letters")
    }

    /// The shortest lease that the store supports and a slow test machine can renew in time.
    pub(super) fn ttl(&self) -> Duration {
        self.can().min_ttl.max(Duration::from_millis(600))
    }

    /// The ttl nearest to `wanted` that the store supports.
    pub(super) fn ttl_of(&self, wanted: Duration) -> Duration {
        let longest = self.two.store().max_ttl().unwrap_or(Duration::MAX);
        self.ttl().max(wanted).min(longest).min(self.harness.longest_ttl())
    }

    /// Upper bound for waits: longer than any hold that a case leaves behind.
    pub(super) fn max_wait(&self) -> Duration {
        self.ttl() * 3 + Duration::from_secs(20)
    }

    pub(super) fn lock(&self, client: &Client) -> LockRequest {
        client.lock(self.key()).ttl(self.ttl()).timeout(self.max_wait())
    }

    pub(super) async fn acquire(&self, client: &Client) -> Guard {
        self.lock(client).acquire().await.succeeds("LockRequest::acquire")
    }

    pub(super) async fn state(&self) -> KeyState {
        self.two.store().inspect(&self.key(), KeySpace::Lock).await.succeeds("Store::inspect")
    }

    /// The `nth` claim of this case, to call a store's methods directly. Its id is unique over all cases and processes.
    pub(super) fn claim(&self, nth: u64) -> Claim {
        let case = BuildHasherDefault::<DefaultHasher>::default().hash_one(self.key().as_str());
        let id = u128::from(case) << 64 | u128::from(nth);
        Claim {
            id,
            key: self.key(),
            mode: Mode::Exclusive,
            ttl: self.ttl(),
            by: Arc::new(Identity { id: format!("claim {nth}"), ..Identity::default() }),
            queue: false,
            fail_if_contended: false,
            fair: false,
            detached: false,
        }
    }

    /// As [`claim`](Self::claim), with a lease that does not end while the case runs.
    pub(super) fn long_claim(&self, nth: u64) -> Claim {
        Claim { ttl: self.ttl_of(Duration::from_secs(60)), ..self.claim(nth) }
    }

    /// Waits until `condition` is true of the key's state.
    pub(super) async fn wait_until(&self, what: &str, condition: impl Fn(&KeyState) -> bool) {
        self.wait_within(self.max_wait(), what, condition).await;
    }

    /// Waits until `condition` is true of the key's state, for at most `limit`.
    pub(super) async fn wait_within(
        &self,
        limit: Duration,
        what: &str,
        condition: impl Fn(&KeyState) -> bool,
    ) {
        let begun = Instant::now();
        let mut state = self.state().await;
        while !condition(&state) {
            assert!(begun.elapsed() < limit, "timed out waiting for {what}: {state:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
            state = self.state().await;
        }
    }

    /// A client on the store of `client`, with the counts of its requests.
    pub(super) fn counted(&self, client: &Client) -> (Client, Faults) {
        let (store, requests) = Faults::wrap(Arc::clone(client.store()), self.clock.clone());
        (Client::with_store(Arc::new(store)), requests)
    }

    /// Waits until `condition` is true, which needs no request to the store.
    pub(super) async fn wait_for(&self, what: &str, condition: impl Fn() -> bool) {
        let (begun, limit) = (Instant::now(), self.max_wait());
        while !condition() {
            assert!(begun.elapsed() < limit, "timed out waiting for {what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until the key of this case has neither a holder nor a waiter.
    pub(super) async fn wait_until_free(&self) {
        self.wait_until("a free key", |state| state.holders.is_empty() && state.waiters.is_empty())
            .await;
    }

    /// Checks the tokens of two successive grants of a key. A store without ordered tokens must grant no token at all.
    pub(super) fn check_order(&self, before: FencingToken, after: FencingToken) {
        if self.can().ordered_tokens {
            assert!(before < after, "{before:?}, then {after:?}");
            assert!(!before.is_none(), "a grant without a token");
        } else {
            let none = FencingToken::NONE;
            assert_eq!((before, after), (none, none), "tokens of a store that has no order");
        }
    }

    /// Time limit of one request to this store.
    pub(super) fn limit(&self) -> Duration {
        self.ttl() / 4
    }
}
