//! Reports of a store that is away: to the log, and to callbacks of the caller.

use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tenure_core::acquire::RequestFailure;
use tenure_core::outage::{Outage, OutageInput, OutageReport};
use tenure_core::{Machine as _, Time};
use tokio::sync::Notify;

use crate::mutex::Mutex;
use crate::race::{Either, before, race};
use crate::telemetry::StoreAway;
use crate::{Clock, Error, ErrorKind, Result};

/// First pause between two attempts to connect. Each further pause is twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between two attempts to connect.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Time that an attempt to connect gets even if the caller waits for less: a healthy store needs some time, too.
const SHORTEST_ATTEMPT: Duration = Duration::from_secs(1);

/// Report that a store is away, or is back.
///
/// A store counts as away if it cannot be reached, does not answer, refuses for a limit, or elects a leader. It also
/// does if it answers, but fails every request with an error that may end by itself. Requests
/// are retried meanwhile. The first report comes within two seconds, a further one every 30 s.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreOutage {
    /// The store is away.
    #[non_exhaustive]
    Away {
        /// Time since the first request that was not answered.
        lasts: Duration,
        /// Error of the last request with its causes; `None` if it has not failed yet.
        reason: Option<Arc<str>>,
        /// True if the store can be reached and answers with an error: it is read-only, for instance.
        answers: bool,
    },
    /// The store answers again.
    #[non_exhaustive]
    Back {
        /// Time for which it was away.
        after: Duration,
    },
}

impl fmt::Display for StoreOutage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Away { lasts, reason: Some(reason), answers: true } => {
                write!(f, "requests to the store have failed for {lasts:.0?}, retrying: {reason}")
            }
            Self::Away { lasts, reason: Some(reason), .. } => {
                write!(f, "the store has been away for {lasts:.0?}, retrying: {reason}")
            }
            Self::Away { lasts, reason: None, .. } => {
                write!(f, "the store has not answered for {lasts:.0?}, waiting")
            }
            Self::Back { after } => write!(f, "the store is back after {after:.0?}"),
        }
    }
}

/// Callbacks for reports of outages.
#[derive(Clone, Default)]
pub(crate) struct OutageCallbacks(Vec<Arc<OnOutage>>);

type OnOutage = dyn Fn(&StoreOutage) + Send + Sync;

impl OutageCallbacks {
    pub(crate) fn push(&mut self, f: impl Fn(&StoreOutage) + Send + Sync + 'static) {
        self.0.push(Arc::new(f));
    }
}

impl fmt::Debug for OutageCallbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} callbacks", self.0.len())
    }
}

/// Outage of a store, as the requests of one acquisition, election, queue of jobs or connect see it. Clones share it.
#[derive(Clone)]
pub(crate) struct OutageMonitor(Arc<SharedOutage>);

struct SharedOutage {
    clock: Clock,
    /// Key and store, for the log.
    subject: (String, String),
    callbacks: OutageCallbacks,
    state: Mutex<OutageState>,
    /// An outage may have begun: the time of the next report is known now.
    begun: Notify,
}

#[derive(Default)]
struct OutageState {
    outage: Outage,
    /// Error of the last request, with its causes.
    reason: Option<Arc<str>>,
    /// That error is an answer of the store.
    store_answers: bool,
    /// Entry in the metrics, from the first report of an outage to its end.
    counted: Option<StoreAway>,
}

impl OutageMonitor {
    pub(crate) fn new(
        clock: Clock,
        key: impl fmt::Display,
        store: impl fmt::Display,
        callbacks: OutageCallbacks,
    ) -> Self {
        let (subject, state) = ((key.to_string(), store.to_string()), Mutex::default());
        Self(Arc::new(SharedOutage { clock, subject, callbacks, state, begun: Notify::new() }))
    }

    /// A request was sent that a working store answers at once.
    pub(crate) fn sent(&self) {
        self.update(|outage, now| outage.outage.handle(OutageInput::Sent, now));
    }

    /// The store has answered.
    pub(crate) fn answered(&self) {
        self.update(|outage, now| {
            outage.reason = None;
            outage.outage.handle(OutageInput::Answered, now);
        });
    }

    /// A request failed, and is retried.
    pub(crate) fn failed(&self, error: &Error) {
        self.handle_failure(error, OutageInput::Failed);
    }

    fn handle_failure(&self, error: &Error, input: OutageInput) {
        self.update(|outage, now| {
            outage.reason = Some(error.chain().into());
            outage.store_answers = error.is_answer();
            outage.outage.handle(input, now);
        });
    }

    /// Forgets the outage without a report: the store is no longer needed.
    pub(crate) fn clear(&self) {
        *self.state() = OutageState::default();
    }

    /// Takes the result of a request that is retried unless it was refused for good.
    pub(crate) fn ended<T>(&self, result: &Result<T>) {
        match result {
            Err(error) if error.failure() != RequestFailure::Permanent => self.failed(error),
            // A refusal is an answer of the store, too.
            Ok(_) | Err(_) => self.answered(),
        }
    }

    /// Takes the result of a request of another kind than those that are retried until they succeed.
    #[cfg(feature = "jobs")]
    pub(crate) fn ended_beside<T>(&self, result: &Result<T>) {
        match result {
            Err(error) if error.failure() != RequestFailure::Permanent => {
                self.handle_failure(error, OutageInput::FailedBeside);
            }
            Ok(_) | Err(_) => {
                self.update(|outage, now| outage.outage.handle(OutageInput::AnsweredBeside, now));
            }
        }
    }

    /// Reports what is due, for as long as it is polled. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub(crate) async fn report(&self) -> Infallible {
        loop {
            // Before the state is read: a request of another task may begin an outage in between.
            let begun = self.0.begun.notified();
            let due = self.state().outage.poll_timeout().unwrap_or(Time::MAX);
            if let Either::Second(()) = race(begun, self.0.clock.sleep_until(due)).await {
                self.update(|outage, now| outage.outage.handle_timeout(now));
            }
        }
    }

    /// Connects to a store, with a new attempt while it is away, for up to `limit`. An attempt that hangs is given up
    /// then.
    ///
    /// # Cancel safety
    ///
    /// As safe as `attempt`.
    pub(crate) async fn connect<T, F: Future<Output = Result<T>>>(
        &self,
        limit: Duration,
        mut attempt: impl FnMut() -> F,
    ) -> Result<T> {
        let clock = &self.0.clock;
        let begun = clock.now();
        let mut pause = FIRST_PAUSE;
        let mut last_error = None;
        loop {
            self.sent();
            // On the heap: the future of a store that connects is large.
            let attempt = race(Box::pin(attempt()), self.report());
            let limit = limit.max(SHORTEST_ATTEMPT);
            let opened = match before(clock, begun + limit, attempt).await {
                Some(Either::First(opened)) => opened,
                Some(Either::Second(never)) => match never {},
                // The error of the attempt before says more.
                None => Err(last_error.take().unwrap_or_else(|| {
                    Error::new(ErrorKind::Unavailable, "the store does not answer")
                })),
            };
            self.ended(&opened);
            let error = match opened {
                Err(error) if error.failure() != RequestFailure::Permanent => error,
                opened => return opened,
            };
            let now = clock.now();
            let waited = now.since(begun);
            if waited >= limit {
                return Err(Error::away(waited, error));
            }
            last_error = Some(error);
            let end = now + pause.min(limit.saturating_sub(waited));
            before(clock, end, self.report()).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn update(&self, change: impl FnOnce(&mut OutageState, Time)) {
        let (reports, begun) = {
            let mut state = self.state();
            let answering = state.outage.poll_timeout().is_none();
            change(&mut state, self.0.clock.now());
            let reports: Vec<StoreOutage> = std::iter::from_fn(|| state.next_report()).collect();
            match reports.last() {
                Some(StoreOutage::Away { .. }) => {
                    state.counted.get_or_insert_with(|| StoreAway::new(&self.0.subject.1));
                }
                Some(StoreOutage::Back { .. }) => state.counted = None,
                None => {}
            }
            (reports, answering && state.outage.poll_timeout().is_some())
        };
        if begun {
            self.0.begun.notify_waiters();
        }
        for report in reports {
            self.log(&report);
            for callback in &self.0.callbacks.0 {
                callback(&report);
            }
        }
    }

    fn log(&self, report: &StoreOutage) {
        let (key, store) = &self.0.subject;
        let millis = |time: &Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        match report {
            StoreOutage::Away { lasts, reason, .. } => {
                let (away_ms, error) = (millis(lasts), reason.as_deref());
                tracing::warn!(name: "tenure.store_away", key, store, away_ms, error);
            }
            StoreOutage::Back { after } => {
                tracing::info!(name: "tenure.store_back", key, store, away_ms = millis(after));
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, OutageState> {
        self.0.state.lock()
    }
}

impl fmt::Debug for OutageMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OutageMonitor")
    }
}

impl OutageState {
    fn next_report(&mut self) -> Option<StoreOutage> {
        Some(match self.outage.poll_command()? {
            OutageReport::Away(lasts) => {
                let (reason, answers) = (self.reason.clone(), self.store_answers);
                StoreOutage::Away { lasts, reason, answers }
            }
            OutageReport::Back(after) => StoreOutage::Back { after },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;
    use crate::ErrorKind;

    #[tokio::test]
    async fn a_failure_in_another_task_is_reported_by_a_report_that_already_waits() {
        let (clock, hand) = Clock::manual();
        let reports = Arc::new(Mutex::new(Vec::new()));
        let (told, mut callbacks) = (Arc::clone(&reports), OutageCallbacks::default());
        callbacks.push(move |outage| told.lock().push(outage.clone()));
        let monitor = OutageMonitor::new(clock, "key", "store", callbacks);
        let mut reporting = pin!(monitor.report());
        let step = async |reporting: &mut std::pin::Pin<&mut _>| {
            let task = async {
                for _ in 0..50 {
                    tokio::task::yield_now().await;
                }
            };
            assert!(matches!(race(reporting, task).await, Either::Second(())));
        };
        step(&mut reporting).await;
        monitor.failed(&Error::new(ErrorKind::Unavailable, "no answer"));
        step(&mut reporting).await;
        assert_eq!(reports.lock().len(), 0);
        hand.advance(tenure_core::outage::FIRST_REPORT_AFTER);
        step(&mut reporting).await;
        assert!(matches!(reports.lock()[..], [StoreOutage::Away { .. }]));
    }
}
