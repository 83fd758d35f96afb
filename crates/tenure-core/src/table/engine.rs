//! State changes of the table: grant, queue, end, promote, retire.

use std::hash::BuildHasher;

use super::entries::{Entry, Hold, HoldRef, Holders, Member, Place, Stage};
use super::list::{Links, List};
use super::lookup::Found;
use super::slab::NONE;
use super::timers::Alarm;
use super::types::{
    Ending, KeySpace, Mint, Mode, OnDisconnect, PlaceId, Refusal, TableClaim, TableEvent,
};
use super::{LockTable, after, nanos};
use crate::{LockToken, Time};

/// Grants and queues.
impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Brings a key into use for this mode, and returns its slot.
    ///
    /// A caller that then neither grants nor queues must call `retire_if_idle`, or an idle key would count as in use.
    pub(super) fn open(&mut self, key: &[u8], found: Found, mode: Mode) -> Result<u32, Refusal> {
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

    pub(super) fn ownerless(token: LockToken, ends: Time, now: Time) -> Hold {
        let lease = nanos(ends.since(now));
        Hold { token, granted: now, ends, lease, owner: NONE, owner_index: NONE, place: NONE }
    }

    pub(super) fn insert_hold(&mut self, id: u32, mode: Mode, hold: Hold) -> HoldRef {
        self.holds += 1;
        let owner = hold.owner;
        let at = if mode == Mode::Exclusive {
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
            let index = self.owners[owner].holds.insert(at);
            self.hold_mut(at).owner_index = index;
        }
        self.arm(at);
        at
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
        if waiters == 0 && self.config.notify_holders {
            self.notify_holders(id);
        }
        Ok(self.place_id(place))
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
        let owned = self.holds_of(id).take(limit).filter_map(|at| {
            let hold = self.hold(at);
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
        while let Some((at, alarm)) = self.next_alarm()
            && alarm.at <= now
        {
            self.fire_alarm(at, alarm, now);
        }
    }

    /// Grants the claims that the embargo held back, in the order of arrival.
    fn end_embargo(&mut self, now: Time) {
        self.embargo_until = Time::ZERO;
        let first = |(id, entry): (u32, &Entry)| Some((entry.queue.first()?, id));
        let mut waited_for: Vec<_> = self.entries.iter().filter_map(first).collect();
        waited_for.sort_unstable_by_key(|(place, _)| self.places[*place].serial);
        for (_, id) in waited_for {
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

    /// Ensures that an alarm fires at the end of the hold or earlier. An early alarm is set to the real end when it
    /// fires, and the pending one is kept while it is early enough. So a renewal, or another grant of a known key,
    /// costs nothing here.
    pub(super) fn arm(&mut self, at: HoldRef) {
        let hold = self.hold(at);
        let alarm = |id| Alarm { at: hold.ends, number: hold.token.number(), id };
        match at {
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
    fn fire_alarm(&mut self, at: HoldRef, alarm: Alarm, now: Time) {
        let hold = match at {
            HoldRef::Key(id) if !self.entries.get(id).is_some_and(Entry::is_sole) => None,
            at => Some(self.hold(at)),
        };
        let real = hold.map(|hold| (hold.ends, hold.token.number()));
        self.disarm(at);
        match real {
            Some(end) if end == (alarm.at, alarm.number) => {
                self.end(at, Some(Ending::Expired), now);
            }
            Some(_) => self.arm(at),
            None => {}
        }
    }

    fn disarm(&mut self, at: HoldRef) {
        match at {
            HoldRef::Key(id) => {
                if let Some(entry) = self.entries.get_mut(id) {
                    entry.alarm = Time::MAX;
                }
                self.sole_timers.disarm(id);
            }
            HoldRef::Member(id) => self.member_timers.disarm(id),
        }
    }

    /// Ends a hold and grants the key to the next waiters. `how` is `None` for a release: it needs no event, since its
    /// caller gets the answer.
    pub(super) fn end(&mut self, at: HoldRef, how: Option<Ending>, now: Time) {
        let place = self.hold(at).place;
        if place != NONE {
            if matches!(how, Some(Ending::Expired | Ending::Evicted)) {
                self.places[place].stage = Stage::Lapsed;
                let id = self.key_of(at);
                self.entries[id].lapsed += 1;
            } else {
                self.remove_place(place);
            }
        }
        let (id, hold) = self.remove_hold(at, now);
        self.stats.record_end(how, now.since(hold.granted));
        if let Some(how) = how {
            let entry = &self.entries[id];
            self.events.push_back(TableEvent::Ended {
                how,
                owner: self.owner(hold.owner),
                space: entry.space,
                key: entry.key.clone(),
                token: hold.token,
            });
        }
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
            let at = self.grant(id, owner, mode, lease, now);
            self.stats.wait_times.record(now.since(since));
            if two_phase {
                self.leave_queue(first);
                self.places[first].stage = Stage::Granted(at);
                self.hold_mut(at).place = first;
            } else {
                self.remove_place(first);
            }
            let owner = self.owner(owner).expect("the places of an owner go with it");
            let entry = &self.entries[id];
            self.events.push_back(TableEvent::Granted {
                place,
                owner,
                space: entry.space,
                key: entry.key.clone(),
                mode,
                grant: self.grant_of(at),
            });
        }
        self.retire_if_idle(id, now);
    }

    /// Removes a place from its queue or hold, from the claim index and from its owner.
    pub(super) fn remove_place(&mut self, place: u32) -> Place {
        let Place { stage, owner, owner_index, key, two_phase, .. } = self.places[place];
        match stage {
            Stage::Waiting => self.leave_queue(place),
            Stage::Granted(at) => self.hold_mut(at).place = NONE,
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

    /// Removes an owner. All its places are removed before any hold ends: otherwise a hold could pass to a place of the
    /// same owner.
    pub(super) fn remove_owner(&mut self, owner: u32, on_disconnect: OnDisconnect, now: Time) {
        let mut places: Vec<u32> = self.owners[owner].places.iter().map(|(_, p)| *p).collect();
        places.sort_unstable_by_key(|place| self.places[*place].serial);
        let mut left = Vec::new();
        for place in places {
            let Place { stage, key, serial, .. } = self.remove_place(place);
            match stage {
                Stage::Waiting => left.push((key, serial)),
                Stage::Granted(_) => {}
                Stage::Lapsed => self.retire_if_idle(key, now),
            }
        }
        // Promote each key once: the first call may retire it.
        left.sort_unstable();
        left.dedup_by_key(|(key, _)| *key);
        left.sort_unstable_by_key(|(_, serial)| *serial);
        for (key, _) in left {
            self.promote(key, now);
        }
        let mut holds: Vec<HoldRef> = self.owners[owner].holds.iter().map(|(_, at)| *at).collect();
        holds.sort_unstable_by_key(|at| self.hold(*at).token.number());
        for at in holds {
            match on_disconnect {
                OnDisconnect::Release => self.end(at, Some(Ending::Disconnected), now),
                OnDisconnect::KeepHolds => self.hold_mut(at).owner = NONE,
            }
        }
        self.owners.remove(owner);
    }

    /// Detaches a hold from its owner.
    pub(super) fn detach_hold(&mut self, at: HoldRef) {
        let hold = self.hold_mut(at);
        let (owner, index) = (std::mem::replace(&mut hold.owner, NONE), hold.owner_index);
        if owner != NONE {
            let holds = &mut self.owners[owner].holds;
            holds.remove(index);
            holds.reset_if_empty();
        }
    }

    fn leave_queue(&mut self, place: u32) {
        let key = self.places[place].key;
        self.entries[key].queue.remove(&mut self.places, place);
        self.waiting -= 1;
    }

    /// Removes a hold from its key and from its owner.
    fn remove_hold(&mut self, at: HoldRef, now: Time) -> (u32, Hold) {
        let unheld = Holders::Unheld { idle_since: now };
        let id = self.key_of(at);
        let holders = &mut self.entries[id].holders;
        let hold = match at {
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

    /// Drops the longest idle key. Its alarm, if any, stays: it belongs to the slot, and the next key there need not
    /// set one.
    fn drop_longest_idle(&mut self) {
        let Some(id) = self.idle.first() else { return };
        self.idle.remove(&mut self.entries, id);
        let entry = self.entries.remove(id);
        let hash = self.hash_key(&entry.key);
        self.index_mut(entry.space).remove(hash, id);
    }
}
