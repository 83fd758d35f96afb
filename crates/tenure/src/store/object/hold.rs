//! A hold: the record of its lock, at the version that we wrote. Renewal and release rewrite the record.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::{FencingToken, Key, Time};

use super::bucket::BucketDeadline;
use super::format::{self, LockRecord};
use super::inner::{KnownLock, MAX_WRITE_TRIES, ObjectInner, PutResult, as_unknown};
use crate::store::{Claim, Grant, Handle, Hold, HoldEvent, LeaseStart, Renewed};
use crate::{Error, ErrorKind, Result};

/// The grant of a claim that is held.
pub(super) fn grant(
    inner: &Arc<ObjectInner>,
    claim: &Claim,
    name: String,
    known: KnownLock,
    lease_start: LeaseStart,
) -> Grant {
    let record = known.sight.record.as_ref();
    let fence = record.and_then(|record| record.fence).unwrap_or_default();
    let handoff_requested = known.sight.waiter().is_some();
    let hold = ObjectHold {
        inner: Arc::clone(inner),
        key: claim.key.clone(),
        name,
        id: format::owner(&claim.by, claim.id),
        fence,
        known,
        last_read: inner.clock.now(),
        last_write: inner.clock.now(),
    };
    let token = FencingToken::new(0, fence);
    Grant { token, lease_start, handoff_requested, grants: None, hold: Box::new(hold) }
}

pub(super) struct ObjectHold {
    pub(super) inner: Arc<ObjectInner>,
    pub(super) key: Key,
    pub(super) name: String,
    pub(super) id: String,
    pub(super) fence: u64,
    /// Last read or write of the record that showed our hold.
    pub(super) known: KnownLock,
    /// Time at which the record was last read for waiters.
    pub(super) last_read: Time,
    /// Time of our last write.
    pub(super) last_write: Time,
}

/// Change to the record of a hold.
#[derive(Clone, Copy, Debug)]
enum ObjectHoldChange {
    Renew { ttl: Duration },
    Release,
}

impl ObjectHold {
    /// Rewrites the record on condition of the known version.
    ///
    /// If another write came first (a waiter's mark, or an earlier write of ours whose reply was lost), the record is
    /// read and, if it is still ours, written again.
    async fn change(&mut self, change: ObjectHoldChange, limit: Duration) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let until = inner.until(limit);
        let mut unclear = None;
        let mut landed = String::new();
        for _ in 0..MAX_WRITE_TRIES {
            let Some(next) = self.next_record(change, until).await else {
                return Err(self.ended_error(unclear));
            };
            let put = inner.put(&self.name, &self.known, next, until).await;
            match put.map_err(|error| self.explain(error))? {
                PutResult::Won(known) => {
                    (self.known, self.last_write) = (*known, inner.clock.now());
                    return Ok(());
                }
                PutResult::Lost => {}
                PutResult::Throttled => {
                    if !inner.wait_write_interval_since(self.last_write, until).await {
                        let message = "the store throttles writes of this object";
                        let error = Error::new(ErrorKind::Unavailable, message);
                        return Err(self.explain(if unclear.is_some() {
                            as_unknown(error)
                        } else {
                            error
                        }));
                    }
                }
                PutResult::Unclear(error, nonce) => (unclear, landed) = (Some(error), nonce),
            }
            // The nonce of the unclear write shows whether it was that one which landed.
            self.reread(until, unclear.as_ref()).await?;
            let nonce = self.known.sight.record.as_ref().map(|record| &record.extra.nonce);
            if unclear.is_some() && nonce == Some(&landed) {
                return Ok(());
            }
        }
        let message = "the record was changed by a concurrent write each time: try again";
        let error = Error::new(ErrorKind::Unavailable, message);
        Err(self.explain(if unclear.is_some() { as_unknown(error) } else { error }))
    }

    /// Record to write; `None` if the lock is no longer ours.
    async fn next_record(
        &self,
        change: ObjectHoldChange,
        until: BucketDeadline,
    ) -> Option<LockRecord> {
        let record = self.known.sight.record.as_ref()?;
        match change {
            ObjectHoldChange::Renew { ttl } => {
                record.renew(&self.id, self.fence, ttl, self.known.now(self.inner.clock.now()))
            }
            ObjectHoldChange::Release => {
                record.is_owned_by(&self.id).then_some(())?;
                // An unreadable bell counts as not rung: a waiter then takes the free lock by itself.
                let rung = self.inner.read_bell(&self.name, until).await.ok();
                let next_holder = rung
                    .as_ref()
                    .and_then(ObjectInner::next_holder)
                    .filter(|next| next.id != self.id);
                let now = self.known.now(self.inner.clock.now());
                let mut next = record.release(&self.id, self.fence, next_holder.as_ref(), now)?;
                if next_holder.is_some_and(|holder| holder.id == next.owner) {
                    next.extra.info = rung.and_then(|rung| rung.bell).map(|bell| bell.by);
                }
                Some(next)
            }
        }
    }

    /// Reads the record. If that fails after an unclear write, the outcome of that write is unknown.
    async fn reread(&mut self, until: BucketDeadline, unclear: Option<&Error>) -> Result<()> {
        let found = self.inner.read_lock(&self.name, None, until).await;
        self.known = found.map_err(|error| match (error.kind(), unclear) {
            // An object that is not a lock does not contain our hold.
            (ErrorKind::Misconfigured, _) => self.ended_error(None),
            (_, Some(_)) => self.explain(as_unknown(error)),
            (_, None) => self.explain(error),
        })?;
        Ok(())
    }

    /// Error for a lock that is no longer ours. After an unclear write the outcome is unknown: that write may have
    /// released it.
    fn ended_error(&self, unclear: Option<Error>) -> Error {
        self.explain(unclear.unwrap_or_else(|| {
            let message =
                "the hold has ended: another client took it over, or the object was removed";
            Error::new(ErrorKind::NotHeld, message)
        }))
    }

    fn explain(&self, error: Error) -> Error {
        error.on(&self.key).at(&*self.inner)
    }

    /// True if the record names a waiter.
    fn has_named_waiter(&self) -> bool {
        self.known.sight.waiter().is_some_and(|waiter| waiter.id != self.id)
    }

    /// Reads the record for waiters that ring no bell. True if it names one.
    async fn read_record_for_waiters(&mut self, until: BucketDeadline) -> Result<bool> {
        self.last_read = self.inner.clock.now();
        let found = self.inner.read_lock(&self.name, Some(&self.known), until).await?;
        if found.sight.owned_by(&self.id) {
            self.known = found;
        }
        Ok(self.has_named_waiter())
    }
}

#[async_trait]
impl Hold for ObjectHold {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        self.change(ObjectHoldChange::Renew { ttl }, limit).await?;
        Ok(Renewed { handoff_requested: self.has_named_waiter() })
    }

    async fn check_handoff(&mut self, limit: Duration) -> Result<bool> {
        let until = self.inner.until(limit);
        let rung = self.inner.read_bell(&self.name, until).await?;
        let other = rung.bell.as_ref().is_some_and(|bell| bell.next_holder.id != self.id);
        if rung.alive && other {
            return Ok(true);
        }
        // The bell is our own, from our wait, or has expired. It is cleared, because every poll of a present bell costs
        // a full read.
        if let (Some(version), Some(_)) = (&rung.version, &rung.bell) {
            self.inner.clear_bell(&self.name, version, until).await;
        }
        let due = self
            .inner
            .options
            .record_poll
            .is_some_and(|every| self.inner.clock.now().since(self.last_read) >= every);
        if due { self.read_record_for_waiters(until).await } else { Ok(false) }
    }

    async fn event(&mut self) -> HoldEvent {
        std::future::pending().await
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        self.change(ObjectHoldChange::Release, limit).await
    }

    fn handle(&self) -> Option<Handle> {
        let claim = format::claim_of(&self.id)?;
        Some(write_handle(claim, FencingToken::new(0, self.fence)))
    }

    async fn detach(&mut self, _limit: Duration) -> Result<()> {
        Ok(())
    }
}

impl fmt::Debug for ObjectHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectHold")
            .field("key", &self.key)
            .field("fence", &self.fence)
            .field("version", &self.known.version)
            .finish_non_exhaustive()
    }
}

/// Handle that identifies a hold to other processes: its claim and token.
fn write_handle(claim: u128, token: FencingToken) -> Handle {
    Handle::new(format!("o{claim:032x}{:016x}", token.number()))
}

pub(super) fn read_handle(handle: &Handle) -> Option<(u128, u64)> {
    let text = handle.expose().strip_prefix('o')?;
    if text.len() != 48 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let (claim, fence) = text.split_at(32);
    Some((u128::from_str_radix(claim, 16).ok()?, u64::from_str_radix(fence, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_its_text() {
        let handle = write_handle(u128::MAX, FencingToken::new(0, 9));
        assert_eq!(read_handle(&handle), Some((u128::MAX, 9)));
        for text in ["", "none", "o", &"o".repeat(49), "oé"] {
            assert_eq!(read_handle(&Handle::new(text)), None, "{text}");
        }
    }
}
