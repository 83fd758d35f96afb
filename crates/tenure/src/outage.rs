//! Reports of a store that is away: to the log, and to callbacks of the caller.

use std::convert::Infallible;
use std::fmt;
use std::future::pending;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tenure_core::outage::{Outage, OutageInput, OutageReport};
use tenure_core::{Machine as _, Time};

use crate::mutex::Mutex;
use crate::{Clock, Error};

/// Report that a store is away, or is back.
///
/// A store counts as away if it cannot be reached, does not answer, refuses for a limit, or elects a leader. Requests
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
            Self::Away { lasts, reason: Some(reason) } => {
                write!(f, "the store has been away for {lasts:.0?}, retrying: {reason}")
            }
            Self::Away { lasts, reason: None } => {
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

/// Outage of a store, as the requests of one acquisition, election or connect see it. Clones share it.
#[derive(Clone)]
pub(crate) struct OutageMonitor(Arc<SharedOutage>);

struct SharedOutage {
    clock: Clock,
    /// Key and store, for the log.
    subject: (String, String),
    callbacks: OutageCallbacks,
    state: Mutex<OutageState>,
}

#[derive(Default)]
struct OutageState {
    outage: Outage,
    /// Error of the last request, with its causes.
    reason: Option<Arc<str>>,
}

impl OutageMonitor {
    pub(crate) fn new(
        clock: Clock,
        key: impl fmt::Display,
        store: impl fmt::Display,
        callbacks: OutageCallbacks,
    ) -> Self {
        let (subject, state) = ((key.to_string(), store.to_string()), Mutex::default());
        Self(Arc::new(SharedOutage { clock, subject, callbacks, state }))
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
        self.update(|outage, now| {
            outage.reason = Some(error.chain().into());
            outage.outage.handle(OutageInput::Failed, now);
        });
    }

    /// Forgets the outage without a report: the store is no longer needed.
    pub(crate) fn clear(&self) {
        *self.state() = OutageState::default();
    }

    /// Reports what is due, for as long as it is polled. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub(crate) async fn report(&self) -> Infallible {
        loop {
            let due = self.state().outage.poll_timeout();
            let Some(due) = due else { return pending().await };
            self.0.clock.sleep_until(due).await;
            self.update(|outage, now| outage.outage.handle_timeout(now));
        }
    }

    fn update(&self, change: impl FnOnce(&mut OutageState, Time)) {
        let reports: Vec<StoreOutage> = {
            let mut state = self.state();
            change(&mut state, self.0.clock.now());
            std::iter::from_fn(|| state.next_report()).collect()
        };
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
            StoreOutage::Away { lasts, reason } => {
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
            OutageReport::Away(lasts) => StoreOutage::Away { lasts, reason: self.reason.clone() },
            OutageReport::Back(after) => StoreOutage::Back { after },
        })
    }
}
