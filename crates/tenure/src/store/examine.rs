//! Self-examination of a store: reachability, guarantees, and possible problems.

use std::time::Duration;

use tenure_core::Key;
use tenure_core::table::KeySpace;

use super::capabilities::{Capabilities, Handoff, Liveness, QueueKind};
use super::contract::Store;
use super::finding::{Finding, REACHABLE};
use crate::{Clock, Error, ErrorKind, Result};

/// Key that is inspected. It is never held, and inspecting it writes nothing.
const PROBE_KEY: &str = "tenure/doctor";
/// Number of round trips that are timed.
const LATENCY_ROUNDS: usize = 5;
/// Default ttl of a lock. A store is slow if its latency is too long for this ttl.
const DEFAULT_LOCK_TTL: Duration = Duration::from_secs(15);

/// Diagnoses a store: first the checks that apply to any store, then those of this store, if it answers. Each part takes
/// at most about `limit`.
pub(crate) async fn examine(store: &dyn Store, limit: Duration) -> Vec<Finding> {
    let mut findings = basics(store, limit).await;
    if !findings.iter().any(Finding::is_unreachable) {
        findings.extend(store.examine(limit).await);
    }
    findings
}

/// Checks that apply to any store: whether and how quickly it answers, its guarantees and its capabilities.
async fn basics(store: &dyn Store, limit: Duration) -> Vec<Finding> {
    let looking = time_round_trips(limit, || probe(store)).await;
    let mut findings = match looking {
        Ok(trips) => vec![Finding::ok(REACHABLE, "the store answers"), latency(&trips)],
        Err(error) if is_answer(&error) => vec![
            Finding::ok(REACHABLE, "the store answers"),
            Finding::error("inspect", &error).advise("no lock can be acquired until this is fixed"),
        ],
        Err(error) => return vec![Finding::error(REACHABLE, &error)],
    };
    let can = store.capabilities();
    findings.push(Finding::ok("promises", describe_guarantees(&can)));
    findings.push(Finding::ok("abilities", describe_capabilities(&can)));
    findings
}

/// Durations of several sequential round trips, in ascending order. The first error ends the measurement.
///
/// # Errors
///
/// The error of a round trip, or `Unavailable` if not even the first round trip ended within `limit`.
pub(crate) async fn time_round_trips<F: Future<Output = Result<()>>>(
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

/// Finding about the latency of some round trips.
pub(crate) fn latency(took: &[Duration]) -> Finding {
    let median = took[took.len() / 2];
    let detail = format!("{median:.1?} (median of {})", took.len());
    // A request may take a quarter of the ttl, and a failed one is repeated. Fewer than ten round trips in that quarter
    // leave too few retries.
    let needed = median * 40;
    if needed <= DEFAULT_LOCK_TTL {
        return Finding::ok("round trip", detail);
    }
    Finding::warning("round trip", detail).advise(format!(
        "a hold is renewed in time only with a ttl of at least {:.0?}: use one, or a nearer store",
        Duration::from_secs(needed.as_secs() + 1)
    ))
}

async fn probe(store: &dyn Store) -> Result<()> {
    let key = Key::new(PROBE_KEY)?;
    store.inspect(&key, KeySpace::Lock).await.map(|_| ())
}

/// True if the error is an answer of the store, and not the lack of one.
fn is_answer(error: &Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Timeout | ErrorKind::Shutdown
    )
}

/// Guarantees of a store, as a sentence.
fn describe_guarantees(can: &Capabilities) -> String {
    let ends = match can.liveness {
        Liveness::Lease => "its lease ends",
        Liveness::Session => "its process or connection ends",
        Liveness::Both => "its connection or its lease ends",
    };
    let next = match can.queue {
        QueueKind::Fifo => "in order of arrival",
        QueueKind::Single => "one waiter is next, the rest in no order",
        QueueKind::None => "in no order",
    };
    let woken = if can.push { "are notified" } else { "poll" };
    let handoff = match can.handoff {
        Handoff::None => "",
        Handoff::Pushed => "; a holder is notified of waiters",
        Handoff::OnRenewal => "; a holder learns of waiters when it renews",
        Handoff::Polled { .. } => "; a holder polls for waiters",
    };
    let min = can.min_ttl;
    format!(
        "the lock of a dead holder is freed when {ends}; waiters {woken}, {next}{handoff}; ttl at least {min:?}"
    )
}

/// Capabilities of a store, as a list.
fn describe_capabilities(can: &Capabilities) -> String {
    let there = [
        (true, "locks"),
        (can.shared, "shared locks"),
        (can.semaphore, "semaphores"),
        (can.detached, "detached holds"),
        (can.list, "listing keys"),
        (can.identities, "names of holders"),
        (can.evict, "breaking holds"),
        (can.ordered_tokens, "ordered fencing tokens"),
    ];
    let words = |wanted: bool| {
        let found = there.iter().filter(|(can, _)| *can == wanted).map(|(_, word)| *word);
        found.collect::<Vec<_>>().join(", ")
    };
    let (can, cannot) = (words(true), words(false));
    if cannot.is_empty() { can } else { format!("{can}; not supported: {cannot}") }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;
    use crate::MemoryStore;
    use crate::store::FindingLevel;

    #[tokio::test]
    async fn a_store_that_answers_says_what_it_promises() {
        let findings = examine(&MemoryStore::new(), Duration::from_secs(5)).await;
        let what: Vec<_> = findings.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(what, [REACHABLE, "round trip", "promises", "abilities"]);
        assert!(findings.iter().all(|finding| finding.level == FindingLevel::Ok), "{findings:?}");
        assert!(findings[2].detail.contains("in order of arrival"), "{findings:?}");
        assert!(findings[3].detail.contains("semaphores"), "{findings:?}");
    }

    #[tokio::test]
    async fn round_trip_without_an_answer_ends_at_the_limit() {
        let limit = Duration::from_millis(30);
        let error = time_round_trips(limit, pending).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("30ms"), "{error}");
        assert!(!is_answer(&error));
    }

    #[test]
    fn latency_warning_names_the_ttl_that_the_store_can_keep() {
        assert_eq!(latency(&[Duration::from_millis(3); 5]).level, FindingLevel::Ok);
        let slow = latency(&[Duration::from_millis(500); 5]);
        assert_eq!(slow.level, FindingLevel::Warning);
        assert!(slow.advice.as_ref().is_some_and(|advice| advice.contains("21s")), "{slow:?}");
    }
}
