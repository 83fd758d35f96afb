//! Record of a lock in an object store: one owner, one waiting place, and the store's own clock.
//!
//! This module only decides: from the result of a read, the claimant's id and the store's time it derives the next
//! write. Mutual exclusion comes from the write itself, which is conditional on the version that was read. Clients'
//! wall clocks are never used. Times are durations since 1970 by one of two clocks: `Last-Modified` is the store's,
//! `Date` may come from a proxy in front of it. The rules for taking over from a silent owner are in [`takeover`].
//!
//! A waiter normally writes a second object beside the lock, the *bell*, which the owner polls. Other programs share
//! locks in the *plain format*: they know only the owner, the waiter, and the end of each. They do not poll the bell,
//! so a waiter for such an owner writes itself into the *waiting place* of the record.

mod content;
pub mod takeover;

use std::time::Duration;

use self::takeover::{TakeoverEvidence, WriteStamp};
use crate::acquire::LeaseStart;
use crate::{Rules, Time};

pub use self::content::{ClockResolution, LockObject, ObjectRead, ObjectWaiter};

/// Waiter at the bell object beside the lock. The owner's release grants the lock to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextHolder {
    /// Id of the waiter.
    pub id: String,
    /// Time that the grant lasts unless renewed.
    pub lease: Duration,
}

/// Decision on a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectDecision<T> {
    /// Already granted: an earlier attempt of the claim took effect, or the last owner handed the lock to us.
    AlreadyGranted,
    /// Write this record, conditional on the version that was read. Success is the grant.
    Write(LockObject<T>),
    /// Another client holds the lock; the waiting place is free, or ours.
    Held,
    /// Another client waits: the lock, or the waiting place, is reserved for it.
    WaiterAhead,
}

/// Reads that one waiter made of its lock. They give the start of a lease that the last owner granted to the waiter.
///
/// By contract 4 a grant that another client made is confirmed by a renewal. On a store that accepts one write per
/// second and object, that renewal would delay the new owner by a second. Instead the lease counts from an instant that
/// was certainly before the grant ([`LeaseStart::Since`]), and the first renewal comes when it is due. Two bounds give
/// such an instant, and the earlier one counts:
///
/// - the time at which the last read that found the lock not granted was sent;
/// - the time at which the waiter's own last write was sent, plus the time from that write to the grant by the stamps
///   (`Last-Modified`) of the two objects, less the rounding of the stamps.
///
/// A read may be answered from an old copy, and then the lock may have been granted before the read was sent. The
/// second bound does not depend on the age of such answers. Both of its times come from the clock that stamps objects.
/// `Date` may come from another clock: an age computed from `Date` would be too small if that clock is behind, and the
/// hold would last too long.
///
/// The grant must be confirmed if the waiter made no write in this wait, because there is no second bound. It must also
/// be confirmed if its number is not above the last number that was seen, because then the answer itself is old. So a
/// store that sometimes answers from an old copy can shorten a hold, and never lengthen one.
#[derive(Clone, Debug)]
pub struct WaiterReads {
    /// Time at which the last read that found the lock not granted was sent.
    ungranted: Time,
    /// Largest fencing number that was seen.
    fence: Option<u64>,
    /// Last own write of this wait, if the store reported its time.
    stamp: Option<WriteStamp>,
    rules: Rules,
}

/// Longest lease that a release grants to the next holder. It bounds the time for which a waiter that is gone keeps the
/// lock.
pub const MAX_HANDOFF_LEASE: Duration = Duration::from_secs(30);

impl WaiterReads {
    /// Starts with the first read, sent at `sent`, which found the lock not granted.
    pub fn new<T>(read: &ObjectRead<T>, sent: Time, rules: Rules) -> Self {
        Self { ungranted: sent, fence: read.fence(), stamp: None, rules }
    }

    /// Records an own write of this wait: the waiter's bell.
    pub fn record_write(&mut self, stamp: WriteStamp) {
        self.stamp = Some(stamp);
    }

    /// Evidence about a version, for a decision on a read. `first` is an instant after the reply that first showed the
    /// version, and `now` is an instant after the reply to that read.
    pub fn evidence(&self, first: Time, now: Time) -> TakeoverEvidence {
        TakeoverEvidence {
            first_seen: first,
            now,
            stamp: self.stamp,
            single_read: false,
            rules: self.rules,
        }
    }

    /// Records another read, sent at `sent`, that found the lock not granted.
    pub fn note_ungranted<T>(&mut self, read: &ObjectRead<T>, sent: Time) {
        (self.ungranted, self.fence) = (sent, self.fence.max(read.fence()));
    }

    /// Start of the lease whose grant a read sent at `sent` showed. A grant for less than `ttl` must be renewed first,
    /// because the holder's deadline counts a whole `ttl`.
    pub fn lease_start<T>(
        &self,
        read: &ObjectRead<T>,
        ttl: Duration,
        sent: Time,
        resolution: ClockResolution,
    ) -> LeaseStart {
        let lease = read.record.as_ref().and_then(|record| record.lease);
        // An own renewal is the safe answer in two cases. A lease below `ttl` ends before the deadline that we
        // would compute. A number that we have seen before belongs to an earlier grant: this reply is older than a
        // read that we made already, and may show a lease that has ended since.
        if lease.is_none_or(|lease| lease < ttl) || read.fence() <= self.fence {
            return LeaseStart::FromConfirm;
        }
        if !self.rules.count_from_last_look {
            return LeaseStart::Since(sent);
        }
        if !self.rules.compare_store_clocks {
            let age = read.date.saturating_sub(read.modified).saturating_add(resolution.0);
            return LeaseStart::Since(self.ungranted.min(sent - age));
        }
        match self.stamp {
            // The earlier of two independent bounds. An answer from an old copy invalidates only the first, a step of
            // the store's clock only the second: the start is too late only if both fail at once.
            Some(stamp) => LeaseStart::Since(
                self.ungranted.min(stamp.instant_before(read.modified, resolution)),
            ),
            None => LeaseStart::FromConfirm,
        }
    }
}

impl<T> ObjectRead<T> {
    /// Waiter whose reservation of the waiting place has not expired.
    pub fn waiter(&self) -> Option<&ObjectWaiter> {
        let waiter = self.record.as_ref()?.waiter.as_ref()?;
        (self.date < waiter.expires).then_some(waiter)
    }

    /// True if the owner is `id` and has not released, even if its lease has expired.
    pub fn owned_by(&self, id: &str) -> bool {
        self.record.as_ref().is_some_and(|record| record.is_owned_by(id))
    }

    /// Fencing number of the last grant, if one was written.
    fn fence(&self) -> Option<u64> {
        self.record.as_ref()?.fence
    }

    /// True if the owner polls the bell. An owner that does so has written a lease.
    pub fn polls_bell(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.lease.is_some())
    }
}

impl<T: Clone> ObjectRead<T> {
    /// Decides a claim. `extra` makes the rest of the content if the object does not exist; `evidence` is what the
    /// client knows of the version besides this read.
    pub fn claim(
        &self,
        id: &str,
        lease: Duration,
        extra: impl FnOnce() -> T,
        resolution: ClockResolution,
        evidence: &TakeoverEvidence,
    ) -> ObjectDecision<T> {
        if self.owned_by(id) {
            return ObjectDecision::AlreadyGranted;
        }
        if self.waiter().is_some_and(|waiter| waiter.id != id) {
            return ObjectDecision::WaiterAhead;
        }
        if !self.may_take(evidence, resolution) {
            return ObjectDecision::Held;
        }
        ObjectDecision::Write(LockObject {
            owner: id.to_owned(),
            expires: self.date + lease,
            waiter: None,
            fence: Some(self.next_fence()),
            lease: Some(lease),
            extra: self.record.as_ref().map_or_else(extra, |record| record.extra.clone()),
        })
    }

    /// Number of the next grant: one more than the last, or the store's time in microseconds if none was written.
    fn next_fence(&self) -> u64 {
        let micros = u64::try_from(self.date.as_micros()).unwrap_or(u64::MAX);
        self.fence().map_or(micros, |fence| fence.saturating_add(1))
    }
}

impl<T> LockObject<T> {
    /// True if the owner is `id` and has not released, even if its lease has expired.
    pub fn is_owned_by(&self, id: &str) -> bool {
        self.owner == id && !self.expires.is_zero()
    }
}

impl<T: Clone> LockObject<T> {
    /// Record that renews the hold of `id`; `None` if `id` does not hold the lock. The waiting place is kept. `fence`
    /// is the number of the grant. It is written again, because a waiter of the plain format drops the number when it
    /// writes itself into the waiting place.
    #[must_use]
    pub fn renew(&self, id: &str, fence: u64, lease: Duration, now: Duration) -> Option<Self> {
        self.is_owned_by(id).then(|| Self {
            expires: now + lease,
            lease: Some(lease),
            fence: Some(fence),
            ..self.clone()
        })
    }

    /// Record that releases the hold of `id`; `None` if `id` does not hold the lock.
    ///
    /// If a waiter wrote the bell (`next`), the same write makes it the next owner. If another waiter has the waiting
    /// place, the record is only marked as released. The lock stays reserved for that waiter, which then claims it.
    #[must_use]
    pub fn release(
        &self,
        id: &str,
        fence: u64,
        next: Option<&NextHolder>,
        now: Duration,
    ) -> Option<Self> {
        if !self.is_owned_by(id) {
            return None;
        }
        let waiter = self.waiter.clone().filter(|waiter| now < waiter.expires);
        let named = waiter.as_ref().map(|waiter| &*waiter.id);
        let free = Self {
            expires: Duration::ZERO,
            waiter: waiter.clone(),
            fence: Some(fence),
            lease: None,
            ..self.clone()
        };
        Some(match next.filter(|next| named.is_none_or(|named| named == next.id)) {
            None => free,
            Some(next) => Self {
                owner: next.id.clone(),
                expires: now + next.lease,
                waiter: None,
                fence: Some(fence.saturating_add(1)),
                lease: Some(next.lease),
                ..free
            },
        })
    }

    /// Record with `id` in the waiting place until `until`.
    #[must_use]
    pub fn with_waiter(&self, id: &str, until: Duration) -> Self {
        let waiter = Some(ObjectWaiter { id: id.to_owned(), expires: until });
        Self { waiter, ..self.clone() }
    }

    /// Record with the waiting place cleared; `None` if `id` is not in it.
    #[must_use]
    pub fn without_waiter(&self, id: &str) -> Option<Self> {
        self.waiter.as_ref().filter(|waiter| waiter.id == id)?;
        Some(Self { waiter: None, ..self.clone() })
    }
}

#[cfg(test)]
mod tests;
