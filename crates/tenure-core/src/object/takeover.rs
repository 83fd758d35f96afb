//! Take-over from a silent owner: the clocks that may show that its lease has ended.
//!
//! A store stamps objects (`Last-Modified`) and dates its responses (`Date`). The two times come from one clock only if
//! there is no proxy between client and store: a proxy replaces `Date` (nginx does by default). A difference of 20 s
//! between the two clocks has led to two holders. So a client takes over
//!
//! - a record that it has observed unchanged for the recorded lease plus the margin, on its own monotonic clock, as on
//!   stores without a clock; or
//! - sooner, a record that is older than that by the store's stamps. This requires that an own write of the same wait
//!   showed `Date` and `Last-Modified` to agree. It also requires an observation of a third of the lease plus one
//!   request, within which a live holder renews; or
//! - without any observation, a record that is older than three leases and 30 s by the headers, if the client does not
//!   wait and reads only once.

use std::time::Duration;

use super::{ClockResolution, ObjectRead};
use crate::lease::margin;
use crate::record::abandoned_after;
use crate::{Rules, Time};

/// Largest difference between `Date` and `Last-Modified` of one write at which the clocks count as equal: both are
/// truncated to whole seconds, and the reply takes time.
pub const CLOCKS_AGREE_WITHIN: Duration = Duration::from_secs(2);

/// Times of a client's own write: by the client's clock, and as the store stamped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteStamp {
    /// Instant before the write was sent, on the writer's own clock.
    pub sent: Time,
    /// Instant after its reply came.
    pub replied: Time,
    /// `Last-Modified` of the written object.
    pub modified: Duration,
    /// `Date` of the response.
    pub date: Duration,
}

/// Evidence about a version, in addition to the read on which the decision is made.
#[derive(Clone, Copy, Debug)]
pub struct TakeoverEvidence {
    /// Instant after the reply that first showed the version, on the client's own clock.
    pub first_seen: Time,
    /// Instant after the reply to the read on which the decision is made.
    pub now: Time,
    /// Last own write of this wait.
    pub stamp: Option<WriteStamp>,
    /// The client does not wait: it reads once, and has no time to observe.
    pub single_read: bool,
    /// Safety rules that apply.
    pub rules: Rules,
}

impl TakeoverEvidence {
    /// Evidence of a client that has written nothing in this wait.
    pub const fn new(first_seen: Time, now: Time) -> Self {
        Self { first_seen, now, stamp: None, single_read: false, rules: Rules::ALL }
    }
}

impl WriteStamp {
    /// Measured difference between the two clocks. A slow reply counts as a difference.
    pub fn difference(&self) -> Duration {
        self.date.abs_diff(self.modified)
    }

    /// True if the two clocks agree as far as can be measured.
    pub fn clocks_agree(&self) -> bool {
        self.difference() <= CLOCKS_AGREE_WITHIN
    }

    /// Instant of the own clock that was certainly before the write that the store stamped `modified`.
    pub(super) fn instant_before(&self, modified: Duration, resolution: ClockResolution) -> Time {
        // Our own write was made after `sent`. The other write was made later or earlier by the span between the two
        // stamps, and the result must not be later than the other write. The store's clock measured the span: a sixth
        // less (a fifth more, if the span is subtracted) covers both clocks being slewed by 8.3 %. Each stamp is
        // truncated by up to one unit. The worst case, in which only our own stamp is truncated, costs one unit.
        let span = modified.abs_diff(self.modified);
        let at = if modified > self.modified {
            self.sent + span.saturating_sub(span / 6)
        } else {
            self.sent - span.saturating_add(span / 5)
        };
        at - resolution.0
    }

    /// Lower bound of the time that the clock that stamps objects shows at `now`.
    fn store_time(&self, now: Time) -> Duration {
        self.modified.saturating_add(now.since(self.replied))
    }
}

impl<T> ObjectRead<T> {
    /// True if a client must treat the lock as held.
    pub fn is_held(&self, evidence: &TakeoverEvidence, resolution: ClockResolution) -> bool {
        !self.may_take(evidence, resolution)
    }

    /// Remaining time until a single read may take the lock over, by the headers; zero if it may now.
    pub fn time_to_takeover(&self) -> Duration {
        let remaining = |lease| abandoned_after(lease).saturating_sub(self.age());
        self.recorded_lease().map_or(Duration::ZERO, remaining)
    }

    /// True if the lease has ended by the headers alone, which does not allow a take-over.
    pub fn seems_expired(&self, resolution: ClockResolution) -> bool {
        self.takeover_age(resolution).is_some_and(|required| self.age() >= required)
    }

    /// True if a claim may overwrite the owner: it released, or it may be taken over.
    pub(super) fn may_take(
        &self,
        evidence: &TakeoverEvidence,
        resolution: ClockResolution,
    ) -> bool {
        let (Some(lease), Some(required)) = (self.recorded_lease(), self.takeover_age(resolution))
        else {
            return true;
        };
        let unchanged = evidence.now.since(evidence.first_seen);
        if unchanged >= required {
            return true;
        }
        // A live holder renews after a third of its lease, with a request that may take a quarter.
        let may_still_renew = unchanged < lease / 3 + lease / 4;
        if !evidence.rules.compare_store_clocks {
            return !may_still_renew && self.age() >= required;
        }
        match evidence.stamp {
            // A waiting client has the time to observe: `Date` may be wrong by minutes.
            None => evidence.single_read && self.is_abandoned(lease),
            Some(stamp) if !stamp.clocks_agree() => false,
            // At our own write, `Date` agreed with the clock that stamps objects. The age is the time between the two
            // stamps, plus the time since our write by our own clock. `Date` of a later response is not used. Our write
            // must be no earlier than `first_seen`: over a longer time, the two clocks could drift apart.
            Some(stamp) => {
                let age = stamp.store_time(evidence.now).saturating_sub(self.modified);
                !may_still_renew && stamp.sent >= evidence.first_seen && age >= required
            }
        }
    }

    /// Time for which the lock is held after the object's last change; `None` if it is not held.
    fn recorded_lease(&self) -> Option<Duration> {
        let record = self.record.as_ref().filter(|record| !record.expires.is_zero())?;
        // A program of the plain format writes the end of its hold by its own clock, so this is only an estimate. It
        // counts from the stamp, and thus does not depend on `Date` as well.
        Some(record.lease.unwrap_or_else(|| record.expires.saturating_sub(self.modified)))
    }

    /// Age at which a challenger takes over: the recorded lease plus the time that challengers add.
    fn takeover_age(&self, resolution: ClockResolution) -> Option<Duration> {
        let lease = self.recorded_lease()?;
        let margin =
            self.record.as_ref().and_then(|record| record.lease).map_or(Duration::ZERO, margin);
        Some(lease.saturating_add(margin.max(resolution.slack())))
    }

    /// Age by `Date` and `Last-Modified`, whose clocks may disagree.
    fn age(&self) -> Duration {
        self.date.saturating_sub(self.modified)
    }

    fn is_abandoned(&self, lease: Duration) -> bool {
        self.age() > abandoned_after(lease)
    }
}
