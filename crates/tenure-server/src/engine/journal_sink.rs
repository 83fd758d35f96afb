//! The engine's journal: grants are recorded before their replies are sent, and restored at the next start.

use std::hash::RandomState;
use std::time::Duration;

use tenure_core::table::{Grant, KeySpace, Mode, Owner};
use tenure_core::{LockTable, LockToken, Time};

use super::{Engine, HistoryEventKind};
use crate::Settings;
use crate::journal::{Journal, JournalError, OpenedJournal};
use crate::token_mint::TokenMint;

/// Interval at which the journal's lease bound is lowered. The bound is the time for which the server grants nothing
/// after a machine crash.
const BOUND_SHRINK_INTERVAL: Duration = Duration::from_secs(600);

/// The journal, if the server has a data directory.
#[derive(Debug)]
pub(super) struct JournalSink {
    journal: Option<Journal>,
    shrink_bound_at: Time,
}

impl JournalSink {
    pub(super) const NONE: Self = Self { journal: None, shrink_bound_at: Time::MAX };
}

impl Engine {
    /// Creates a server with the holds and the fencing numbers of a data directory.
    ///
    /// # Errors
    ///
    /// Two holds of the directory conflict, which no server can have written. The error is the key of one of them.
    pub fn restore(
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
            engine.claims.add_restored_identity(hold.token.number(), &hold.note);
        }
        // After the holds: they were granted before the embargo and stay valid. Only new grants have to wait.
        if let Some(until) = embargo_until {
            engine.table.embargo_until(until);
        }
        engine.journal_sink =
            JournalSink { journal: Some(journal), shrink_bound_at: now + BOUND_SHRINK_INTERVAL };
        Ok(engine)
    }

    /// True if grants are journaled and survive a restart.
    pub fn is_durable(&self) -> bool {
        self.journal_sink.journal.is_some()
    }

    /// Writes the grants, renewals and ends since the last commit to the journal.
    ///
    /// To be called before output is sent. A restarted server does not know a grant that was sent but not journaled,
    /// and could grant the key to a second client.
    ///
    /// # Errors
    ///
    /// The journal cannot be written. The server must stop and send nothing more.
    pub fn commit(&mut self) -> Result<(), JournalError> {
        let Some(journal) = &mut self.journal_sink.journal else { return Ok(()) };
        journal.commit()?;
        if let Some(error) = journal.take_background_error() {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(target: "tenure::server", error, "journal_trouble");
        }
        Ok(())
    }

    /// Closes the journal cleanly, for a server that stops. The next server restores the remaining holds.
    ///
    /// # Errors
    ///
    /// The journal cannot be written. The next server then starts as after a kill.
    pub fn close(self, now: Time) -> Result<(), JournalError> {
        self.journal_sink.journal.map_or(Ok(()), |journal| journal.close(now))
    }

    /// Records a grant in the journal and in the key's history. `by` is the identity that the client sent with the
    /// claim. If it is empty, the history shows the identity of the connection `owner`.
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
        key: (KeySpace, &[u8]),
        number: u64,
        kind: HistoryEventKind,
        now: Time,
    ) {
        if let Some(journal) = &mut self.journal_sink.journal {
            journal.ended(number);
        }
        if self.history.is_enabled() {
            let reason = std::mem::take(&mut self.history.break_reason);
            let text = if kind == HistoryEventKind::Broken { &*reason } else { "" };
            self.history.add(key, kind, number, text, now);
        }
    }

    /// Lowers the journal's lease bound to the longest remaining lease, every [`BOUND_SHRINK_INTERVAL`].
    pub(super) fn shrink_lease_bound(&mut self, now: Time) {
        if now < self.journal_sink.shrink_bound_at {
            return;
        }
        self.journal_sink.shrink_bound_at = now + BOUND_SHRINK_INTERVAL;
        let last_end = last_end(&self.table);
        let Some(journal) = &mut self.journal_sink.journal else { return };
        // A journal that fails here also fails the next commit, which stops the server: logging is enough.
        if let Err(error) = journal.shrink_bound(last_end, now) {
            let error: &dyn std::error::Error = &error;
            tracing::error!(target: "tenure::server", error, "journal_failed");
        }
    }
}

/// Latest end of a lease of the present holds.
fn last_end(table: &LockTable<RandomState, TokenMint>) -> Time {
    table.holds().map(|hold| hold.ends).max().unwrap_or(Time::ZERO)
}
