//! Decisions: the next record after a claim, a renewal or a release.

use std::time::Duration;

use crate::observe::Observation;
use crate::table::Mode;
use crate::{Rules, Time};

/// Value of a key. A record without holders is a free key; it keeps the fencing number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CasRecord<T> {
    /// Epoch of the grant numbers: it is larger in a later incarnation of the store.
    pub epoch: u64,
    /// Largest grant number of this key that the writer knew of.
    pub fence: u64,
    /// Last place in the queue that was served, if there is a queue. This place and all before it are void.
    pub served: u64,
    /// Holders, in the order of their grants.
    pub holders: Vec<RecordHolder<T>>,
}

/// Holder in a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHolder<T> {
    /// Claim that was granted.
    pub claim: u128,
    /// Kind of hold.
    pub mode: Mode,
    /// Number of the grant. `None` stands for the version that the store gave to the write of this record, because the
    /// writer could not know it in advance.
    pub grant_number: Option<u64>,
    /// Number that each renewal raises, by at least one.
    pub renewal_count: u64,
    /// Time that the hold lasts from each renewal on. A hold without a lease is never taken over.
    pub lease: Option<Duration>,
    /// Age of the hold when this was written, on the holder's own clock.
    pub held_for: Duration,
    /// Description of the holder, for display.
    pub by: T,
}

/// Claim on a key.
#[derive(Clone, Debug)]
pub struct RecordClaim<'a, T> {
    /// Id of the claim, the same in every attempt.
    pub id: u128,
    /// Kind of hold.
    pub mode: Mode,
    /// Time that a hold lasts unless renewed.
    pub lease: Duration,
    /// Description of the claimant.
    pub by: &'a T,
}

/// Renewal of a hold.
#[derive(Clone, Copy, Debug)]
pub struct Renewal {
    /// Number of the grant, if the record keeps it. A claim can be granted several times. If the store lost the last
    /// grant, an earlier one may be back in the record: its token is another, and later grants may repeat ours.
    pub number: Option<u64>,
    /// Largest renewal count that any hold of the claim has tried to write. The new count is above it, so that no two attempts
    /// write the same: a count that is found later shows which attempt took effect, and thus how old the renewal is. An
    /// attempt without a reply may take effect long after the next one was sent.
    pub attempted: u64,
    /// Time that the hold lasts from now on.
    pub lease: Duration,
    /// Age of the hold on the holder's own clock.
    pub held_for: Duration,
}

/// Decision on a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordDecision<'a, T> {
    /// Already granted: an earlier attempt of the claim took effect.
    AlreadyGranted(&'a RecordHolder<T>),
    /// Write this record, conditional on the version that was read. Success is the grant.
    Write(CasRecord<T>),
    /// This holder prevents the grant.
    Contended(&'a RecordHolder<T>),
    /// The semaphore is held with another limit.
    LimitMismatch(u32),
}

impl<T> Default for CasRecord<T> {
    fn default() -> Self {
        Self { epoch: 0, fence: 0, served: 0, holders: Vec::new() }
    }
}

impl<T> CasRecord<T> {
    /// Hold of a claim.
    pub fn holder(&self, claim: u128) -> Option<&RecordHolder<T>> {
        self.holders.iter().find(|holder| holder.claim == claim)
    }
}

impl<T: Clone> CasRecord<T> {
    /// Decides a claim. `may_take_over` returns true for a holder that may be taken over.
    pub fn claim(
        &self,
        claim: &RecordClaim<'_, T>,
        version: u64,
        may_take_over: impl Fn(&RecordHolder<T>) -> bool,
    ) -> RecordDecision<'_, T> {
        if let Some(before) = self.holder(claim.id) {
            return RecordDecision::AlreadyGranted(before);
        }
        let live: Vec<_> = self.holders.iter().filter(|holder| !may_take_over(holder)).collect();
        let compatible = |holder: &&&RecordHolder<T>| match (claim.mode, holder.mode) {
            (Mode::Shared, Mode::Shared) => true,
            (Mode::Slot { limit }, Mode::Slot { .. }) => live.len() < limit as usize,
            _ => false,
        };
        if let Mode::Slot { limit } = claim.mode {
            let other = live.iter().find_map(|holder| match holder.mode {
                Mode::Slot { limit: other } if other != limit => Some(other),
                _ => None,
            });
            if let Some(other) = other {
                return RecordDecision::LimitMismatch(other);
            }
        }
        if let Some(holder) = live.iter().find(|holder| !compatible(holder)) {
            return RecordDecision::Contended(holder);
        }
        let mut next = self.rewritten(version, |holder| !may_take_over(holder));
        next.holders.push(RecordHolder {
            claim: claim.id,
            mode: claim.mode,
            grant_number: None,
            renewal_count: 0,
            lease: Some(claim.lease),
            held_for: Duration::ZERO,
            by: claim.by.clone(),
        });
        RecordDecision::Write(next)
    }

    /// Record that renews the hold of `claim`, from the version that was read; `None` if `claim` holds nothing, or if
    /// its renewal count cannot be raised.
    #[must_use]
    pub fn renew(&self, claim: u128, version: u64, renewal: Renewal) -> Option<Self> {
        let Renewal { number, attempted, lease, held_for } = renewal;
        let held = self.holder(claim)?;
        if number.is_some_and(|number| number != held.number(version)) {
            return None;
        }
        let mut next = self.rewritten(version, |_| true);
        for holder in next.holders.iter_mut().filter(|holder| holder.claim == claim) {
            // No tenure counts that far: another program wrote the record. The hold counts as lost, because with an
            // unchanged count a challenger would see no renewal and take the hold over.
            holder.renewal_count = holder.renewal_count.max(attempted).checked_add(1)?;
            (holder.lease, holder.held_for) = (Some(lease), held_for);
        }
        Some(next)
    }

    /// Record that releases the hold of `claim`; `None` if `claim` holds nothing.
    #[must_use]
    pub fn release(&self, claim: u128, version: u64) -> Option<Self> {
        self.holder(claim)?;
        Some(self.rewritten(version, |holder| holder.claim != claim))
    }

    /// Copy of this record, which was read at `version`, with the holders that `keep` accepts. A holder without a grant
    /// number has the number `version`. The next write changes the version, so the number is stored explicitly now.
    fn rewritten(&self, version: u64, keep: impl Fn(&RecordHolder<T>) -> bool) -> Self {
        let mut next = self.clone();
        for holder in &mut next.holders {
            let number = *holder.grant_number.get_or_insert(version);
            next.fence = next.fence.max(number);
        }
        next.holders.retain(keep);
        next
    }
}

impl<T> RecordHolder<T> {
    /// Number of the grant, in a record that was read at `version`.
    pub fn number(&self, version: u64) -> u64 {
        self.grant_number.unwrap_or(version)
    }
}

/// Observations of the holders of one record, on the challenger's own clock.
#[derive(Clone, Debug, Default)]
pub struct HolderObservations {
    /// Claim, its observed state, and the instant from which its hold may be taken over.
    seen: Vec<(u128, Observation<HoldState>, Time)>,
    pub(super) rules: Rules,
}

/// State of a hold that each renewal changes: the grant number and the renewal count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HoldState(u64, u64);

impl HolderObservations {
    /// No holder seen yet.
    pub const fn new(rules: Rules) -> Self {
        Self { seen: Vec::new(), rules }
    }

    /// Records a read that was sent at `sent`, answered at `replied`, and showed the record at `version`.
    pub fn observe<T>(&mut self, record: &CasRecord<T>, version: u64, sent: Time, replied: Time) {
        self.seen.retain(|(claim, ..)| record.holders.iter().any(|holder| holder.claim == *claim));
        for holder in &record.holders {
            let at = self.seen.iter().position(|(claim, ..)| *claim == holder.claim);
            let at = at.unwrap_or_else(|| {
                self.seen.push((holder.claim, Observation::new(self.rules), Time::MAX));
                self.seen.len() - 1
            });
            let (_, seen, until) = &mut self.seen[at];
            // With the grant number: a claim whose grant came too late is released and granted again. It then has the
            // same renewal count as before, and a challenger that read nothing in between would take it for unchanged.
            let state = HoldState(holder.number(version), holder.renewal_count);
            let takeover_at = |lease| seen.observe(state, lease, sent, replied);
            *until = holder.lease.map_or(Time::MAX, takeover_at);
        }
    }

    /// Instant from which a hold may be taken over, unless it is renewed before; [`Time::MAX`] if it was not seen.
    pub fn takeover_at(&self, claim: u128) -> Time {
        self.seen.iter().find(|(known, ..)| *known == claim).map_or(Time::MAX, |(.., until)| *until)
    }

    /// True if a hold may be taken over.
    pub fn may_take_over(&self, claim: u128, now: Time) -> bool {
        let until = self.takeover_at(claim);
        until != Time::MAX && now >= until
    }

    /// Next instant after `now` at which a hold may be taken over.
    pub fn next_takeover(&self, now: Time) -> Time {
        let ends = self.seen.iter().map(|(.., until)| *until).filter(|until| *until > now);
        ends.min().unwrap_or(Time::MAX)
    }
}

/// Age at which a record may be taken over without an observation. The age is measured by the store's own timestamps.
/// No live holder leaves its record unchanged for so long, and no two clocks of one store differ by so much.
pub fn abandoned_after(lease: Duration) -> Duration {
    lease.saturating_mul(3).saturating_add(Duration::from_secs(30))
}

/// True if a record of this age by the store's own timestamps may be taken over by a challenger that has not observed
/// it.
///
/// The age is the difference of two server timestamps. These can come from two servers: the leader that accepted the
/// last renewal, and its successor. In addition the challenger extrapolates the store's time by its own clock for a
/// while ([`StoreTime`]). The allowance of [`abandoned_after`] must cover both errors.
pub fn is_abandoned(age: Duration, lease: Duration, rules: Rules) -> bool {
    age > if rules.distrust_store_clocks { abandoned_after(lease) } else { lease }
}

/// Store's own time: read from one reply, then extrapolated on the client's own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreTime {
    /// Time that the store reported, in nanoseconds.
    reported: u64,
    /// Instant at which the reply arrived.
    read_at: Time,
}

impl StoreTime {
    /// Time for which a report is extrapolated before the store is asked again. Two clocks within 8.3 % of true time
    /// drift apart by 10 s in this time, which the allowance of [`abandoned_after`] covers.
    pub const MAX_AGE: Duration = Duration::from_secs(60);

    /// Time in nanoseconds that the store reported in a reply that arrived at `read_at`.
    pub const fn new(reported: u64, read_at: Time) -> Self {
        Self { reported, read_at }
    }

    /// Lower bound of the store's time at `now`, in nanoseconds.
    pub fn at(&self, now: Time) -> u64 {
        let passed = u64::try_from(now.since(self.read_at).as_nanos()).unwrap_or(u64::MAX);
        self.reported.saturating_add(passed)
    }

    /// True if the store must be asked again.
    pub fn is_stale(&self, now: Time) -> bool {
        now.since(self.read_at) > Self::MAX_AGE
    }
}

#[cfg(test)]
mod tests;
