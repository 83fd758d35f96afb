//! Take-over of a silent owner's record: which clocks may say that its lease is over.
//!
//! A store stamps objects (`Last-Modified`) and dates its answers (`Date`). The two are one clock only if nothing stands
//! between: a proxy replaces `Date` (nginx does by default). A difference of 20 s gave two holders. So a client takes over
//!
//! - what it has observed unchanged for the recorded lease plus the margin, on its own monotonic clock, as on stores
//!   that have no clock at all; or
//! - sooner, what is older than that by the store's stamps, if an own write of the same wait showed that `Date` and
//!   `Last-Modified` agree, and if it has also observed the record for a third of the lease plus one request, within
//!   which a holder that lives renews; or
//! - without any observation, what is older than three leases and 30 s by the headers, if the client does not wait and
//!   looks only once.

use std::time::Duration;

use super::{ClockResolution, ObjectRead};
use crate::lease::margin;
use crate::record::abandoned_after;
use crate::{Rules, Time};

/// The largest difference between `Date` and `Last-Modified` at one write that is none: both are cut to whole seconds,
/// and the reply takes its time.
pub const CLOCKS_AGREE_WITHIN: Duration = Duration::from_secs(2);

/// An own write: when by the own clock, and how the store stamped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteStamp {
    /// Before the write was sent, on the writer's own clock.
    pub sent: Time,
    /// After its reply came.
    pub replied: Time,
    /// `Last-Modified` of the object that was written.
    pub modified: Duration,
    /// `Date` of the reply.
    pub date: Duration,
}

/// What a client knows of a version besides the look that it decides on.
#[derive(Clone, Copy, Debug)]
pub struct TakeoverEvidence {
    /// After the reply that first showed the version, on the client's own clock.
    pub first_seen: Time,
    /// After the reply to the look that is decided on.
    pub now: Time,
    /// The last own write of this wait.
    pub stamp: Option<WriteStamp>,
    /// The client does not wait: it has one look, and no time to observe.
    pub single_read: bool,
    /// The rules that are obeyed.
    pub rules: Rules,
}

impl TakeoverEvidence {
    /// A look of a client that has written nothing in this wait.
    pub const fn new(first: Time, now: Time) -> Self {
        Self { first_seen: first, now, stamp: None, single_read: false, rules: Rules::ALL }
    }
}

impl WriteStamp {
    /// The difference between the two clocks, as far as it can be told. A reply that was slow counts as one.
    pub fn difference(&self) -> Duration {
        self.date.abs_diff(self.modified)
    }

    /// Whether the two clocks are one, as far as it can be told.
    pub fn clocks_agree(&self) -> bool {
        self.difference() <= CLOCKS_AGREE_WITHIN
    }

    /// An instant of the own clock that was surely before the write that the store stamped `modified`.
    pub(super) fn instant(&self, modified: Duration, grain: ClockResolution) -> Time {
        // The own write was made after `sent`, and both stamps come from one clock. Either is cut off by up to a grain;
        // the worst case is that only the own one is. The span between them is counted by the store: a sixth less (a
        // fifth more, where it is added the other way) covers both clocks being slewed by 8.3 %.
        let span = modified.abs_diff(self.modified);
        let at = if modified > self.modified {
            self.sent + span.saturating_sub(span / 6)
        } else {
            self.sent - span.saturating_add(span / 5)
        };
        at - grain.0
    }

    /// The time by the clock that stamps objects, or before it, at `now` of the own clock.
    fn store_time(&self, now: Time) -> Duration {
        self.modified.saturating_add(now.since(self.replied))
    }
}

impl<T> ObjectRead<T> {
    /// Whether a client must take it for held.
    pub fn is_held(&self, watch: &TakeoverEvidence, grain: ClockResolution) -> bool {
        !self.may_take(watch, grain)
    }

    /// The time that is left until one look may take it over, by the headers; zero if it may.
    pub fn held_for(&self) -> Duration {
        self.term().map_or(Duration::ZERO, |term| abandoned_after(term).saturating_sub(self.age()))
    }

    /// Whether its lease is over by the headers alone, which is not enough to take it over.
    pub fn seems_expired(&self, grain: ClockResolution) -> bool {
        self.takeover_age(grain).is_some_and(|life| self.age() >= life)
    }

    /// Whether a claim may overwrite the owner: it released, or it may be taken over.
    pub(super) fn may_take(&self, watch: &TakeoverEvidence, grain: ClockResolution) -> bool {
        let (Some(term), Some(life)) = (self.term(), self.takeover_age(grain)) else { return true };
        let unchanged = watch.now.since(watch.first_seen);
        if unchanged >= life {
            return true;
        }
        // A holder that lives renews after a third of its lease, by a request that may take a quarter.
        let renewed = unchanged < term / 3 + term / 4;
        if !watch.rules.compare_store_clocks {
            return !renewed && self.age() >= life;
        }
        match watch.stamp {
            // A client that waits has the time to observe: `Date` may be wrong by minutes.
            None => watch.single_read && self.is_abandoned(term),
            Some(stamp) if !stamp.clocks_agree() => false,
            // `Date` has shown that the stamps are made by a clock that others see too; the age is counted by the stamps
            // alone, and on the own clock from the last of them, so that no `Date` of a later answer enters. A write
            // from before the version was seen would add the drift of two clocks over the time between.
            Some(stamp) => {
                let age = stamp.store_time(watch.now).saturating_sub(self.modified);
                !renewed && stamp.sent >= watch.first_seen && age >= life
            }
        }
    }

    /// The time from the object's last change on for which it is held; `None` where it is not.
    fn term(&self) -> Option<Duration> {
        let record = self.record.as_ref().filter(|record| !record.expires.is_zero())?;
        // The end that a program of the plain format wrote is by its own clock: best effort. Counted from the stamp, it
        // does not depend on `Date` as well.
        Some(record.lease.unwrap_or_else(|| record.expires.saturating_sub(self.modified)))
    }

    /// The same with what others add before they take it over.
    fn takeover_age(&self, grain: ClockResolution) -> Option<Duration> {
        let term = self.term()?;
        let own =
            self.record.as_ref().and_then(|record| record.lease).map_or(Duration::ZERO, margin);
        Some(term.saturating_add(own.max(grain.slack())))
    }

    /// The age by two clocks, which may not agree.
    fn age(&self) -> Duration {
        self.now.saturating_sub(self.modified)
    }

    fn is_abandoned(&self, term: Duration) -> bool {
        self.age() > abandoned_after(term)
    }
}
