//! The record of a lock in an object store: one owner, one place to wait in, and the store's own clock.
//!
//! Everything here is a decision: given what a read showed, who asks and the store's time, what to write. The write,
//! conditional on the version that was read, is what excludes others. Wall clocks of clients never enter. Times are
//! spans since 1970, by one of two clocks: `Last-Modified` is the store's, `Date` may be that of a proxy before it. When
//! a silent owner may be taken over is decided in [`takeover`].

pub mod takeover;

use std::time::Duration;

use self::takeover::{TakeoverEvidence, WriteStamp};
use crate::acquire::LeaseStart;
use crate::{Rules, Time};

/// What the object says. `T` is whatever else is in it, kept by who rewrites it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockObject<T> {
    /// Who holds it, or held it last.
    pub owner: String,
    /// Until when, as the owner wrote it; zero where it was released.
    pub expires: Duration,
    /// Who has the place to wait in.
    pub waiter: Option<ObjectWaiter>,
    /// The number of the grant; participants of the plain format write none.
    pub fence: Option<u64>,
    /// How long the hold lasts from the object's last change on; participants of the plain format write none.
    pub lease: Option<Duration>,
    /// What else is in it.
    pub extra: T,
}

/// Who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectWaiter {
    /// Who.
    pub id: String,
    /// Until when the place is kept.
    pub expires: Duration,
}

/// What one read showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRead<T> {
    /// What the object says; `None` where there is none.
    pub record: Option<LockObject<T>>,
    /// `Last-Modified`: when it was last changed, by the clock that stamps objects.
    pub modified: Duration,
    /// `Date` of the same answer, which may be another machine's clock.
    pub now: Duration,
}

/// The one who rings: waits at a bell beside the lock, and is granted the lock by its owner's release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextHolder {
    /// Who.
    pub id: String,
    /// How long the grant lasts unless renewed.
    pub lease: Duration,
}

/// What becomes of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectDecision<T> {
    /// It was granted before: an earlier sending landed, or the last owner handed it to us.
    AlreadyGranted,
    /// Write this, at the version that was read: if that succeeds, it is granted.
    Write(LockObject<T>),
    /// Another holds it; the place in the record is free, or ours.
    Held,
    /// Another waits: the lock, or the place, is that one's.
    WaiterAhead,
}

/// The looks of one waiter at its lock: they say from when a grant counts that the last owner made to it.
///
/// Contract 4 has a grant that another made confirmed by a renewal. Stores that take one write a second and object would
/// keep the new owner waiting for that second, so its lease counts from an instant that was surely before the grant
/// instead, and the first renewal comes when it is due. Two bounds say what that instant is, and the earlier one counts:
///
/// - when the last look was sent that found the lock not granted;
/// - when the waiter's own last write was sent, plus the time from that write to the grant by the stamps
///   (`Last-Modified`) of the two objects, less what is rounded off them.
///
/// The second holds however old the other looks' answers were. Both of its times come from the clock that stamps
/// objects: `Date` may come from another, and an age between the two would be too small where `Date` is behind, which
/// would make the hold too long. Without an own write in this wait there is no second bound, and the grant must be
/// confirmed. A grant whose number is none after the last that was seen is an old answer itself: that one must be
/// confirmed. So a store that answers from an old copy now and then can shorten a hold, and never lengthen one.
#[derive(Clone, Debug)]
pub struct WaiterReads {
    ungranted: Time,
    /// The largest number that was seen.
    fence: Option<u64>,
    /// The last own write of this wait, as far as the store said when it was made.
    stamp: Option<WriteStamp>,
    rules: Rules,
}

/// How finely a store's clock is told: what is rounded off each of two times that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockResolution(pub Duration);

/// The longest lease that a release gives to who waits: one that is gone keeps the lock no longer than that.
pub const MAX_HANDOFF_LEASE: Duration = Duration::from_secs(30);

impl ClockResolution {
    /// Whole seconds, as in the headers of HTTP.
    pub const SECOND: Self = Self(Duration::from_secs(1));

    /// What is added to a life before it is over: two times are compared, each cut off by up to a grain.
    pub fn slack(self) -> Duration {
        self.0 * 2
    }

    /// The smallest lease that can be kept: the slack must be small beside it.
    pub fn min_ttl(self) -> Duration {
        self.0 * 10
    }
}

impl WaiterReads {
    /// The first look, sent at `sent`, found the lock not granted.
    pub fn new<T>(sight: &ObjectRead<T>, sent: Time, rules: Rules) -> Self {
        Self { ungranted: sent, fence: sight.fence(), stamp: None, rules }
    }

    /// Notes an own write of this wait: the waiter's bell.
    pub fn record_write(&mut self, stamp: WriteStamp) {
        self.stamp = Some(stamp);
    }

    /// The watch kept over a version that was first seen before `first`, as of a look answered before `now`.
    pub fn evidence(&self, first: Time, now: Time) -> TakeoverEvidence {
        TakeoverEvidence {
            first_seen: first,
            now,
            stamp: self.stamp,
            single_read: false,
            rules: self.rules,
        }
    }

    /// Another look, sent at `sent`, found it not granted.
    pub fn note_ungranted<T>(&mut self, sight: &ObjectRead<T>, sent: Time) {
        (self.ungranted, self.fence) = (sent, self.fence.max(sight.fence()));
    }

    /// From when the grant counts that a look showed which was sent at `sent`. One for less than `ttl` is too short for
    /// who counts a `ttl`: it must be renewed first.
    pub fn lease_start<T>(
        &self,
        sight: &ObjectRead<T>,
        ttl: Duration,
        sent: Time,
        grain: ClockResolution,
    ) -> LeaseStart {
        let lease = sight.record.as_ref().and_then(|record| record.lease);
        if lease.is_none_or(|lease| lease < ttl) || sight.fence() <= self.fence {
            return LeaseStart::FromConfirm;
        }
        if !self.rules.count_from_last_look {
            return LeaseStart::Since(sent);
        }
        if !self.rules.compare_store_clocks {
            let age = sight.now.saturating_sub(sight.modified).saturating_add(grain.0);
            return LeaseStart::Since(self.ungranted.min(sent - age));
        }
        match self.stamp {
            Some(stamp) => {
                LeaseStart::Since(self.ungranted.min(stamp.instant(sight.modified, grain)))
            }
            None => LeaseStart::FromConfirm,
        }
    }
}

impl<T> ObjectRead<T> {
    /// The waiter whose place is kept.
    pub fn waiter(&self) -> Option<&ObjectWaiter> {
        let waiter = self.record.as_ref()?.waiter.as_ref()?;
        (self.now < waiter.expires).then_some(waiter)
    }

    /// Whether the owner is `id`, released or not taken over.
    pub fn owned_by(&self, id: &str) -> bool {
        self.record.as_ref().is_some_and(|record| record.is_owned_by(id))
    }

    /// The number of the last grant, where somebody counted.
    fn fence(&self) -> Option<u64> {
        self.record.as_ref()?.fence
    }

    /// Whether whoever owns it polls the bell.
    pub fn polls_bell(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.lease.is_some())
    }
}

impl<T: Clone> ObjectRead<T> {
    /// Decides a claim. `more` is what else to write where there was nothing; `watch` is what is known of the version
    /// besides this look.
    pub fn claim(
        &self,
        id: &str,
        lease: Duration,
        more: impl FnOnce() -> T,
        grain: ClockResolution,
        watch: &TakeoverEvidence,
    ) -> ObjectDecision<T> {
        if self.owned_by(id) {
            return ObjectDecision::AlreadyGranted;
        }
        if self.waiter().is_some_and(|waiter| waiter.id != id) {
            return ObjectDecision::WaiterAhead;
        }
        if !self.may_take(watch, grain) {
            return ObjectDecision::Held;
        }
        ObjectDecision::Write(LockObject {
            owner: id.to_owned(),
            expires: self.now + lease,
            waiter: None,
            fence: Some(self.next_fence()),
            lease: Some(lease),
            extra: self.record.as_ref().map_or_else(more, |record| record.extra.clone()),
        })
    }

    /// The number of the next grant: one more than the last; the store's time where nobody counted.
    fn next_fence(&self) -> u64 {
        let micros = u64::try_from(self.now.as_micros()).unwrap_or(u64::MAX);
        self.fence().map_or(micros, |fence| fence.saturating_add(1))
    }
}

impl<T> LockObject<T> {
    /// Whether `id` holds it, unless it was taken over.
    pub fn is_owned_by(&self, id: &str) -> bool {
        self.owner == id && !self.expires.is_zero()
    }
}

impl<T: Clone> LockObject<T> {
    /// What renews the hold of `id`; `None` where it is not held by it. The waiter's mark is kept; `fence` is the number
    /// of the grant, which a waiter of the plain format drops when it leaves its mark.
    #[must_use]
    pub fn renew(&self, id: &str, fence: u64, lease: Duration, now: Duration) -> Option<Self> {
        self.is_owned_by(id).then(|| Self {
            expires: now + lease,
            lease: Some(lease),
            fence: Some(fence),
            ..self.clone()
        })
    }

    /// What gives the hold of `id` back; `None` where it is not held by it.
    ///
    /// Whoever waits at the bell is the next owner with the same write. One that is only named in the record takes it by
    /// itself: the record stays, released, and nobody else may have it meanwhile.
    #[must_use]
    pub fn release(
        &self,
        id: &str,
        fence: u64,
        heir: Option<&NextHolder>,
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
        Some(match heir.filter(|heir| named.is_none_or(|named| named == heir.id)) {
            None => free,
            Some(heir) => Self {
                owner: heir.id.clone(),
                expires: now + heir.lease,
                waiter: None,
                fence: Some(fence.saturating_add(1)),
                lease: Some(heir.lease),
                ..free
            },
        })
    }

    /// What puts `id` into the place to wait in, or keeps it there until `until`.
    #[must_use]
    pub fn with_waiter(&self, id: &str, until: Duration) -> Self {
        let waiter = Some(ObjectWaiter { id: id.to_owned(), expires: until });
        Self { waiter, ..self.clone() }
    }

    /// What takes `id` out of the place to wait in; `None` where it is not there.
    #[must_use]
    pub fn without_waiter(&self, id: &str) -> Option<Self> {
        self.waiter.as_ref().filter(|waiter| waiter.id == id)?;
        Some(Self { waiter: None, ..self.clone() })
    }
}

#[cfg(test)]
mod tests;
