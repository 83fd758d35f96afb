//! The lock table: who holds what, who waits for it, and until when.
//!
//! [`LockTable`] is the heart of the lock server and of the memory store. It keeps locks (exclusive or shared) and
//! semaphores, each with a queue, and decides every claim: granted at once if there is room *and* nobody waits, else at
//! the end of the queue. It has no clock and does no I/O: `now` is an argument, what happens to others comes out of
//! [`poll_event`](LockTable::poll_event), and [`poll_timeout`](LockTable::poll_timeout) says when to call
//! [`handle_timeout`](LockTable::handle_timeout). A late timer changes no answer: every operation first ends the holds
//! that are over at its `now`.
//!
//! ```
//! use std::hash::{BuildHasherDefault, DefaultHasher};
//! use std::time::Duration;
//! use tenure_core::table::{Asked, Config, Event, LockTable, Mode, Space, Want};
//! use tenure_core::{LockToken, Time};
//!
//! let mut number = 0;
//! let mint = move || {
//!     number += 1;
//!     LockToken::new(number, 0) // in earnest: a secret that nobody can guess
//! };
//! let mut table = LockTable::new(Config::default(), BuildHasherDefault::<DefaultHasher>::default(), mint);
//! let (ann, bob) = (table.connect(), table.connect());
//! let lease = Duration::from_secs(30);
//! let now = Time::ZERO;
//!
//! let want = Want { owner: ann, mode: Mode::Exclusive, lease, queue: true };
//! let Asked::Granted(grant) = table.ask(b"printer", want, now) else { panic!("it is free") };
//! let Asked::Queued(place) = table.ask(b"printer", Want { owner: bob, ..want }, now) else { panic!("ann has it") };
//!
//! assert_eq!(table.release(Space::Lock, b"printer", grant.token, now), Ok(()));
//! assert!(matches!(table.poll_event(), Some(Event::Granted { place: turn, .. }) if turn == place));
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
use self::prefetch::Prefetched;
use self::slab::Slab;
use self::timers::TimerHeap;
use crate::{LockToken, Time};

pub use self::bytes::KeyBytes;
pub use self::prefetch::MAX_PREFETCH;
pub use self::stats::{Histogram, TableStats};
pub use self::types::{
    ClaimAnswer, Ending, Enqueued, Grant, HoldSnapshot, Holder, KeySpace, Mint, Mode, NotHeld,
    OnDisconnect, Owner, PlaceId, Redeemed, Refusal, Renewed, RestoreConflict, Summary, TableClaim,
    TableConfig, TableEvent, TableSizes, UpcomingOp, View, Waiter,
};

/// Locks and semaphores with their holders and queues. The [module](self) tells how it is driven.
///
/// `S` hashes the keys: seed it with randomness where strangers choose them. `M` makes the tokens.
///
/// An [`Owner`] or a [`PlaceId`] that is over is harmless: it never reaches another's holds or places.
#[derive(Debug)]
pub struct LockTable<S, M> {
    config: TableConfig,
    hasher: S,
    mint: M,
    entries: Slab<Entry>,
    locks: Index,
    semaphores: Index,
    /// The holds of keys that have several, found by their number: such a key may have a million.
    members: Slab<Member>,
    member_numbers: Index,
    places: Slab<Place>,
    /// The two-phase claims, found by owner and key.
    claims: Index,
    owners: Slab<OwnerState>,
    /// One alarm a slot of `entries`, for sole holds. It may go off too early, never too late.
    sole_timers: TimerHeap,
    /// One alarm a hold, for the holds of crowds.
    member_timers: TimerHeap,
    /// Keys that nobody uses, the longest unused first.
    idle: List,
    /// Until then nothing is granted; zero where nothing stands in the way.
    embargo_until: Time,
    /// Where the keys of the coming operations were seen.
    prefetched: Prefetched,
    waiting: usize,
    holds: usize,
    /// Tells owners and places apart that had the same slot one after the other.
    serial: u64,
    events: VecDeque<TableEvent>,
    stats: TableStats,
}

impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// An empty table.
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

    /// Grants nothing before `until`: for a table that may have forgotten holds which last until then. Whoever asks
    /// waits, in the order of asking; what is [restored](Self::restore) stands, and can be renewed and released.
    pub fn embargo_until(&mut self, until: Time) {
        self.embargo_until = self.embargo_until.max(until);
    }

    /// A new owner.
    pub fn connect(&mut self) -> Owner {
        let serial = self.next_serial();
        let party = OwnerState { serial, holds: Slab::new(), places: Slab::new() };
        Owner { serial, slot: self.owners.insert(party) }
    }

    /// The end of an owner, at a cost that grows with what it had at once, not with the table.
    ///
    /// Its places go, then its holds as `leave` says, each in the order in which it came by them.
    pub fn disconnect(&mut self, owner: Owner, leave: OnDisconnect, now: Time) {
        self.expire(now);
        if let Some(slot) = self.owner_slot(owner) {
            self.remove_owner(slot, leave, now);
        }
    }

    /// Asks for a key: granted, queued, or neither.
    ///
    /// It is not re-entrant: an owner that asks again waits behind itself.
    pub fn claim(&mut self, key: &[u8], want: TableClaim, now: Time) -> ClaimAnswer {
        self.expire(now);
        let found = self.find(want.mode.space(), key);
        let Some(owner) = self.owner_slot(want.owner) else {
            return ClaimAnswer::Refused(Refusal::UnknownOwner);
        };
        let id = match self.open(key, found, want.mode) {
            Ok(id) => id,
            Err(refusal) => return ClaimAnswer::Refused(refusal),
        };
        if self.is_free(id, want.mode) {
            let at = self.grant(id, owner, want.mode, nanos(want.lease), now);
            return ClaimAnswer::Granted(self.grant_of(at));
        }
        if !want.queue {
            self.retire_if_idle(id, now);
            return ClaimAnswer::Contended;
        }
        match self.join(id, owner, want, false, now) {
            Ok(place) => ClaimAnswer::Queued(place),
            Err(refusal) => {
                self.retire_if_idle(id, now);
                ClaimAnswer::Refused(refusal)
            }
        }
    }

    /// The first phase of a claim in two: joins the queue, or is granted.
    ///
    /// The claim is remembered under its owner and key, also while it is granted, until it is redeemed, released by
    /// token, abandoned, or its owner disconnects.
    pub fn enqueue(&mut self, key: &[u8], want: TableClaim, now: Time) -> Enqueued {
        self.expire(now);
        let found = self.find(want.mode.space(), key);
        let Some(owner) = self.owner_slot(want.owner) else {
            return Enqueued::Refused(Refusal::UnknownOwner);
        };
        if found.id().is_some_and(|id| self.two_phase_claim(owner, id).is_some()) {
            return Enqueued::AlreadyEnqueued;
        }
        let id = match self.open(key, found, want.mode) {
            Ok(id) => id,
            Err(refusal) => return Enqueued::Refused(refusal),
        };
        if self.is_free(id, want.mode) {
            let at = self.grant(id, owner, want.mode, nanos(want.lease), now);
            let place = self.add_place(id, owner, want, Stage::Granted(at), true, now);
            self.hold_mut(at).place = place;
            return Enqueued::Granted(self.grant_of(at));
        }
        match self.join(id, owner, want, true, now) {
            Ok(place) => Enqueued::Queued(place),
            Err(refusal) => {
                self.retire_if_idle(id, now);
                Enqueued::Refused(refusal)
            }
        }
    }

    /// The second phase of a claim: takes the grant, with a lease that begins now, or says how the claim stands.
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
            Stage::Granted(at) => {
                self.remove_place(place);
                let hold = self.hold_mut(at);
                hold.ends = after(now, hold.lease);
                self.arm(at);
                Redeemed::Granted(self.grant_of(at))
            }
        }
    }

    /// Gives up a place, or a two-phase claim, and says whether it was there.
    ///
    /// A grant that nobody has redeemed goes back, and passes to the next waiter. A place of [`ask`](Self::ask) that was
    /// granted is gone: its hold is to be released.
    pub fn abandon(&mut self, place: PlaceId, now: Time) -> bool {
        self.expire(now);
        let Some(slot) = self.place_slot(place) else { return false };
        let Place { stage, key, .. } = self.remove_place(slot);
        match stage {
            Stage::Waiting => self.promote(key, now),
            Stage::Granted(at) => self.end(at, Some(Ending::Abandoned), now),
            Stage::Lapsed => self.retire_if_idle(key, now),
        }
        true
    }

    /// How many wait before this place; `None` where it does not wait. Walks the queue.
    pub fn waiters_ahead(&self, place: PlaceId) -> Option<usize> {
        let slot = self.place_slot(place)?;
        (self.places[slot].stage == Stage::Waiting).then(|| self.count_waiters_ahead(slot))
    }

    /// Lets a hold begin anew: it is over `lease` from now.
    ///
    /// # Errors
    ///
    /// [`NotHeld`] where the token proves no hold of this key.
    pub fn renew(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
        lease: Duration,
        now: Time,
    ) -> Result<Renewed, NotHeld> {
        self.expire(now);
        let (id, at) = self.hold_by_token(space, key, token).ok_or(NotHeld)?;
        let hold = self.hold_mut(at);
        let left = hold.ends.since(now);
        hold.lease = nanos(lease);
        hold.ends = after(now, hold.lease);
        let ends = hold.ends;
        self.arm(at);
        self.stats.renewed += 1;
        self.stats.lease_left.record(left);
        Ok(Renewed { ends, waiters: self.entries[id].queue.len() })
    }

    /// Ends a hold and passes it to the next waiter.
    ///
    /// # Errors
    ///
    /// [`NotHeld`] where the token proves no hold of this key.
    pub fn release(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
        now: Time,
    ) -> Result<(), NotHeld> {
        self.expire(now);
        let (_, at) = self.hold_by_token(space, key, token).ok_or(NotHeld)?;
        self.end(at, None, now);
        Ok(())
    }

    /// Takes a hold from its owner: it lasts until its lease ends, whatever becomes of who claimed it.
    ///
    /// # Errors
    ///
    /// [`NotHeld`] where the token proves no hold of this key.
    pub fn detach(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
        now: Time,
    ) -> Result<(), NotHeld> {
        self.expire(now);
        let (_, at) = self.hold_by_token(space, key, token).ok_or(NotHeld)?;
        self.detach_hold(at);
        Ok(())
    }

    /// Breaks the hold with this fencing number by hand, tells its owner, and says who that was.
    ///
    /// # Errors
    ///
    /// [`NotHeld`] where no hold of this key has the number.
    pub fn evict(
        &mut self,
        space: KeySpace,
        key: &[u8],
        number: u64,
        now: Time,
    ) -> Result<Option<Owner>, NotHeld> {
        self.expire(now);
        let found = self.find(space, key).id();
        let at = found.and_then(|id| self.hold_by_number(id, number)).ok_or(NotHeld)?;
        let owner = self.owner(self.hold(at).owner);
        self.end(at, Some(Ending::Evicted), now);
        Ok(owner)
    }

    /// Puts back a hold that was granted before a restart, without owner.
    ///
    /// It needs no room under [`Config::max_keys`]: it was granted, and what was granted is kept. That later numbers are
    /// larger is the duty of the [`Mint`].
    ///
    /// # Errors
    ///
    /// [`Conflict`] where it cannot stand beside the holds and waiters that are there.
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

    /// Ends what is over at `now`, and drops keys that have been idle long enough.
    pub fn handle_timeout(&mut self, now: Time) {
        self.expire(now);
        self.drop_idle(now);
    }

    /// When to call [`handle_timeout`](Self::handle_timeout); `None` for not before something else happens.
    ///
    /// It may be early, never late: a call at which nothing is over is answered by a later instant.
    pub fn poll_timeout(&self) -> Option<Time> {
        let ends = self.next_alarm().map(|(_, alarm)| alarm.at);
        let quiet = Some(self.embargo_until).filter(|until| *until > Time::ZERO);
        let due = ends.into_iter().chain(self.idle_until()).chain(quiet);
        due.min().filter(|at| *at < Time::MAX)
    }

    /// What has happened beside the answers, the oldest first. To be emptied after every operation.
    pub fn poll_event(&mut self) -> Option<TableEvent> {
        let event = self.events.pop_front();
        if self.events.is_empty() && self.events.capacity() > MAX_SPARE_EVENTS {
            self.events.shrink_to(MAX_SPARE_EVENTS);
        }
        event
    }

    /// What it has done so far.
    pub fn stats(&self) -> &TableStats {
        &self.stats
    }

    /// How much there is.
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

/// Room for this many events is kept; what a burst needed beyond it is given back.
const MAX_SPARE_EVENTS: usize = 4096;

/// A lease as it is kept.
fn nanos(lease: Duration) -> u64 {
    u64::try_from(lease.as_nanos()).unwrap_or(u64::MAX)
}

fn after(now: Time, lease: u64) -> Time {
    Time::from_nanos(now.as_nanos().saturating_add(lease))
}
