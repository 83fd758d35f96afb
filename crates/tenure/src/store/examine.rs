//! What a store finds out about itself: whether it can be reached, what it promises, what could be better.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use tenure_core::Key;

use super::{Capabilities, Handoff, KeySpace, Liveness, QueueKind, Store};
use crate::{Clock, Error, ErrorKind, Result};

/// What the finding is called that says whether the store answers at all.
pub const REACHABLE: &str = "reachable";

/// The key that is looked at. Nobody holds it, and looking writes nothing.
const PROBE_KEY: &str = "tenure/doctor";
/// How many round trips are timed.
const LATENCY_ROUNDS: usize = 5;
/// The default ttl of a lock: what a slow store is measured by.
const DEFAULT_LOCK_TTL: Duration = Duration::from_secs(15);

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What was looked at, in a word or two.
    pub what: String,
    /// How it is.
    pub level: FindingLevel,
    /// What was found. Never a secret.
    pub detail: String,
    /// What to do about it.
    pub advice: Option<String>,
}

/// How good a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FindingLevel {
    /// As it should be.
    Ok,
    /// It works, and could go wrong in a way that the finding names.
    Warning,
    /// It does not work.
    Failed,
}

impl Finding {
    /// Something that is as it should be.
    pub fn ok(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(FindingLevel::Ok, what, detail)
    }

    /// Something that could go wrong.
    pub fn warning(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(FindingLevel::Warning, what, detail)
    }

    /// Something that does not work.
    pub fn failed(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(FindingLevel::Failed, what, detail)
    }

    /// Something that does not work, as the error says, with its causes.
    pub fn error(what: impl Into<String>, error: &Error) -> Self {
        Self::failed(what, error_chain(error))
    }

    /// The same finding, with what to do about it.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// Whether it says that the store cannot be reached: nothing else could be looked at then.
    pub fn is_unreachable(&self) -> bool {
        self.what == REACHABLE && self.level == FindingLevel::Failed
    }

    fn new(verdict: FindingLevel, what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { what: what.into(), level: verdict, detail: detail.into(), advice: None }
    }
}

impl fmt::Display for FindingLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
        })
    }
}

/// What can be found out about any store: whether it answers and how quickly, and what it can do.
///
/// For stores that examine more than that: this comes first, and nothing follows where it is
/// [unreachable](Finding::is_unreachable).
pub async fn basics<S: Store + ?Sized>(store: &S, limit: Duration) -> Vec<Finding> {
    let looking = time_round_trips(limit, || probe(store)).await;
    let mut findings = match looking {
        Ok(trips) => vec![Finding::ok(REACHABLE, "the store answers"), latency(&trips)],
        Err(error) if is_answer(&error) => vec![
            Finding::ok(REACHABLE, "the store answers"),
            Finding::error("looking", &error)
                .advise("no lock can be acquired until that is mended"),
        ],
        Err(error) => return vec![Finding::error(REACHABLE, &error)],
    };
    let can = store.capabilities();
    findings.push(Finding::ok("promises", describe_guarantees(&can)));
    findings.push(Finding::ok("abilities", describe_capabilities(&can)));
    findings
}

/// How long some round trips took, one after the other, the shortest first; the first error ends it.
///
/// # Errors
///
/// What a trip failed with, or `Unavailable` where the time was over before the first had come back.
pub async fn time_round_trips<F: Future<Output = Result<()>>>(
    limit: Duration,
    trip: impl Fn() -> F,
) -> Result<Vec<Duration>> {
    let clock = Clock::system();
    let end = clock.now() + limit;
    let mut took = Vec::with_capacity(LATENCY_ROUNDS);
    while took.len() < LATENCY_ROUNDS {
        let sent = clock.now();
        tokio::select! {
            biased;
            done = trip() => done?,
            () = clock.sleep_until(end) => break,
        }
        took.push(clock.now().since(sent));
    }
    if took.is_empty() {
        let message = format!("no answer within {limit:?}: is the store up?");
        return Err(Error::new(ErrorKind::Unavailable, message));
    }
    took.sort();
    Ok(took)
}

/// The finding of some round trips.
pub fn latency(took: &[Duration]) -> Finding {
    let median = took[took.len() / 2];
    let detail = format!("{median:.2?} (median of {})", took.len());
    // A request has a quarter of the ttl, and one that fails is repeated: less than ten in there is little.
    let needed = median * 40;
    if needed <= DEFAULT_LOCK_TTL {
        return Finding::ok("round trip", detail);
    }
    Finding::warning("round trip", detail).advise(format!(
        "a hold is renewed in time only with a ttl of {:.0?} or more: use one, or a nearer store",
        Duration::from_secs(needed.as_secs() + 1)
    ))
}

/// An error with its causes, as one line.
pub fn error_chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let words = next.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = next.source();
    }
    text
}

async fn probe<S: Store + ?Sized>(store: &S) -> Result<()> {
    let key = Key::new(PROBE_KEY)?;
    store.inspect(&key, KeySpace::Lock).await.map(|_| ())
}

/// Whether an error is something that the store said.
fn is_answer(error: &Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Timeout | ErrorKind::Shutdown
    )
}

/// What a store promises, in words.
fn describe_guarantees(can: &Capabilities) -> String {
    let ends = match can.liveness {
        Liveness::Lease => "its lease ends",
        Liveness::Session => "its process or connection ends",
        Liveness::Both => "its connection or its lease ends",
    };
    let next = match can.queue {
        QueueKind::Fifo => "in order of arrival",
        QueueKind::Single => "one waiter is next, the others are quickest first",
        QueueKind::None => "whoever is quickest",
    };
    let woken = if can.push { "are told" } else { "ask again and again" };
    let handoff = match can.handoff {
        Handoff::None => "",
        Handoff::Pushed => "; a holder is told that somebody waits",
        Handoff::Polled { .. } => "; a holder learns that somebody waits by asking",
    };
    let min = can.min_ttl;
    format!(
        "a dead holder is freed when {ends}; waiters {woken}, {next}{handoff}; ttl from {min:?} on"
    )
}

/// What can be asked of a store, in words.
fn describe_capabilities(can: &Capabilities) -> String {
    let there = [
        (true, "locks"),
        (can.shared, "shared locks"),
        (can.semaphore, "semaphores"),
        (can.detached, "holds without a process"),
        (can.list, "lists"),
        (can.names, "names of holders"),
        (can.evict, "breaking by hand"),
        (can.ordered_tokens, "ordered fencing tokens"),
    ];
    let words = |wanted: bool| {
        let found = there.iter().filter(|(can, _)| *can == wanted).map(|(_, word)| *word);
        found.collect::<Vec<_>>().join(", ")
    };
    let (can, cannot) = (words(true), words(false));
    if cannot.is_empty() { can } else { format!("{can}; not: {cannot}") }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;
    use crate::MemoryStore;

    #[tokio::test]
    async fn a_store_that_answers_says_what_it_promises() {
        let findings = MemoryStore::new().examine(Duration::from_secs(5)).await;
        let what: Vec<_> = findings.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(what, [REACHABLE, "round trip", "promises", "abilities"]);
        assert!(findings.iter().all(|finding| finding.level == FindingLevel::Ok), "{findings:?}");
        assert!(findings[2].detail.contains("in order of arrival"), "{findings:?}");
        assert!(findings[3].detail.contains("semaphores"), "{findings:?}");
    }

    #[tokio::test]
    async fn a_trip_that_does_not_come_back_ends_with_the_limit() {
        let limit = Duration::from_millis(30);
        let error = time_round_trips(limit, pending).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("30ms"), "{error}");
        assert!(!is_answer(&error));
    }

    #[test]
    fn a_slow_store_is_told_with_the_ttl_that_it_can_keep() {
        assert_eq!(latency(&[Duration::from_millis(3); 5]).level, FindingLevel::Ok);
        let slow = latency(&[Duration::from_millis(500); 5]);
        assert_eq!(slow.level, FindingLevel::Warning);
        assert!(slow.advice.as_ref().is_some_and(|advice| advice.contains("21s")), "{slow:?}");
    }

    #[test]
    fn an_error_is_told_with_its_causes_and_nothing_twice() {
        let error = Error::new(ErrorKind::Unavailable, "cannot connect")
            .because(Error::new(ErrorKind::Unavailable, "connection refused"));
        assert_eq!(error_chain(&error), "cannot connect: connection refused");
        let error = Error::new(ErrorKind::Unavailable, "no: refused")
            .because(Error::new(ErrorKind::Unavailable, "refused"));
        assert_eq!(error_chain(&error), "no: refused");
    }
}
