//! Records of every change: the journal, which survives a restart, and the history of keys for operators.

use std::time::Duration;

use tenure_core::Time;
use tenure_core::table::{Ending, KeySpace, Owner, TableEvent};

use super::history::{History, HistoryEventKind};
use super::locks::LockEvent;
use crate::journal::{Journal, JournalError};

/// Interval at which the journal's lease bound is lowered. The bound is the time for which the server grants nothing
/// after a machine crash.
const BOUND_SHRINK_INTERVAL: Duration = Duration::from_secs(600);

/// Journal and history.
#[derive(Debug)]
pub(super) struct Audit {
    /// `None` without a data directory.
    journal: Option<Journal>,
    shrink_bound_at: Time,
    history: History,
}

impl Audit {
    /// Without a journal and a history.
    pub(super) fn new() -> Self {
        Self { journal: None, shrink_bound_at: Time::MAX, history: History::default() }
    }

    pub(super) fn keep_journal(&mut self, journal: Journal, now: Time) {
        self.journal = Some(journal);
        self.shrink_bound_at = now + BOUND_SHRINK_INTERVAL;
    }

    pub(super) fn has_journal(&self) -> bool {
        self.journal.is_some()
    }

    pub(super) fn keep_history(&mut self, max_events: usize, origin: u64, saved: &str) {
        self.history.enable(max_events, origin);
        self.history.add_json_lines(saved);
    }

    /// The history, to read.
    pub(super) fn history(&self) -> &History {
        &self.history
    }

    /// Records a change. `identity` names the client of a connection, for a claim that came without a name.
    pub(super) fn record(
        &mut self,
        event: &LockEvent,
        identity: impl FnOnce(Owner) -> String,
        now: Time,
    ) {
        if let Some(journal) = &mut self.journal {
            write_to_journal(journal, event);
        }
        if self.history.is_enabled() {
            self.add_to_history(event, identity, now);
        }
    }

    /// Records that an operator asked the holder to release.
    pub(super) fn record_handoff_request(
        &mut self,
        key: (KeySpace, &[u8]),
        number: u64,
        reason: &str,
        now: Time,
    ) {
        self.history.add(key, HistoryEventKind::HandoffRequested, number, reason, now);
    }

    /// Writes what was recorded since the last commit to the journal.
    pub(super) fn commit(&mut self) -> Result<(), JournalError> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        journal.commit()?;
        if let Some(error) = journal.take_background_error() {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(target: "tenure::server", error, "journal_trouble");
        }
        Ok(())
    }

    /// Closes the journal cleanly.
    pub(super) fn close(self, now: Time) -> Result<(), JournalError> {
        self.journal.map_or(Ok(()), |journal| journal.close(now))
    }

    /// Lowers the journal's lease bound to the longest remaining lease, every [`BOUND_SHRINK_INTERVAL`].
    pub(super) fn shrink_lease_bound(&mut self, last_end: impl FnOnce() -> Time, now: Time) {
        if now < self.shrink_bound_at {
            return;
        }
        self.shrink_bound_at = now + BOUND_SHRINK_INTERVAL;
        let Some(journal) = &mut self.journal else { return };
        // A journal that fails here also fails the next commit, which stops the server: logging is enough.
        if let Err(error) = journal.shrink_bound(last_end(), now) {
            let error: &dyn std::error::Error = &error;
            tracing::error!(target: "tenure::server", error, "journal_failed");
        }
    }

    fn add_to_history(
        &mut self,
        event: &LockEvent,
        identity: impl FnOnce(Owner) -> String,
        now: Time,
    ) {
        let claimant = |owner: Owner| match &event.claim {
            Some(claim) if !claim.by.is_empty() => String::from_utf8_lossy(&claim.by).into_owned(),
            claim => identity(claim.as_ref().map_or(owner, |claim| claim.from)),
        };
        let (space, key, kind, number, text) = match &event.change {
            TableEvent::Granted { owner, space, key, grant, .. } => {
                let number = grant.token.number();
                (*space, key, HistoryEventKind::Granted, number, claimant(*owner))
            }
            TableEvent::Queued { owner, space, key, .. } => {
                (*space, key, HistoryEventKind::Waiting, 0, claimant(*owner))
            }
            TableEvent::Left { owner, space, key, .. } => {
                (*space, key, HistoryEventKind::GaveUp, 0, claimant(*owner))
            }
            TableEvent::Ended { how, space, key, token, .. } => {
                let reason = event.reason.as_deref().unwrap_or_default();
                let text = String::from_utf8_lossy(reason).into_owned();
                (*space, key, HistoryEventKind::from(*how), token.number(), text)
            }
            TableEvent::Renewed { .. }
            | TableEvent::Detached { .. }
            | TableEvent::HandoffRequested { .. } => return,
        };
        self.history.add((space, key), kind, number, &text, now);
    }
}

/// The only writer of grants, renewals and ends.
fn write_to_journal(journal: &mut Journal, event: &LockEvent) {
    match &event.change {
        TableEvent::Granted { key, mode, grant, .. } => {
            let by = event.claim.as_ref().map_or(&[][..], |claim| &claim.by);
            journal.granted(key, *mode, grant.token, grant.lease, grant.ends, by);
        }
        TableEvent::Renewed { token, lease, ends, .. } => {
            journal.renewed(token.number(), *lease, *ends);
        }
        TableEvent::Ended { token, .. } => journal.ended(token.number()),
        // Waiters are not journaled: they claim again. The owner of a hold ends with the process.
        TableEvent::Detached { .. }
        | TableEvent::Queued { .. }
        | TableEvent::Left { .. }
        | TableEvent::HandoffRequested { .. } => {}
    }
}

impl From<Ending> for HistoryEventKind {
    fn from(how: Ending) -> Self {
        match how {
            Ending::Released => Self::Released,
            Ending::Expired => Self::Expired,
            Ending::Evicted => Self::Broken,
            Ending::Disconnected => Self::Disconnected,
            Ending::Abandoned => Self::Abandoned,
        }
    }
}
