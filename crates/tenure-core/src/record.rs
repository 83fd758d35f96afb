//! The compare-and-swap record: who holds a key, on stores that keep one value a key and write it only at a version
//! that the writer names.
//!
//! Everything here is a decision: given the record, the version it was read at and who asks, what to write. The write
//! itself, conditional on that version, is what excludes others; a decision made on an old record costs a refused write
//! and nothing else.

use std::time::Duration;

use crate::observe::Observation;
use crate::table::Mode;
use crate::{Rules, Time};

/// The value of a key. A record without holders is a free key: it keeps the fence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CasRecord<T> {
    /// What the numbers of grants count within: a later life of the store has a larger one.
    pub epoch: u64,
    /// The largest number of a grant of this key that the writer knew of.
    pub fence: u64,
    /// The last place in the queue that was served, where there is a queue: this one and those before it are void.
    pub served: u64,
    /// Who holds it, in the order of their grants.
    pub holders: Vec<RecordHolder<T>>,
}

/// One who holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHolder<T> {
    /// The claim that was granted.
    pub claim: u128,
    /// How it is held.
    pub mode: Mode,
    /// The number of the grant. `None` where it is that of the version which this record was written as: the writer
    /// could not know it.
    pub grant: Option<u64>,
    /// Grows with each renewal.
    pub renewal_count: u64,
    /// How long the hold lasts from a beat on; a hold without is never taken over.
    pub lease: Option<Duration>,
    /// For how long it had been held when this was written, on the holder's own clock.
    pub held: Duration,
    /// Who, for people to read.
    pub by: T,
}

/// What somebody asks for.
#[derive(Clone, Debug)]
pub struct RecordClaim<'a, T> {
    /// Names the claim over all its sendings.
    pub claim: u128,
    /// How to hold it.
    pub mode: Mode,
    /// How long a hold lasts unless renewed.
    pub lease: Duration,
    /// Who asks.
    pub by: &'a T,
}

/// What becomes of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordDecision<'a, T> {
    /// It was granted before: an earlier sending landed.
    AlreadyGranted(&'a RecordHolder<T>),
    /// Write this, at the version that was read: if that succeeds, it is granted.
    Write(CasRecord<T>),
    /// This one is in the way.
    Contended(&'a RecordHolder<T>),
    /// Those who hold the semaphore hold one of another size.
    LimitMismatch(u32),
}

impl<T> Default for CasRecord<T> {
    fn default() -> Self {
        Self { epoch: 0, fence: 0, served: 0, holders: Vec::new() }
    }
}

impl<T: Clone> CasRecord<T> {
    /// Decides a claim. `over` says of a holder whether it may be taken over.
    pub fn claim(
        &self,
        ask: &RecordClaim<'_, T>,
        version: u64,
        over: impl Fn(&RecordHolder<T>) -> bool,
    ) -> RecordDecision<'_, T> {
        if let Some(before) = self.holder(ask.claim) {
            return RecordDecision::AlreadyGranted(before);
        }
        let alive: Vec<_> = self.holders.iter().filter(|holder| !over(holder)).collect();
        let beside = |holder: &&&RecordHolder<T>| match (ask.mode, holder.mode) {
            (Mode::Shared, Mode::Shared) => true,
            (Mode::Slot { limit }, Mode::Slot { .. }) => alive.len() < limit as usize,
            _ => false,
        };
        if let Mode::Slot { limit } = ask.mode {
            let other = alive.iter().find_map(|holder| match holder.mode {
                Mode::Slot { limit: other } if other != limit => Some(other),
                _ => None,
            });
            if let Some(other) = other {
                return RecordDecision::LimitMismatch(other);
            }
        }
        if let Some(holder) = alive.iter().find(|holder| !beside(holder)) {
            return RecordDecision::Contended(holder);
        }
        let mut next = self.rewritten(version, |holder| !over(holder));
        next.holders.push(RecordHolder {
            claim: ask.claim,
            mode: ask.mode,
            grant: None,
            renewal_count: 0,
            lease: Some(ask.lease),
            held: Duration::ZERO,
            by: ask.by.clone(),
        });
        RecordDecision::Write(next)
    }

    /// What renews the hold of `claim`, from the version that was read; `None` where it is not held.
    #[must_use]
    pub fn renew(
        &self,
        claim: u128,
        version: u64,
        lease: Duration,
        held: Duration,
    ) -> Option<Self> {
        self.holder(claim)?;
        let mut next = self.rewritten(version, |_| true);
        for holder in next.holders.iter_mut().filter(|holder| holder.claim == claim) {
            (holder.renewal_count, holder.lease, holder.held) =
                (holder.renewal_count + 1, Some(lease), held);
        }
        Some(next)
    }

    /// What gives the hold of `claim` back; `None` where it is not held.
    #[must_use]
    pub fn release(&self, claim: u128, version: u64) -> Option<Self> {
        self.holder(claim)?;
        Some(self.rewritten(version, |holder| holder.claim != claim))
    }

    /// The hold of a claim.
    pub fn holder(&self, claim: u128) -> Option<&RecordHolder<T>> {
        self.holders.iter().find(|holder| holder.claim == claim)
    }

    /// The record to write over this one, which was read at `version`: what that version was the number of is written
    /// down now, before the version is gone.
    fn rewritten(&self, version: u64, keep: impl Fn(&RecordHolder<T>) -> bool) -> Self {
        let mut next = self.clone();
        for holder in &mut next.holders {
            let number = *holder.grant.get_or_insert(version);
            next.fence = next.fence.max(number);
        }
        next.holders.retain(keep);
        next
    }
}

impl<T> RecordHolder<T> {
    /// The number of the grant, in a record that was read at `version`.
    pub fn number(&self, version: u64) -> u64 {
        self.grant.unwrap_or(version)
    }
}

/// What a challenger has seen of the holders of one record, on its own clock.
#[derive(Clone, Debug, Default)]
pub struct HolderObservations(Vec<(u128, Observation<u64>, Time)>);

impl HolderObservations {
    /// Notes what a read showed that was sent at `sent` and answered at `replied`.
    pub fn observe<T>(&mut self, record: &CasRecord<T>, sent: Time, replied: Time) {
        self.0.retain(|(claim, ..)| record.holders.iter().any(|holder| holder.claim == *claim));
        for holder in &record.holders {
            let at = self.0.iter().position(|(claim, ..)| *claim == holder.claim);
            let at = at.unwrap_or_else(|| {
                self.0.push((holder.claim, Observation::new(Rules::ALL), Time::MAX));
                self.0.len() - 1
            });
            let (_, seen, until) = &mut self.0[at];
            let ends = |lease| seen.observe(holder.renewal_count, lease, sent, replied);
            *until = holder.lease.map_or(Time::MAX, ends);
        }
    }

    /// From when on a hold may be taken over, unless it is renewed before; never, if it was not seen.
    pub fn takeover_at(&self, claim: u128) -> Time {
        self.0.iter().find(|(known, ..)| *known == claim).map_or(Time::MAX, |(.., until)| *until)
    }

    /// Whether a hold may be taken over.
    pub fn may_take_over(&self, claim: u128, now: Time) -> bool {
        let until = self.takeover_at(claim);
        until != Time::MAX && now >= until
    }

    /// When the next hold may be taken over that may not yet.
    pub fn next_takeover(&self, now: Time) -> Time {
        let ends = self.0.iter().map(|(.., until)| *until).filter(|until| *until > now);
        ends.min().unwrap_or(Time::MAX)
    }
}

/// How old a record must be by the store's own timestamps to be taken over by who has not watched it: no live holder
/// leaves it alone for so long, and no clock of a store is that wrong beside another of the same store.
pub fn abandoned_after(lease: Duration) -> Duration {
    lease.saturating_mul(3).saturating_add(Duration::from_secs(30))
}

/// Whether a record of this age by the store's own timestamps may be taken over by a challenger that has not watched it.
///
/// Both ends of the age are read from clocks of servers, and these can be two servers: the leader that took the last
/// renewal and its successor. Besides, the challenger counts the store's time on by its own clock for a while
/// ([`StoreTime`]). The allowance of [`abandoned_after`] has to cover both errors.
pub fn is_abandoned(age: Duration, lease: Duration, rules: Rules) -> bool {
    age > if rules.distrust_store_clocks { abandoned_after(lease) } else { lease }
}

/// The store's own time: read from one reply, and counted on from there on the client's own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreTime {
    /// What the store told, in nanoseconds.
    reported: u64,
    /// When that was heard.
    read_at: Time,
}

impl StoreTime {
    /// For how long it is counted on before the store is asked again: two clocks within 8.3 % of true time drift apart
    /// by 10 s meanwhile, which the allowance of [`abandoned_after`] covers.
    pub const MAX_AGE: Duration = Duration::from_secs(60);

    /// The store told this time, in nanoseconds, and it was heard now.
    pub const fn new(reported: u64, read_at: Time) -> Self {
        Self { reported, read_at }
    }

    /// The store's time now, or what it is at least, in nanoseconds.
    pub fn at(&self, now: Time) -> u64 {
        let passed = u64::try_from(now.since(self.read_at).as_nanos()).unwrap_or(u64::MAX);
        self.reported.saturating_add(passed)
    }

    /// Whether to ask the store again.
    pub fn is_stale(&self, now: Time) -> bool {
        now.since(self.read_at) > Self::MAX_AGE
    }
}

#[cfg(test)]
mod tests;
