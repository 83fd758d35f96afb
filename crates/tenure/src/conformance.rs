//! Conformance suite that every store must pass: the store contract as named cases.
//!
//! For authors of stores, inside and outside this project. Implement [`Harness`], call [`run`], and pin the expected
//! number of passed cases with [`Report::expect`]:
//!
//! ```
//! use std::sync::Arc;
//! use tenure::conformance::{self, Harness};
//! use tenure::{MemoryStore, Store};
//!
//! struct InMemory(MemoryStore);
//!
//! #[async_trait::async_trait]
//! impl Harness for InMemory {
//!     async fn open(&self) -> Arc<dyn Store> {
//!         Arc::new(self.0.clone())
//!     }
//! }
//!
//! # #[tokio::main] async fn main() {
//! let report = conformance::run_only(InMemory(MemoryStore::new()), &["release_wakes_the_next"]).await;
//! report.expect(1);
//! # }
//! ```

mod cancelling;
mod electing;
mod faults;
mod holding;
mod losing;
mod observing;
mod processes;
mod sharing;
mod unclear;
mod waiting;

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::task::JoinSet;

pub use faults::{Fault, Faults, FaultyStore, Op};
pub use processes::work;

use crate::store::{
    Capabilities, Claim, Identity, KeySpace, KeyState, Liveness, Mode, QueueKind, Store,
};
use crate::{Client, Clock, ErrorKind, FencingToken, Guard, Key, LockRequest};

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

    /// Command of another process that opens the same store and calls [`work`] with it. The suite passes the task in
    /// the environment. A test program can start itself again, restricted to the test that calls [`work`]. `None`, if
    /// processes cannot share the store, skips the cases.
    fn worker(&self) -> Option<Command> {
        None
    }

    /// The longest ttl that the store supports; [`Duration::MAX`] by default.
    fn longest_ttl(&self) -> Duration {
        Duration::MAX
    }
}

/// One clause of the contract.
struct Case {
    name: &'static str,
    /// The requirement, in a sentence.
    says: &'static str,
    /// Reason for skipping the case on a store with these capabilities; `None` if the case applies.
    skip: fn(&Capabilities) -> Option<&'static str>,
    run: fn(Fixture) -> Running,
}

type Running = Pin<Box<dyn Future<Output = CaseOutcome> + Send>>;

/// Result of a case that did not panic.
enum CaseOutcome {
    Passed,
    Skipped(&'static str),
}

impl From<()> for CaseOutcome {
    fn from((): ()) -> Self {
        Self::Passed
    }
}

/// Lists the cases of a file. A case is `name: "requirement", skip function;`, and `name` is also the case's function.
macro_rules! cases {
    ($($name:ident: $says:literal, $skip:expr;)*) => {
        pub(super) fn cases() -> Vec<super::Case> {
            vec![$(super::Case {
                name: stringify!($name),
                says: $says,
                skip: $skip,
                run: |scene| Box::pin(async move { $name(scene).await.into() }),
            }),*]
        }
    };
}
use cases;

/// Skips no store.
fn always(_: &Capabilities) -> Option<&'static str> {
    None
}

fn has_lease(can: &Capabilities) -> Option<&'static str> {
    (can.liveness == Liveness::Session)
        .then_some("holds have no lease, they end with their session")
}

fn pushes(can: &Capabilities) -> Option<&'static str> {
    (!can.push).then_some("the store cannot push")
}

fn evicts(can: &Capabilities) -> Option<&'static str> {
    (!can.evict).then_some("the store cannot break a hold")
}

fn names(can: &Capabilities) -> Option<&'static str> {
    (!can.identities).then_some("the store does not show the names of holders")
}

/// Time limit of one case.
const CASE_TIMEOUT: Duration = Duration::from_secs(120);

/// Runs every case, one after another, each on its own keys.
pub async fn run(harness: impl Harness) -> Report {
    run_cases(harness, |_| true).await
}

/// Runs one of `shares` equal shares of the cases, for stores on which the suite takes long. All shares together are
/// the whole suite.
pub async fn run_share(harness: impl Harness, share: usize, shares: usize) -> Report {
    let names: Vec<_> = all().iter().map(|case| case.name).collect();
    let mine = |case: &Case| names.iter().position(|name| *name == case.name).map(|at| at % shares);
    run_cases(harness, |case| mine(case) == Some(share)).await
}

/// Runs the cases with these names.
///
/// # Panics
///
/// If there is no case with one of the names.
pub async fn run_only(harness: impl Harness, names: &[&str]) -> Report {
    let known: BTreeSet<_> = all().iter().map(|case| case.name).collect();
    for name in names {
        assert!(known.contains(name), "no case is named {name}: choose from {known:?}");
    }
    run_cases(harness, |case| names.contains(&case.name)).await
}

fn all() -> Vec<Case> {
    let mut cases = holding::cases();
    cases.extend(losing::cases());
    cases.extend(waiting::cases());
    cases.extend(sharing::cases());
    cases.extend(observing::cases());
    cases.extend(unclear::cases());
    cases.extend(cancelling::cases());
    cases.extend(processes::cases());
    cases.extend(electing::cases());
    cases
}

async fn run_cases(harness: impl Harness, chosen: impl Fn(&Case) -> bool) -> Report {
    let harness: Arc<dyn Harness> = Arc::new(harness);
    let store = harness.open().await;
    let can = store.capabilities();
    let mut report = Report { store: store.to_string(), can, lines: Vec::new() };
    for case in all().into_iter().filter(chosen) {
        let result = match (case.skip)(&can) {
            Some(reason) => CaseResult::Skipped(reason),
            None => attempt(&harness, &case).await,
        };
        let line = ReportLine { name: case.name, says: case.says, result };
        println!("{line}");
        report.lines.push(line);
    }
    report
}

async fn attempt(harness: &Arc<dyn Harness>, case: &Case) -> CaseResult {
    let scene = Fixture::new(Arc::clone(harness), case.name).await;
    let mut running = JoinSet::new();
    running.spawn((case.run)(scene));
    match tokio::time::timeout(CASE_TIMEOUT, running.join_next()).await {
        Err(_) => CaseResult::Failed(format!("did not finish within {CASE_TIMEOUT:?}")),
        Ok(Some(Ok(CaseOutcome::Passed))) => CaseResult::Passed,
        Ok(Some(Ok(CaseOutcome::Skipped(reason)))) => CaseResult::Skipped(reason),
        Ok(Some(Err(error))) => CaseResult::Failed(explain(error)),
        Ok(None) => CaseResult::Failed("the case did not run".to_owned()),
    }
}

fn explain(error: tokio::task::JoinError) -> String {
    let Ok(panic) = error.try_into_panic() else { return "the case was cancelled".to_owned() };
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(message), _) => message.clone(),
        (None, Some(message)) => (*message).to_owned(),
        (None, None) => "the case panicked without a message".to_owned(),
    }
}

/// Results of all cases that were selected.
#[derive(Debug)]
pub struct Report {
    store: String,
    can: Capabilities,
    lines: Vec<ReportLine>,
}

#[derive(Debug)]
struct ReportLine {
    name: &'static str,
    says: &'static str,
    result: CaseResult,
}

#[derive(Debug, PartialEq, Eq)]
enum CaseResult {
    Passed,
    Skipped(&'static str),
    Failed(String),
}

impl Report {
    /// Asserts that no case failed and that exactly `cases` cases passed, so that a case that is skipped by accident is
    /// noticed.
    ///
    /// # Panics
    ///
    /// With the whole report if that is not so.
    pub fn expect(&self, cases: usize) {
        assert!(self.failed() == 0 && self.passed() == cases, "expected {cases} cases\n{self}");
    }

    /// Number of cases that passed.
    pub fn passed(&self) -> usize {
        self.count(|verdict| *verdict == CaseResult::Passed)
    }

    /// Number of cases that failed.
    pub fn failed(&self) -> usize {
        self.count(|verdict| matches!(verdict, CaseResult::Failed(_)))
    }

    fn count(&self, of: impl Fn(&CaseResult) -> bool) -> usize {
        self.lines.iter().filter(|line| of(&line.result)).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({:?})", self.store, self.can)?;
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        write!(f, "{} passed, {} failed", self.passed(), self.failed())
    }
}

impl fmt::Display for ReportLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.result {
            CaseResult::Passed => write!(f, "  ok    {}", self.name),
            CaseResult::Skipped(reason) => write!(f, "  skip  {}: {reason}", self.name),
            CaseResult::Failed(how) => {
                write!(f, "  FAIL  {}: {}\n        {how}", self.name, self.says)
            }
        }
    }
}

/// Environment of a case.
struct Fixture {
    harness: Arc<dyn Harness>,
    name: &'static str,
    /// Two clients. Requests of the first one can be made to fail.
    one: Client,
    two: Client,
    faults: Faults,
    clock: Clock,
}

impl Fixture {
    async fn new(harness: Arc<dyn Harness>, name: &'static str) -> Self {
        let clock = Clock::system();
        let (store, faults) = Faults::wrap(harness.open().await, clock.clone());
        let one = Client::with_store(Arc::new(store));
        let two = Client::with_store(harness.open().await);
        Self { harness, name, one, two, faults, clock }
    }

    fn can(&self) -> Capabilities {
        self.two.store().capabilities()
    }

    /// Error kind of a try on a held lock.
    fn held_error_kind(&self) -> ErrorKind {
        if self.can().queue == QueueKind::Single { ErrorKind::Contention } else { ErrorKind::Held }
    }

    /// The key of this case. It is unique per process, because the suite may run twice on one store.
    fn key(&self) -> Key {
        self.key_of("")
    }

    fn key_of(&self, part: &str) -> Key {
        let run = std::process::id();
        Key::new(&format!("conformance/{run}/{}{part}", self.name)).expect("made of plain letters")
    }

    /// The shortest lease that the store supports and a slow test machine can renew in time.
    fn ttl(&self) -> Duration {
        self.can().min_ttl.max(Duration::from_millis(600))
    }

    /// Upper bound for waits: longer than any hold that a case leaves behind.
    fn max_wait(&self) -> Duration {
        self.ttl() * 3 + Duration::from_secs(20)
    }

    fn lock(&self, client: &Client) -> LockRequest {
        client.lock(self.key()).ttl(self.ttl()).timeout(self.max_wait())
    }

    async fn acquire(&self, client: &Client) -> Guard {
        self.lock(client).acquire().await.expect("the lock can be acquired")
    }

    async fn state(&self) -> KeyState {
        self.two
            .store()
            .inspect(&self.key(), KeySpace::Lock)
            .await
            .expect("the key can be inspected")
    }

    /// A claim, to call a store's methods directly.
    fn claim(&self, id: u128) -> Claim {
        Claim {
            id,
            key: self.key(),
            mode: Mode::Exclusive,
            ttl: self.ttl(),
            by: Arc::new(Identity { id: format!("claim {id}"), ..Identity::default() }),
            queue: false,
            fail_if_contended: false,
            fair: false,
            detached: false,
        }
    }

    /// Waits until `condition` is true of the key's state.
    async fn wait_until(&self, what: &str, condition: impl Fn(&KeyState) -> bool) {
        let begun = Instant::now();
        let mut state = self.state().await;
        while !condition(&state) {
            assert!(begun.elapsed() < self.max_wait(), "timed out waiting for {what}: {state:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
            state = self.state().await;
        }
    }

    /// Waits until the key of this case has neither a holder nor a waiter.
    async fn wait_until_free(&self) {
        self.wait_until("a free key", |state| state.holders.is_empty() && state.waiters.is_empty())
            .await;
    }

    /// Checks the tokens of two successive grants of a key. A store without ordered tokens must grant no token at all.
    fn check_order(&self, before: FencingToken, after: FencingToken) {
        if self.can().ordered_tokens {
            assert!(before < after, "{before:?}, then {after:?}");
            assert!(!before.is_none(), "a grant without a token");
        } else {
            let none = FencingToken::NONE;
            assert_eq!((before, after), (none, none), "tokens of a store that has no order");
        }
    }

    /// Time limit of one request to this store.
    fn limit(&self) -> Duration {
        self.ttl() / 4
    }
}
