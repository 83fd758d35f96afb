//! What is written down before it is said, and what is found written down at the start.

use std::hash::RandomState;
use std::time::Duration;

use tenure_core::table::{Grant, KeySpace, Mode, Owner};
use tenure_core::{LockTable, LockToken, Time};

use super::{Engine, HistoryEventKind};
use crate::Settings;
use crate::journal::{Journal, JournalError, OpenedJournal};
use crate::token_mint::TokenMint;

/// How often the bound is lowered that a crash of the machine would make everybody wait for.
const BOUND_SHRINK_INTERVAL: Duration = Duration::from_secs(600);

/// The journal of a server that has one.
#[derive(Debug)]
pub(super) struct JournalSink {
    journal: Option<Journal>,
    shrink_bound_at: Time,
}

impl JournalSink {
    pub(super) const NONE: Self = Self { journal: None, shrink_bound_at: Time::MAX };
}

impl Engine {
    /// A server that goes on where the last one with its data directory stopped.
    ///
    /// # Errors
    ///
    /// The key of a hold that contradicts another: the directory was not written by a server.
    pub fn resume_from(
        settings: Settings,
        secret: Option<&[u8]>,
        opened: OpenedJournal,
        now: Time,
    ) -> Result<Self, Box<[u8]>> {
        let OpenedJournal { journal, holds, next_number, embargo_until, instance, .. } = opened;
        let mut engine = Self::new(settings, secret, instance, next_number);
        for hold in holds {
            let restored = engine.table.restore(&hold.key, hold.mode, hold.token, hold.ends, now);
            restored.map_err(|_| hold.key)?;
            engine.claims.note(hold.token.number(), &hold.note);
        }
        if let Some(until) = embargo_until {
            engine.table.embargo_until(until);
        }
        engine.journal_sink =
            JournalSink { journal: Some(journal), shrink_bound_at: now + BOUND_SHRINK_INTERVAL };
        Ok(engine)
    }

    /// Whether what is granted is written down, and survives a restart.
    pub fn is_durable(&self) -> bool {
        self.journal_sink.journal.is_some()
    }

    /// Writes down what was granted since the last time. Nothing may be sent before.
    ///
    /// # Errors
    ///
    /// What stood in the way. The server must then stop, and send nothing more.
    pub fn commit(&mut self) -> Result<(), JournalError> {
        let Some(journal) = &mut self.journal_sink.journal else { return Ok(()) };
        journal.commit()?;
        if let Some(error) = journal.take_background_error() {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(target: "tenure::server", error, "journal_trouble");
        }
        Ok(())
    }

    /// Writes down all there is, for a server that stops: whoever still holds something finds it held again.
    ///
    /// # Errors
    ///
    /// What stood in the way; the next server then starts as after a kill.
    pub fn close(self, now: Time) -> Result<(), JournalError> {
        self.journal_sink.journal.map_or(Ok(()), |journal| journal.close(now))
    }

    /// A hold was granted to `owner`, or to who `by` says it is.
    pub(super) fn record_grant(
        &mut self,
        key: &[u8],
        mode: Mode,
        grant: &Grant,
        (by, owner): (&[u8], Owner),
        now: Time,
    ) {
        if let Some(journal) = &mut self.journal_sink.journal {
            journal.granted(key, mode, grant.token, grant.lease, grant.ends, by);
        }
        let number = grant.token.number();
        self.record_history(
            (mode.space(), key),
            HistoryEventKind::Granted,
            number,
            by,
            Some(owner),
            now,
        );
    }

    pub(super) fn record_renewal(&mut self, token: LockToken, lease: Duration, ends: Time) {
        if let Some(journal) = &mut self.journal_sink.journal {
            journal.renewed(token.number(), lease, ends);
        }
    }

    pub(super) fn record_end(
        &mut self,
        of: (KeySpace, &[u8]),
        number: u64,
        how: HistoryEventKind,
        now: Time,
    ) {
        if let Some(journal) = &mut self.journal_sink.journal {
            journal.ended(number);
        }
        if self.history.is_enabled() {
            let reason = std::mem::take(&mut self.history.reason);
            let text = if how == HistoryEventKind::Broken { &*reason } else { "" };
            self.history.add(of, how, number, text, now);
        }
    }

    /// Now and then, lets the bound shrink to what still runs.
    pub(super) fn shrink_lease_bound(&mut self, now: Time) {
        if now < self.journal_sink.shrink_bound_at {
            return;
        }
        self.journal_sink.shrink_bound_at = now + BOUND_SHRINK_INTERVAL;
        let last = last_end(&self.table);
        let Some(journal) = &mut self.journal_sink.journal else { return };
        // A journal that fails here fails every commit from now on, and the next one says so.
        if let Err(error) = journal.shrink_bound(last, now) {
            let error: &dyn std::error::Error = &error;
            tracing::error!(target: "tenure::server", error, "journal_failed");
        }
    }
}

fn last_end(table: &LockTable<RandomState, TokenMint>) -> Time {
    table.holds().map(|hold| hold.ends).max().unwrap_or(Time::ZERO)
}
