//! Reports of a store that is away: to the log, and to callbacks of the caller.

use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::Machine as _;
use tenure_core::outage::{Outage, OutageInput, OutageReport};

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

/// Outage of a store, from the requests of one acquisition, election or connect.
pub(crate) struct OutageMonitor {
    outage: Outage,
    clock: Clock,
    /// Subject of the reports in the log: the key and the store.
    subject: (String, String),
    reason: Option<Arc<str>>,
    callbacks: OutageCallbacks,
}

impl OutageMonitor {
    pub(crate) fn new(
        clock: Clock,
        key: impl fmt::Display,
        store: impl fmt::Display,
        callbacks: OutageCallbacks,
    ) -> Self {
        let subject = (key.to_string(), store.to_string());
        Self { outage: Outage::default(), clock, subject, reason: None, callbacks }
    }

    /// A request was sent that a working store answers at once.
    pub(crate) fn sent(&mut self) {
        self.handle(OutageInput::Sent);
    }

    /// The store has answered.
    pub(crate) fn answered(&mut self) {
        self.reason = None;
        self.handle(OutageInput::Answered);
    }

    /// A request failed, and is retried.
    pub(crate) fn failed(&mut self, error: &Error) {
        self.reason = Some(error.chain().into());
        self.handle(OutageInput::Failed);
    }

    /// Reports what is due, for as long as it is polled. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Safe to drop at any time.
    pub(crate) async fn report<T>(&mut self) -> T {
        while let Some(due) = self.outage.poll_timeout() {
            self.clock.sleep_until(due).await;
            self.outage.handle_timeout(self.clock.now());
            self.publish();
        }
        pending().await
    }

    fn handle(&mut self, input: OutageInput) {
        self.outage.handle(input, self.clock.now());
        self.publish();
    }

    fn publish(&mut self) {
        while let Some(report) = self.outage.poll_command() {
            let (key, store) = &self.subject;
            let report = match report {
                OutageReport::Away(lasts) => {
                    let away_ms = u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX);
                    let error = self.reason.as_deref();
                    tracing::warn!(name: "tenure.store_away", key, store, away_ms, error);
                    StoreOutage::Away { lasts, reason: self.reason.clone() }
                }
                OutageReport::Back(after) => {
                    let away_ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
                    tracing::info!(name: "tenure.store_back", key, store, away_ms);
                    StoreOutage::Back { after }
                }
            };
            for callback in &self.callbacks.0 {
                callback(&report);
            }
        }
    }
}
