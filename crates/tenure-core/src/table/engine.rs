//! State changes of the table: grant, queue, end, promote, retire.

use std::hash::BuildHasher;
use std::time::Duration;

use super::entries::{Entry, Hold, HoldRef, Holders, Member, Place, Stage};
use super::list::{Links, List};
use super::lookup::Found;
use super::slab::NONE;
use super::timers::Alarm;
use super::types::{
    Ending, Grant, KeySpace, Mint, Mode, OnDisconnect, PlaceId, Refusal, TableClaim, TableEvent,
};
use super::{LockTable, after, nanos};
use crate::{LockToken, Time};

/// Grants and queues.
impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Checks the limits, then brings a key into use for this mode. Returns its slot.
    ///
    /// A caller that then neither grants nor queues must call `retire_if_idle`, or an idle key would count as in use.
    pub(super) fn try_use_key(
        &mut self,
        key: &[u8],
        found: Found,
        mode: Mode,
    ) -> Result<u32, Refusal> {
        let known = found.id();
        let in_use = known.is_some_and(|id| !self.entries[id].is_idle());
        if !in_use && self.keys_in_use() >= self.config.max_keys {
            return Err(Refusal::MaxKeys);
        }
        if known.is_some_and(|id| self.entries[id].limit_mismatch(mode)) {
            return Err(Refusal::LimitMismatch);
        }
        Ok(self.use_key(key, found, mode))
    }

    /// Brings a key into use without a check of the limits, and returns its slot.
    pub(super) fn use_key(&mut self, key: &[u8], found: Found, mode: Mode) -> u32 {
        let id = match found {
            Found::Known(id) => id,
            Found::New { hash } => return self.add_key(key, hash, mode),
        };
        let entry = &mut self.entries[id];
        if !entry.is_held() && entry.queue.is_empty() {
            entry.set_limit(mode);
            if entry.is_idle() {
                self.idle.remove(&mut self.entries, id);
            }
        }
        id
    }

    fn add_key(&mut self, key: &[u8], hash: u32, mode: Mode) -> u32 {
        let id = self.entries.insert(Entry::new(key, mode));
        // An earlier key of this slot may have left an alarm. The new key uses it.
        if let Some(alarm) = self.sole_timers.armed(id) {
            self.entries[id].alarm = alarm.at;
        }
        self.index_mut(mode.space()).insert(hash, id);
        id
    }

    /// Grants a key that has room.
    pub(super) fn grant(
        &mut self,
        id: u32,
        owner: u32,
        mode: Mode,
        lease: u64,
        now: Time,
    ) -> HoldRef {
        let token = self.mint.mint();
        self.stats.granted += 1;
        let ends = after(now, lease);
        let hold = Hold { token, granted: now, ends, lease, owner, owner_index: NONE, place: NONE };
        self.insert_hold(id, mode, hold)
    }

    /// Emits the event of a grant, once the place of its claim is settled.
    pub(super) fn emit_granted(
        &mut self,
        hold_ref: HoldRef,
        place: Option<PlaceId>,
        mode: Mode,
    ) -> Grant {
        let grant = self.grant_of(hold_ref);
        let owner = self.owner(self.hold(hold_ref).owner).expect("a grant has a connected owner");
        let (space, key) = self.name_of(self.key_of(hold_ref));
        self.events.push_back(TableEvent::Granted { place, owner, space, key, mode, grant });
        grant
    }

    /// Renews a hold: it now ends `lease` after `now`.
    pub(super) fn renew_hold(&mut self, hold_ref: HoldRef, lease: u64, now: Time) -> Time {
        let hold = self.hold_mut(hold_ref);
        let ends = after(now, lease);
        (hold.lease, hold.ends) = (lease, ends);
        let token = hold.token;
        self.arm(hold_ref);
        let (space, key) = self.name_of(self.key_of(hold_ref));
        let lease = Duration::from_nanos(lease);
        self.events.push_back(TableEvent::Renewed { space, key, token, lease, ends });
        ends
    }

    /// Hold without an owner, for a restore.
    pub(super) fn ownerless(token: LockToken, ends: Time, now: Time) -> Hold {
        let lease = nanos(ends.since(now));
        Hold { token, granted: now, ends, lease, owner: NONE, owner_index: NONE, place: NONE }
    }

    pub(super) fn insert_hold(&mut self, id: u32, mode: Mode, hold: Hold) -> HoldRef {
        self.holds += 1;
        let owner = hold.owner;
        let hold_ref = if mode == Mode::Exclusive {
            self.entries[id].holders = Holders::Sole(hold);
            HoldRef::Key(id)
        } else {
            let hash = self.hash_number(hold.token.number());
            let member = self.members.insert(Member { hold, key: id, links: Links::UNLINKED });
            self.member_numbers.insert(hash, member);
            let holders = &mut self.entries[id].holders;
            if !matches!(holders, Holders::Many(_)) {
                *holders = Holders::Many(List::EMPTY);
            }
            if let Holders::Many(members) = holders {
                members.push(&mut self.members, member);
            }
            HoldRef::Member(member)
        };
        if owner != NONE {
            let index = self.owners[owner].holds.insert(hold_ref);
            self.hold_mut(hold_ref).owner_index = index;
        }
        self.arm(hold_ref);
        hold_ref
    }

    /// Adds a claim at the end of the queue.
    pub(super) fn join(
        &mut self,
        id: u32,
        owner: u32,
        claim: TableClaim,
        two_phase: bool,
        now: Time,
    ) -> Result<PlaceId, Refusal> {
        let waiters = self.entries[id].queue.len();
        if waiters as usize >= self.config.max_waiters_per_key {
            return Err(Refusal::MaxWaiters);
        }
        let place = self.add_place(id, owner, claim, Stage::Waiting, two_phase, now);
        self.entries[id].queue.push(&mut self.places, place);
        self.waiting += 1;
        let place = self.place_id(place);
        let (space, key) = self.name_of(id);
        let (owner, mode) = (claim.owner, claim.mode);
        self.events.push_back(TableEvent::Queued { place, owner, space, key, mode });
        if waiters == 0 && self.config.notify_holders {
            self.notify_holders(id);
        }
        Ok(place)
    }

    pub(super) fn add_place(
        &mut self,
        key: u32,
        owner: u32,
        claim: TableClaim,
        stage: Stage,
        two_phase: bool,
        now: Time,
    ) -> u32 {
        let place = self.places.insert(Place {
            serial: self.serial,
            since: now,
            lease: nanos(claim.lease),
            owner,
            owner_index: NONE,
            key,
            links: Links::UNLINKED,
            mode: claim.mode,
            stage,
            two_phase,
        });
        self.serial += 1;
        self.places[place].owner_index = self.owners[owner].places.insert(place);
        if two_phase {
            self.claims.insert(self.hash_claim(owner, key), place);
        }
        place
    }

    pub(super) fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial - 1
    }

    fn notify_holders(&mut self, id: u32) {
        let Entry { space, ref key, .. } = self.entries[id];
        // One slot is enough for a waiter, but every shared holder of a lock must release it.
        let limit = if space == KeySpace::Semaphore { 1 } else { usize::MAX };
        let owned = self.holds_of(id).take(limit).filter_map(|hold_ref| {
            let hold = self.hold(hold_ref);
            Some((self.owner(hold.owner)?, hold.token))
        });
        let event =
            |(owner, token)| TableEvent::HandoffRequested { owner, space, key: key.clone(), token };
        let events: Vec<_> = owned.map(event).collect();
        self.events.extend(events);
    }

    fn index_mut(&mut self, space: KeySpace) -> &mut super::Index {
        match space {
            KeySpace::Lock => &mut self.locks,
            KeySpace::Semaphore => &mut self.semaphores,
        }
    }
}

/// Ends of holds, and promotion of waiters.
impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Ends every expired hold, in the order of expiry and, within one instant, of the grants.
    pub(super) fn expire(&mut self, now: Time) {
        if self.embargo_until > Time::ZERO && self.embargo_until <= now {
            self.end_embargo(now);
        }
        while let Some((hold_ref, alarm)) = self.next_alarm()
            && alarm.at <= now
        {
            self.fire_alarm(hold_ref, alarm, now);
        }
    }

    /// Grants the claims that the embargo held back, in the order of arrival.
    fn end_embargo(&mut self, now: Time) {
        self.embargo_until = Time::ZERO;
        let first = |(id, entry): (u32, &Entry)| Some((entry.queue.first()?, id));
        let mut queued_keys: Vec<_> = self.entries.iter().filter_map(first).collect();
        queued_keys.sort_unstable_by_key(|(place, _)| self.places[*place].serial);
        for (_, id) in queued_keys {
            self.promote(id, now);
        }
    }

    pub(super) fn next_alarm(&self) -> Option<(HoldRef, Alarm)> {
        match (self.sole_timers.first(), self.member_timers.first()) {
            (Some(sole), Some(member)) if (member.at, member.number) < (sole.at, sole.number) => {
                Some((HoldRef::Member(member.id), member))
            }
            (Some(sole), _) => Some((HoldRef::Key(sole.id), sole)),
            (None, member) => member.map(|alarm| (HoldRef::Member(alarm.id), alarm)),
        }
    }

    /// Ensures that an alarm fires at the end of the hold or earlier. A pending alarm that fires earlier is kept: when
    /// it fires, it is set to the end that the hold then has. So a renewal, or another grant of a known key, costs
    /// nothing here.
    pub(super) fn arm(&mut self, hold_ref: HoldRef) {
        let hold = self.hold(hold_ref);
        let alarm = |id| Alarm { at: hold.ends, number: hold.token.number(), id };
        match hold_ref {
            HoldRef::Key(id) => {
                let alarm = alarm(id);
                let entry = &mut self.entries[id];
                if alarm.at < entry.alarm {
                    entry.alarm = alarm.at;
                    self.sole_timers.arm(alarm);
                }
            }
            HoldRef::Member(id) => {
                let alarm = alarm(id);
                let armed = self.member_timers.armed(id).map_or(Time::MAX, |other| other.at);
                if alarm.at < armed {
                    self.member_timers.arm(alarm);
                }
            }
        }
    }

    /// Handles an alarm: the hold has expired, the alarm was early, or its hold is gone.
    fn fire_alarm(&mut self, hold_ref: HoldRef, alarm: Alarm, now: Time) {
        let hold = match hold_ref {
            HoldRef::Key(id) if !self.entries.get(id).is_some_and(Entry::is_sole) => None,
            hold_ref => Some(self.hold(hold_ref)),
        };
        let actual_end = hold.map(|hold| (hold.ends, hold.token.number()));
        self.disarm(hold_ref);
        match actual_end {
            Some(end) if end == (alarm.at, alarm.number) => {
                self.end(hold_ref, Ending::Expired, now);
            }
            Some(_) => self.arm(hold_ref),
            None => {}
        }
    }

    fn disarm(&mut self, hold_ref: HoldRef) {
        match hold_ref {
            HoldRef::Key(id) => {
                if let Some(entry) = self.entries.get_mut(id) {
                    entry.alarm = Time::MAX;
                }
                self.sole_timers.disarm(id);
            }
            HoldRef::Member(id) => self.member_timers.disarm(id),
        }
    }

    /// Ends a hold and grants the key to the next waiters.
    pub(super) fn end(&mut self, hold_ref: HoldRef, how: Ending, now: Time) {
        let place = self.hold(hold_ref).place;
        if place != NONE {
            if matches!(how, Ending::Expired | Ending::Evicted) {
                self.places[place].stage = Stage::Lapsed;
                let id = self.key_of(hold_ref);
                self.entries[id].lapsed += 1;
            } else {
                self.remove_place(place);
            }
        }
        let (id, hold) = self.remove_hold(hold_ref, now);
        self.stats.record_end(how, now.since(hold.granted));
        let (owner, token) = (self.owner(hold.owner), hold.token);
        let (space, key) = self.name_of(id);
        self.events.push_back(TableEvent::Ended { how, owner, space, key, token });
        self.promote(id, now);
    }

    /// Grants to the first waiter for as long as the key has room.
    pub(super) fn promote(&mut self, id: u32, now: Time) {
        while let Some(first) = self.entries[id].queue.first() {
            let Place { owner, mode, lease, two_phase, since, .. } = self.places[first];
            if self.embargo_until > Time::ZERO || !self.entries[id].has_room(mode) {
                return;
            }
            let place = self.place_id(first);
            let hold_ref = self.grant(id, owner, mode, lease, now);
            self.stats.wait_times.record(now.since(since));
            if two_phase {
                self.leave_queue(first);
                self.places[first].stage = Stage::Granted(hold_ref);
                self.hold_mut(hold_ref).place = first;
            } else {
                self.remove_place(first);
            }
            self.emit_granted(hold_ref, Some(place), mode);
        }
        self.retire_if_idle(id, now);
    }

    /// Removes a place from its queue or hold, from the claim index and from its owner.
    pub(super) fn remove_place(&mut self, place: u32) -> Place {
        let Place { stage, owner, owner_index, key, two_phase, .. } = self.places[place];
        match stage {
            Stage::Waiting => self.leave_queue(place),
            Stage::Granted(hold_ref) => self.hold_mut(hold_ref).place = NONE,
            Stage::Lapsed => self.entries[key].lapsed -= 1,
        }
        if two_phase {
            self.claims.remove(self.hash_claim(owner, key), place);
        }
        let places = &mut self.owners[owner].places;
        places.remove(owner_index);
        places.reset_if_empty();
        self.places.remove(place)
    }

    /// Removes a place that waits, without a grant. Its key is still to be promoted.
    pub(super) fn leave(&mut self, place: u32) {
        let id = self.place_id(place);
        let Place { owner, key, .. } = self.remove_place(place);
        let owner = self.owner(owner).expect("the places of an owner are removed with it");
        let (space, key) = self.name_of(key);
        self.events.push_back(TableEvent::Left { place: id, owner, space, key });
    }

    /// Removes an owner. All its places are removed before any hold ends: otherwise a hold could pass to a place of the
    /// same owner.
    pub(super) fn remove_owner(&mut self, owner: u32, on_disconnect: OnDisconnect, now: Time) {
        let mut places: Vec<u32> = self.owners[owner].places.iter().map(|(_, p)| *p).collect();
        places.sort_unstable_by_key(|place| self.places[*place].serial);
        let mut left_queues = Vec::new();
        for place in places {
            let Place { stage, key, serial, .. } = self.places[place];
            match stage {
                Stage::Waiting => {
                    self.leave(place);
                    left_queues.push((key, serial));
                }
                Stage::Granted(_) => {
                    self.remove_place(place);
                }
                Stage::Lapsed => {
                    self.remove_place(place);
                    self.retire_if_idle(key, now);
                }
            }
        }
        // Promote each key once: the first call may retire it.
        left_queues.sort_unstable();
        left_queues.dedup_by_key(|(key, _)| *key);
        left_queues.sort_unstable_by_key(|(_, serial)| *serial);
        for (key, _) in left_queues {
            self.promote(key, now);
        }
        let mut holds: Vec<HoldRef> =
            self.owners[owner].holds.iter().map(|(_, hold_ref)| *hold_ref).collect();
        holds.sort_unstable_by_key(|hold_ref| self.hold(*hold_ref).token.number());
        for hold_ref in holds {
            match on_disconnect {
                OnDisconnect::Release => self.end(hold_ref, Ending::Disconnected, now),
                OnDisconnect::KeepHolds => self.detach_hold(hold_ref),
            }
        }
        self.owners.remove(owner);
    }

    /// Detaches a hold from its owner.
    pub(super) fn detach_hold(&mut self, hold_ref: HoldRef) {
        let hold = self.hold_mut(hold_ref);
        let (owner, index) = (std::mem::replace(&mut hold.owner, NONE), hold.owner_index);
        if owner != NONE {
            let token = hold.token;
            let holds = &mut self.owners[owner].holds;
            holds.remove(index);
            holds.reset_if_empty();
            let (space, key) = self.name_of(self.key_of(hold_ref));
            self.events.push_back(TableEvent::Detached { space, key, token });
        }
    }

    fn leave_queue(&mut self, place: u32) {
        let key = self.places[place].key;
        self.entries[key].queue.remove(&mut self.places, place);
        self.waiting -= 1;
    }

    /// Removes a hold from its key and from its owner.
    fn remove_hold(&mut self, hold_ref: HoldRef, now: Time) -> (u32, Hold) {
        let unheld = Holders::Unheld { idle_since: now };
        let id = self.key_of(hold_ref);
        let holders = &mut self.entries[id].holders;
        let hold = match hold_ref {
            HoldRef::Key(_) => match std::mem::replace(holders, unheld) {
                Holders::Sole(hold) => hold,
                _ => unreachable!("key {id} has no sole hold"),
            },
            HoldRef::Member(member) => {
                if let Holders::Many(members) = holders {
                    members.remove(&mut self.members, member);
                    if members.is_empty() {
                        *holders = unheld;
                    }
                }
                self.member_timers.disarm(member);
                let hold = self.members.remove(member).hold;
                self.member_numbers.remove(self.hash_number(hold.token.number()), member);
                hold
            }
        };
        self.holds -= 1;
        if hold.owner != NONE {
            let holds = &mut self.owners[hold.owner].holds;
            holds.remove(hold.owner_index);
            holds.reset_if_empty();
        }
        (id, hold)
    }
}

/// Idle keys.
impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Moves a key that is no longer in use to the idle list.
    pub(super) fn retire_if_idle(&mut self, id: u32, now: Time) {
        let entry = &mut self.entries[id];
        if !entry.is_idle() {
            return;
        }
        entry.holders = Holders::Unheld { idle_since: now };
        self.idle.push(&mut self.entries, id);
        if self.idle.len() as usize > self.config.max_idle_keys {
            self.drop_longest_idle();
        }
    }

    /// Instant at which the longest idle key is dropped.
    pub(super) fn idle_until(&self) -> Option<Time> {
        let since = self.entries[self.idle.first()?].idle_since()?;
        Some(since + self.config.max_idle)
    }

    pub(super) fn drop_idle(&mut self, now: Time) {
        while self.idle_until().is_some_and(|until| until <= now) {
            self.drop_longest_idle();
        }
    }

    /// Drops the longest idle key. Its alarm, if any, stays armed: the alarm belongs to the slot, and the next key in
    /// the slot uses it.
    fn drop_longest_idle(&mut self) {
        let Some(id) = self.idle.first() else { return };
        self.idle.remove(&mut self.entries, id);
        let entry = self.entries.remove(id);
        let hash = self.hash_key(&entry.key);
        self.index_mut(entry.space).remove(hash, id);
    }
}
