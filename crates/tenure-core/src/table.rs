//! The lock table: holders, queues and leases of every key.
//!
//! [`LockTable`] is the engine of the lock server and of the memory store. It keeps locks (exclusive or shared) and
//! semaphores, each with a FIFO queue. A claim is granted at once if there is room *and* the queue is empty; otherwise
//! it joins the end of the queue. The table has no clock and does no I/O: `now` is an argument. Every change comes out of
//! [`poll_event`](LockTable::poll_event), and [`poll_timeout`](LockTable::poll_timeout) gives the time of the next call
//! of [`handle_timeout`](LockTable::handle_timeout). A late timer changes no answer: every operation first ends the
//! holds that have expired at its `now`.
//!
//! ```
//! use std::hash::{BuildHasherDefault, DefaultHasher};
//! use std::time::Duration;
//! use tenure_core::table::{ClaimAnswer, KeySpace, LockTable, Mode, TableClaim, TableConfig, TableEvent};
//! use tenure_core::{LockToken, Time};
//!
//! let mut number = 0;
//! let mint = move || {
//!     number += 1;
//!     LockToken::new(number, 0) // in production: an unguessable secret
//! };
//! let mut table = LockTable::new(TableConfig::default(), BuildHasherDefault::<DefaultHasher>::default(), mint);
//! let (ann, bob) = (table.connect(), table.connect());
//! let lease = Duration::from_secs(30);
//! let now = Time::ZERO;
//!
//! let claim = TableClaim { owner: ann, mode: Mode::Exclusive, lease, queue: true };
//! let ClaimAnswer::Granted(grant) = table.claim(b"printer", claim, now) else { panic!("the key is free") };
//! let claim = TableClaim { owner: bob, ..claim };
//! let ClaimAnswer::Queued(place) = table.claim(b"printer", claim, now) else { panic!("ann holds the key") };
//!
//! assert_eq!(table.release(KeySpace::Lock, b"printer", grant.token, now), Ok(()));
//! let events: Vec<TableEvent> = std::iter::from_fn(|| table.poll_event()).collect();
//! let [.., TableEvent::Granted { place: granted, owner, .. }] = &events[..] else { panic!("bob is next") };
//! assert_eq!((*granted, *owner), (Some(place), bob));
//! assert_eq!(table.poll_timeout(), Some(now + lease));
//! ```

mod bytes;
mod check;
mod engine;
mod entries;
mod index;
mod list;
mod lookup;
mod prefetch;
mod prefetched;
mod slab;
mod stats;
#[cfg(test)]
mod tests;
mod timers;
mod types;
mod view;

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::time::Duration;

use self::entries::{Entry, Member, OwnerState, Place, Stage};
use self::index::Index;
use self::list::List;
use self::prefetched::Prefetched;
use self::slab::Slab;
use self::timers::TimerHeap;
use crate::{LockToken, Time};

pub use self::bytes::KeyBytes;
pub use self::prefetched::MAX_PREFETCH;
pub use self::stats::{Histogram, TableStats};
pub use self::types::{
    ClaimAnswer, Ending, Enqueued, Grant, HoldSnapshot, Holder, KeySpace, Mint, Mode, NotHeld,
    OnDisconnect, Owner, PlaceId, Redeemed, Refusal, Renewed, RestoreConflict, Summary, TableClaim,
    TableConfig, TableEvent, TableSizes, UpcomingOp, View, Waiter,
};

/// Locks and semaphores with their holders and queues. The [module](self) documentation shows how to drive it.
///
/// `S` hashes the keys: seed it randomly if untrusted clients choose the keys. `M` makes the tokens.
///
/// A stale [`Owner`] or [`PlaceId`] is harmless: it never matches the holds or places of a later owner.
#[derive(Debug)]
pub struct LockTable<S, M> {
    config: TableConfig,
    hasher: S,
    mint: M,
    entries: Slab<Entry>,
    locks: Index,
    semaphores: Index,
    /// Holds of keys that can have several holders. They are found by their fencing number, because such a key may have
    /// a million holds.
    members: Slab<Member>,
    member_numbers: Index,
    places: Slab<Place>,
    /// Two-phase claims, found by owner and key.
    claims: Index,
    owners: Slab<OwnerState>,
    /// One alarm per slot of `entries`, for sole holds. An alarm may fire too early, never too late.
    sole_timers: TimerHeap,
    /// One alarm per hold, for holds of keys that can have several holders.
    member_timers: TimerHeap,
    /// Idle keys, the longest idle first.
    idle: List,
    /// Nothing is granted before this instant; zero if there is no embargo.
    embargo_until: Time,
    /// Probable entries of the coming operations' keys.
    prefetched: Prefetched,
    waiting: usize,
    holds: usize,
    /// Serial number of the next owner or place. It distinguishes successive users of one slot.
    serial: u64,
    events: VecDeque<TableEvent>,
    stats: TableStats,
}

impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Creates an empty table.
    pub fn new(config: TableConfig, hasher: S, mint: M) -> Self {
        const MAX_SLOTS: usize = 1 << 30;
        let config = TableConfig {
            max_keys: config.max_keys.min(MAX_SLOTS),
            max_idle_keys: config.max_idle_keys.min(MAX_SLOTS),
            ..config
        };
        Self {
            config,
            hasher,
            mint,
            entries: Slab::new(),
            locks: Index::new(),
            semaphores: Index::new(),
            members: Slab::new(),
            member_numbers: Index::new(),
            places: Slab::new(),
            claims: Index::new(),
            owners: Slab::new(),
            sole_timers: TimerHeap::new(),
            member_timers: TimerHeap::new(),
            idle: List::EMPTY,
            embargo_until: Time::ZERO,
            prefetched: Prefetched::NOTHING,
            waiting: 0,
            holds: 0,
            serial: 0,
            events: VecDeque::new(),
            stats: TableStats::default(),
        }
    }

    /// Grants nothing before `until`, for a table that may have lost holds that last until then. Until then every claim
    /// waits, in the order of arrival. [Restored](Self::restore) holds stay valid and can be renewed and released.
    pub fn embargo_until(&mut self, until: Time) {
        self.embargo_until = self.embargo_until.max(until);
    }

    /// Adds an owner.
    pub fn connect(&mut self) -> Owner {
        let serial = self.next_serial();
        let state = OwnerState { serial, holds: Slab::new(), places: Slab::new() };
        Owner { serial, slot: self.owners.insert(state) }
    }

    /// Removes an owner. The cost grows with the most holds and places that it ever had at one time, not with the
    /// table.
    ///
    /// Its places are removed first, then its holds are treated as `on_disconnect` says, both in the order of creation.
    pub fn disconnect(&mut self, owner: Owner, on_disconnect: OnDisconnect, now: Time) {
        self.expire(now);
        if let Some(slot) = self.owner_slot(owner) {
            self.remove_owner(slot, on_disconnect, now);
        }
    }

    /// Claims a key: granted, queued, or neither.
    ///
    /// Claims are not re-entrant: an owner that claims a key it holds waits behind its own hold.
    pub fn claim(&mut self, key: &[u8], claim: TableClaim, now: Time) -> ClaimAnswer {
        self.expire(now);
        let claim = TableClaim { mode: claim.mode.normalized(), ..claim };
        let found = self.find(claim.mode.space(), key);
        let Some(owner) = self.owner_slot(claim.owner) else {
            return ClaimAnswer::Refused(Refusal::UnknownOwner);
        };
        let id = match self.try_use_key(key, found, claim.mode) {
            Ok(id) => id,
            Err(refusal) => return ClaimAnswer::Refused(refusal),
        };
        if self.is_free(id, claim.mode) {
            let hold_ref = self.grant(id, owner, claim.mode, nanos(claim.lease), now);
            return ClaimAnswer::Granted(self.emit_granted(hold_ref, None, claim.mode));
        }
        if !claim.queue {
            self.retire_if_idle(id, now);
            return ClaimAnswer::Contended;
        }
        match self.join(id, owner, claim, false, now) {
            Ok(place) => ClaimAnswer::Queued(place),
            Err(refusal) => {
                self.retire_if_idle(id, now);
                ClaimAnswer::Refused(refusal)
            }
        }
    }

    /// First phase of a two-phase claim: joins the queue, or is granted.
    ///
    /// The table keeps the claim under its owner and key, also while it is granted. It ends when it is redeemed,
    /// released by token or abandoned, or when its owner disconnects.
    pub fn enqueue(&mut self, key: &[u8], claim: TableClaim, now: Time) -> Enqueued {
        self.expire(now);
        let claim = TableClaim { mode: claim.mode.normalized(), ..claim };
        let found = self.find(claim.mode.space(), key);
        let Some(owner) = self.owner_slot(claim.owner) else {
            return Enqueued::Refused(Refusal::UnknownOwner);
        };
        if found.id().is_some_and(|id| self.two_phase_claim(owner, id).is_some()) {
            return Enqueued::AlreadyEnqueued;
        }
        let id = match self.try_use_key(key, found, claim.mode) {
            Ok(id) => id,
            Err(refusal) => return Enqueued::Refused(refusal),
        };
        if self.is_free(id, claim.mode) {
            let hold_ref = self.grant(id, owner, claim.mode, nanos(claim.lease), now);
            let place = self.add_place(id, owner, claim, Stage::Granted(hold_ref), true, now);
            self.hold_mut(hold_ref).place = place;
            return Enqueued::Granted(self.emit_granted(hold_ref, None, claim.mode));
        }
        match self.join(id, owner, claim, true, now) {
            Ok(place) => Enqueued::Queued(place),
            Err(refusal) => {
                self.retire_if_idle(id, now);
                Enqueued::Refused(refusal)
            }
        }
    }

    /// Second phase of a two-phase claim: takes the grant, with a lease that begins now, or returns the state of the
    /// claim.
    pub fn redeem(&mut self, owner: Owner, space: KeySpace, key: &[u8], now: Time) -> Redeemed {
        self.expire(now);
        let found = self.find(space, key).id();
        let claim = self
            .owner_slot(owner)
            .zip(found)
            .and_then(|(owner, id)| Some((id, self.two_phase_claim(owner, id)?)));
        let Some((id, place)) = claim else { return Redeemed::NotEnqueued };
        match self.places[place].stage {
            Stage::Waiting => Redeemed::Waiting(self.place_id(place)),
            Stage::Lapsed => {
                self.remove_place(place);
                self.retire_if_idle(id, now);
                Redeemed::LeaseExpired
            }
            Stage::Granted(hold_ref) => {
                self.remove_place(place);
                self.renew_hold(hold_ref, self.hold(hold_ref).lease, now);
                Redeemed::Granted(self.grant_of(hold_ref))
            }
        }
    }

    /// Abandons a place or a two-phase claim. Returns true if it existed.
    ///
    /// A grant that was not redeemed is released and passes to the next waiter. A place of [`claim`](Self::claim) ends
    /// when it is granted: release its hold instead.
    pub fn abandon(&mut self, place: PlaceId, now: Time) -> bool {
        self.expire(now);
        let Some(slot) = self.place_slot(place) else { return false };
        let Place { stage, key, .. } = self.places[slot];
        match stage {
            Stage::Waiting => {
                self.leave(slot);
                self.promote(key, now);
            }
            Stage::Granted(hold_ref) => self.end(hold_ref, Ending::Abandoned, now),
            Stage::Lapsed => {
                self.remove_place(slot);
                self.retire_if_idle(key, now);
            }
        }
        true
    }

    /// Number of waiters before this place; `None` if it is not waiting. Walks the queue.
    pub fn waiters_ahead(&self, place: PlaceId) -> Option<usize> {
        let slot = self.place_slot(place)?;
        (self.places[slot].stage == Stage::Waiting).then(|| self.count_waiters_ahead(slot))
    }

    /// Renews a hold: it now ends `lease` after `now`.
    ///
    /// # Errors
    ///
    /// [`NotHeld`] if the token proves no hold of this key.
    pub fn renew(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
        lease: Duration,
        now: Time,
    ) -> Result<Renewed, NotHeld> {
        self.expire(now);
        let (id, hold_ref) = self.hold_by_token(space, key, token).ok_or(NotHeld)?;
        let left = self.hold(hold_ref).ends.since(now);
        let ends = self.renew_hold(hold_ref, nanos(lease), now);
        self.stats.renewed += 1;
        self.stats.lease_left.record(left);
        Ok(Renewed { ends, waiters: self.entries[id].queue.len() })
    }

    /// Releases a hold and passes the key to the next waiter.
    ///
    /// # Errors
    ///
    /// [`NotHeld`] if the token proves no hold of this key.
    pub fn release(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
        now: Time,
    ) -> Result<(), NotHeld> {
        self.expire(now);
        let (_, hold_ref) = self.hold_by_token(space, key, token).ok_or(NotHeld)?;
        self.end(hold_ref, Ending::Released, now);
        Ok(())
    }

    /// Detaches a hold from its owner: it lasts until it is released or its lease ends, even if the owner disconnects.
    ///
    /// # Errors
    ///
    /// [`NotHeld`] if the token proves no hold of this key.
    pub fn detach(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
        now: Time,
    ) -> Result<(), NotHeld> {
        self.expire(now);
        let (_, hold_ref) = self.hold_by_token(space, key, token).ok_or(NotHeld)?;
        self.detach_hold(hold_ref);
        Ok(())
    }

    /// Ends the hold with this fencing number on an operator's request, notifies its owner, and returns that owner.
    ///
    /// # Errors
    ///
    /// [`NotHeld`] if no hold of this key has the number.
    pub fn evict(
        &mut self,
        space: KeySpace,
        key: &[u8],
        number: u64,
        now: Time,
    ) -> Result<Option<Owner>, NotHeld> {
        self.expire(now);
        let found = self.find(space, key).id();
        let hold_ref = found.and_then(|id| self.hold_by_number(id, number)).ok_or(NotHeld)?;
        let owner = self.owner(self.hold(hold_ref).owner);
        self.end(hold_ref, Ending::Evicted, now);
        Ok(owner)
    }

    /// Restores a hold that was granted before a restart. It has no owner.
    ///
    /// [`TableConfig::max_keys`] does not apply: a hold that was granted is kept. The [`Mint`] must ensure that later
    /// numbers are larger.
    ///
    /// # Errors
    ///
    /// [`RestoreConflict`] if the hold contradicts holds or waiters that are in the table.
    pub fn restore(
        &mut self,
        key: &[u8],
        mode: Mode,
        token: LockToken,
        ends: Time,
        now: Time,
    ) -> Result<(), RestoreConflict> {
        self.expire(now);
        let found = self.find(mode.space(), key);
        if let Some(id) = found.id()
            && (self.entries[id].limit_mismatch(mode)
                || !self.is_vacant(id, mode)
                || self.hold_by_number(id, token.number()).is_some())
        {
            return Err(RestoreConflict);
        }
        let id = self.use_key(key, found, mode);
        self.insert_hold(id, mode, Self::ownerless(token, ends, now));
        Ok(())
    }

    /// Ends holds that have expired at `now`, and drops keys that have been idle long enough.
    pub fn handle_timeout(&mut self, now: Time) {
        self.expire(now);
        self.drop_idle(now);
    }

    /// Instant at which to call [`handle_timeout`](Self::handle_timeout); `None` if no timer is set.
    ///
    /// The instant may be too early, never too late. A call that is too early is harmless: it ends nothing, and the
    /// instant is a later one afterwards.
    pub fn poll_timeout(&self) -> Option<Time> {
        let ends = self.next_alarm().map(|(_, alarm)| alarm.at);
        let embargo = Some(self.embargo_until).filter(|until| *until > Time::ZERO);
        let due = ends.into_iter().chain(self.idle_until()).chain(embargo);
        due.min().filter(|at| *at < Time::MAX)
    }

    /// Removes the oldest event. Call this after every operation until it returns `None`.
    pub fn poll_event(&mut self) -> Option<TableEvent> {
        let event = self.events.pop_front();
        if self.events.is_empty() && self.events.capacity() > MAX_SPARE_EVENTS {
            self.events.shrink_to(MAX_SPARE_EVENTS);
        }
        event
    }

    /// Counters since the table was created.
    pub fn stats(&self) -> &TableStats {
        &self.stats
    }

    /// Current sizes.
    pub fn sizes(&self) -> TableSizes {
        TableSizes {
            keys: self.keys_in_use(),
            idle_keys: self.idle.len() as usize,
            holds: self.holds,
            waiters: self.waiting,
            owners: self.owners.len(),
        }
    }
}

/// Event capacity that is kept; capacity beyond it, from a burst, is freed.
const MAX_SPARE_EVENTS: usize = 4096;

/// Lease in nanoseconds, saturating.
fn nanos(lease: Duration) -> u64 {
    u64::try_from(lease.as_nanos()).unwrap_or(u64::MAX)
}

fn after(now: Time, lease: u64) -> Time {
    Time::from_nanos(now.as_nanos().saturating_add(lease))
}
