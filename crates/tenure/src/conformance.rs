//! Conformance suite that every store must pass: the store contract as named cases.
//!
//! For authors of stores, inside and outside this project. Implement [`Harness`], call [`run`], and pin the expected
//! number of passed cases with [`Report::expect`]:
//!
//! ```
//! use std::sync::Arc;
//! use tenure::conformance::{self, Harness};
//! use tenure::MemoryStore;
//! use tenure::store::{Store, async_trait};
//!
//! struct InMemory(MemoryStore);
//!
//! #[async_trait]
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
//!
//! `examples/custom_store.rs` and `examples/queue_store.rs` are stores that pass, the second with a
//! [worker](Harness::worker) and a [restart](Harness::restart). `cargo doc -p tenure --features conformance,blocking`
//! builds this page and those of [`store`](crate::store).
//!
//! The suite injects faults around the store, not on its connections. So it does not test that an error after a request
//! was sent is `Unknown` instead of `Unavailable`, nor that a delayed claim has no effect after a later request of the
//! same claim, nor that the store returns within the `limit` of a request while
//! its server hangs. Test these with a proxy that delays and cuts
//! connections.
//!
//! A case fails if it takes longer than two minutes. The suite uses keys of its own, but calls
//! [`Store::clean`](crate::store::Store::clean), which removes data of released locks of the whole store.
//!
//! # Cases
//!
//! A case is skipped if a field of the store's [`Capabilities`], or a method of the [`Harness`], does not fit. A case that
//! needs `Grant::grants` is skipped if the first grant of the case has none.
//!
#![doc = include_str!("conformance/cases.md")]

mod cancelling;
mod case;
mod electing;
mod faults;
mod holding;
mod losing;
mod needs;
mod observing;
mod outcome;
mod processes;
mod sharing;
mod unclear;
mod waiting;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

pub use case::Harness;
pub use faults::{Fault, Faults, FaultyStore, Op};
pub use processes::work;

use case::{Case, CaseOutcome, Fixture, cases};
use needs::Need;
use outcome::Outcome;

use crate::store::Capabilities;

/// Time limit of one case. The page above names it.
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
        let result = match case.needs.iter().find(|need| !need.is_met(&can)) {
            Some(need) => CaseResult::Skipped(*need),
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
        Ok(Some(Ok(CaseOutcome::Skipped(need)))) => CaseResult::Skipped(need),
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

#[derive(Debug)]
enum CaseResult {
    Passed,
    Skipped(Need),
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
        self.count(|verdict| matches!(verdict, CaseResult::Passed))
    }

    /// Number of cases that failed.
    pub fn failed(&self) -> usize {
        self.count(|verdict| matches!(verdict, CaseResult::Failed(_)))
    }

    /// Number of cases that were skipped: the store or the harness lacks what they need.
    pub fn skipped(&self) -> usize {
        self.count(|verdict| matches!(verdict, CaseResult::Skipped(_)))
    }

    fn count(&self, of: impl Fn(&CaseResult) -> bool) -> usize {
        self.lines.iter().filter(|line| of(&line.result)).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({:?})", self.store, self.can)?;
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        let (passed, failed, skipped) = (self.passed(), self.failed(), self.skipped());
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

impl fmt::Display for ReportLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.result {
            CaseResult::Passed => write!(f, "  ok    {}", self.name),
            CaseResult::Skipped(need) => {
                write!(f, "  skip  {}: {} (needs {})", self.name, need.missing, need.what)
            }
            CaseResult::Failed(how) => {
                write!(f, "  FAIL  {}: {}\n        {how}", self.name, self.says)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    #[test]
    fn the_page_lists_every_case() {
        let mut table = String::from("| case | needs | requirement |\n|---|---|---|\n");
        for case in super::all() {
            let needs: Vec<_> = case.needs.iter().map(|need| need.what).collect();
            writeln!(table, "| `{}` | {} | {} |", case.name, needs.join(", "), case.says)
                .expect("a string takes it");
        }
        let listed = include_str!("conformance/cases.md");
        assert!(listed == table, "replace src/conformance/cases.md by:\n{table}");
    }
}
