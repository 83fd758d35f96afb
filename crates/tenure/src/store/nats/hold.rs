//! A hold: an entry in its key's record. Renewal and release rewrite that record.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::record::{Renewal, WriteFate};
use tenure_core::{FencingToken, Key, Time};

use super::api::{ApiDeadline, WriteOutcome};
use super::format::KeyRecord;
use super::inner::{NatsInner, as_unknown};
use super::keys::KnownKey;
use super::layout::BucketLayout;
use super::{queue, stream};
use crate::store::{Handle, Hold, HoldEvent, KeySpace, Renewed};
use crate::{Error, ErrorKind, Result};

pub(super) struct NatsHold {
    pub(super) inner: Arc<NatsInner>,
    pub(super) key: Key,
    pub(super) space: KeySpace,
    pub(super) subject: String,
    pub(super) claim: u128,
    pub(super) token: FencingToken,
    /// Sequence of the last record in which we saw our hold.
    pub(super) sequence: u64,
    /// That record.
    pub(super) record: KeyRecord,
    /// Number of the connection over which we saw it.
    pub(super) connection: u64,
    /// Start of the hold.
    pub(super) held_since: Time,
    /// Place in the ticket queue that was granted. Its ticket is deleted on release.
    pub(super) place: Option<u64>,
}

/// Change to the record of a hold.
#[derive(Clone, Copy, Debug)]
enum NatsHoldChange {
    Renew { ttl: Duration },
    Release,
}

impl NatsHold {
    /// Rewrites the record, with one retry.
    ///
    /// The retry starts from the leader's record: another holder of the same record, or an earlier request of ours, may
    /// have written in between.
    async fn change(&mut self, change: NatsHoldChange, limit: Duration) -> Result<()> {
        let until = self.inner.api.deadline_after(limit);
        self.catch_up();
        for _ in 0..2 {
            // A server that crashed may have lost the record, and given its sequence again to a record of another
            // holder: our write would replace that one. So after a reconnect the record is read first.
            if self.connection != self.inner.api.connections() {
                self.reread(until, None).await?;
            }
            let connection = self.connection;
            let next = self.next_record(change).ok_or_else(|| self.not_held())?;
            let written_count = next.holder(self.claim).map(|holder| holder.renewal_count);
            // Before the write: if this future is dropped while it is in flight, it may still land.
            self.inner.attempted.fetch_max(written_count.unwrap_or(0), Ordering::AcqRel);
            let write_until = self.inner.write_deadline(until);
            let put = self.inner.put(&self.subject, self.sequence, next, write_until).await;
            let unclear = match put.map_err(|error| self.explain(error))? {
                (WriteOutcome::Done(_), known) => {
                    (self.sequence, self.record) = (known.sequence, known.record);
                    return self.check_connection(change, connection);
                }
                (WriteOutcome::Conflict, _) => None,
                (WriteOutcome::Unclear(error), _) => Some(error),
            };
            let old_sequence = self.sequence;
            self.reread(until, unclear.as_ref()).await?;
            let Some(error) = unclear else { continue };
            let record = &self.record;
            match record.fate_of_change(self.claim, written_count, self.sequence, old_sequence) {
                WriteFate::Landed => return self.check_connection(change, connection),
                WriteFate::Unsettled => return Err(self.explain(as_unknown(error))),
                WriteFate::Refused => {}
            }
        }
        let message = "other holders changed the shared record each time: try again";
        Err(self.explain(Error::new(ErrorKind::Unavailable, message)))
    }

    /// Refuses to count a renewal that was written on condition of a record seen over `connection`, and may have been
    /// sent over a later one: it may have replaced the record of another holder. The next renewal reads the record
    /// over the present connection. A release counts in any case.
    fn check_connection(&self, change: NatsHoldChange, connection: u64) -> Result<()> {
        match change {
            NatsHoldChange::Renew { .. } if self.inner.api.connections() != connection => {
                let message = "the connection was replaced while the renewal was written";
                Err(self.explain(Error::new(ErrorKind::Unknown, message)))
            }
            _ => Ok(()),
        }
    }

    fn next_record(&self, change: NatsHoldChange) -> Option<KeyRecord> {
        match change {
            NatsHoldChange::Renew { ttl } => {
                let held_for = self.inner.now().since(self.held_since);
                // nlock's records have no room for it.
                let native = self.inner.layout == BucketLayout::Native;
                let number = native.then_some(self.token.number());
                let attempted = self.inner.attempted.load(Ordering::Acquire);
                let renewal = Renewal { number, attempted, lease: ttl, held_for };
                self.record.renew(self.claim, self.sequence, renewal)
            }
            NatsHoldChange::Release => self.record.release(self.claim, self.sequence),
        }
    }

    /// Continues from the newest record that this process has seen, if our hold is in it. That saves a refused write
    /// when other holders share the record.
    fn catch_up(&mut self) {
        let ours = self.record.holder(self.claim).is_some();
        if let Some(known) = self.inner.keys.known(&self.subject)
            && ours
            && known.sequence > self.sequence
            && known.connection == self.connection
            && known.record.holder(self.claim).is_some()
        {
            (self.sequence, self.record) = (known.sequence, known.record);
        }
    }

    /// Reads the record from the leader. If that fails after an unclear write, the outcome of that write is unknown.
    async fn reread(&mut self, until: ApiDeadline, unclear: Option<&Error>) -> Result<()> {
        let found = self.inner.read(&self.subject, until).await;
        let found = found.map_err(|error| match (unclear, error.kind()) {
            // A value that is not a record does not contain our hold.
            (_, ErrorKind::Misconfigured) => self.not_held(),
            (Some(_), _) => self.explain(as_unknown(error)),
            (None, _) => self.explain(error),
        })?;
        self.connection = found.connection;
        (self.sequence, self.record) = (found.sequence, found.record);
        Ok(())
    }

    fn not_held(&self) -> Error {
        self.explain(Error::new(
            ErrorKind::NotHeld,
            "the hold has ended: another client took it over, or it was removed",
        ))
    }

    fn explain(&self, error: Error) -> Error {
        error.on(&self.key).at(&*self.inner)
    }
}

#[async_trait]
impl Hold for NatsHold {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        self.inner.check_ttl(ttl).map_err(|error| self.explain(error))?;
        let until = self.inner.api.deadline_after(limit);
        let renewed = self.change(NatsHoldChange::Renew { ttl }, limit).await;
        // A bucket that was edited so that it drops records may admit another holder at any moment, even right after a
        // successful renewal: the hold is lost. Settings that cannot be read prove nothing, and are read again with the
        // next renewal.
        if let Err(error) = self.inner.recheck_settings(until).await
            && error.kind() == ErrorKind::Misconfigured
        {
            let (key, store) = (&self.key, &self.inner);
            tracing::warn!(name: "tenure.bucket_unfit", %key, %store, %error, "the bucket is unfit: the hold is lost");
            return Err(self.explain(Error::new(ErrorKind::NotHeld, error.to_string())));
        }
        renewed?;
        if self.inner.layout != BucketLayout::Native {
            let until = self.inner.api.deadline_after(limit);
            let info = stream::info(&self.inner.api, &self.inner.stream, until).await;
            let checked =
                info.map_err(Error::from).and_then(|info| self.inner.check_bucket_ttl(&info));
            checked.map_err(|error| self.explain(error))?;
        }
        Ok(Renewed { handoff_requested: false })
    }

    async fn check_handoff(&mut self, _limit: Duration) -> Result<bool> {
        Ok(false)
    }

    async fn event(&mut self) -> HoldEvent {
        std::future::pending().await
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        let until = self.inner.api.deadline_after(limit);
        self.change(NatsHoldChange::Release, limit).await?;
        if let Some(place) = self.place.take() {
            let ticket = queue::ticket_subject(&self.inner, &self.key, self.space, self.claim);
            let (sequence, record) = (self.sequence, self.record.clone());
            let released = KnownKey { sequence, record, ..KnownKey::default() };
            // After the write that released the hold: `hand_over` says why.
            queue::hand_over(&self.inner, &ticket, place, &released, until).await;
        }
        Ok(())
    }

    fn handle(&self) -> Option<Handle> {
        let native = self.inner.layout == BucketLayout::Native;
        native.then(|| write_handle(self.space, self.claim, self.token))
    }

    fn revision(&self) -> Option<u64> {
        Some(self.sequence)
    }

    async fn detach(&mut self, _limit: Duration) -> Result<()> {
        Ok(())
    }
}

impl fmt::Debug for NatsHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsHold")
            .field("key", &self.key)
            .field("token", &self.token)
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

/// Handle that identifies a hold to other processes: its key space, claim and token.
fn write_handle(space: KeySpace, claim: u128, token: FencingToken) -> Handle {
    let space = match space {
        KeySpace::Lock => 'l',
        KeySpace::Semaphore => 's',
    };
    Handle::new(format!("{space}{claim:032x}{:032x}", token.as_u128()))
}

pub(super) fn read_handle(handle: &Handle) -> Option<(KeySpace, u128, FencingToken)> {
    let text = handle.expose();
    let space = match text.get(..1)? {
        "l" => KeySpace::Lock,
        "s" => KeySpace::Semaphore,
        _ => return None,
    };
    if text.len() != 65 || !text[1..].bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let number = |part: &str| u128::from_str_radix(part, 16).ok();
    Some((space, number(&text[1..33])?, FencingToken::from_u128(number(&text[33..])?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_read_back_from_its_text() {
        let token = FencingToken::new(7, 9);
        for space in [KeySpace::Lock, KeySpace::Semaphore] {
            let handle = write_handle(space, u128::MAX, token);
            assert_eq!(read_handle(&handle), Some((space, u128::MAX, token)));
        }
        for text in ["", "none", "x", &"l".repeat(65), "lé"] {
            assert_eq!(read_handle(&Handle::new(text)), None, "{text}");
        }
    }
}
