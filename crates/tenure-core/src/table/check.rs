//! Consistency check of the table, for tests.

use std::hash::BuildHasher;

use super::LockTable;
use super::entries::{HoldRef, Holders, Stage};
use super::slab::NONE;
use super::types::{KeySpace, Mint};
use crate::Time;

impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Panics unless every list, count and index of the table agrees with the rest. Slow.
    #[doc(hidden)]
    pub fn check(&self) {
        self.check_keys();
        self.check_holds();
        self.check_places();
        self.check_owners();
        self.sole_timers.check();
        self.member_timers.check();
    }

    fn check_keys(&self) {
        let idle: Vec<u32> = self.idle.iter(&self.entries).collect();
        assert_eq!(idle.len(), self.idle.len() as usize, "the length of the idle list");
        assert_eq!(self.locks.len() + self.semaphores.len(), self.entries.len(), "indexed keys");
        for (id, entry) in self.entries.iter() {
            let found = self.search(entry.space, &entry.key).id();
            assert_eq!(found, Some(id), "{:?} is found", entry.key);
            assert_eq!(idle.contains(&id), entry.is_idle(), "{:?} in the idle list", entry.key);
            let armed = self.sole_timers.armed(id).map_or(Time::MAX, |alarm| alarm.at);
            assert_eq!(entry.alarm, armed, "the alarm of {:?}", entry.key);
            assert_eq!(entry.queue.iter(&self.places).count(), entry.queue.len() as usize);
            if let Some(first) = entry.queue.first() {
                let embargo = self.embargo_until > Time::ZERO;
                let stuck = !embargo && entry.has_room(self.places[first].mode);
                assert!(!stuck, "{:?} has room for its first waiter", entry.key);
            }
            for place in entry.queue.iter(&self.places) {
                assert_eq!(self.places[place].key, id);
                assert_eq!(self.places[place].stage, Stage::Waiting);
            }
        }
    }

    fn check_holds(&self) {
        let mut holds = 0;
        let mut members = 0;
        for (id, entry) in self.entries.iter() {
            holds += entry.holder_count() as usize;
            match &entry.holders {
                Holders::Unheld { .. } => {}
                Holders::Sole(_) => {
                    assert_eq!(entry.space, KeySpace::Lock);
                    self.check_hold(HoldRef::Key(id));
                }
                Holders::Many(list) => {
                    let ids: Vec<u32> = list.iter(&self.members).collect();
                    assert!(!ids.is_empty(), "an empty list of holders");
                    assert_eq!(ids.len(), list.len() as usize);
                    members += ids.len();
                    assert!(entry.space == KeySpace::Lock || list.len() <= entry.limit);
                    for member in ids {
                        assert_eq!(self.members[member].key, id);
                        self.check_hold(HoldRef::Member(member));
                    }
                }
            }
        }
        assert_eq!(holds, self.holds, "the count of holds");
        assert_eq!(members, self.members.len(), "members without a key");
        assert_eq!(members, self.member_numbers.len(), "indexed numbers");
    }

    fn check_hold(&self, hold_ref: HoldRef) {
        let hold = self.hold(hold_ref);
        let armed = match hold_ref {
            HoldRef::Key(id) => self.sole_timers.armed(id),
            HoldRef::Member(member) => self.member_timers.armed(member),
        };
        let in_time = armed.map_or(Time::MAX, |alarm| alarm.at) <= hold.ends;
        assert!(in_time, "{:?} has no alarm at its end", hold.token);
        assert_eq!(self.hold_by_number(self.key_of(hold_ref), hold.token.number()), Some(hold_ref));
        if hold.owner != NONE {
            assert_eq!(
                self.owners[hold.owner].holds[hold.owner_index], hold_ref,
                "a hold's owner index"
            );
        }
        if hold.place != NONE {
            assert_eq!(self.places[hold.place].stage, Stage::Granted(hold_ref));
        }
    }

    fn check_places(&self) {
        let mut waiting = 0;
        let mut claims = 0;
        let mut lapsed = 0;
        for (id, place) in self.places.iter() {
            assert_eq!(
                self.owners[place.owner].places[place.owner_index], id,
                "a place's owner index"
            );
            if place.two_phase {
                claims += 1;
                assert_eq!(self.two_phase_claim(place.owner, place.key), Some(id));
            }
            match place.stage {
                Stage::Waiting => waiting += 1,
                Stage::Granted(hold_ref) => assert_eq!(self.hold(hold_ref).place, id),
                Stage::Lapsed => lapsed += 1,
            }
        }
        let queued: usize = self.entries.iter().map(|(_, entry)| entry.queue.len() as usize).sum();
        assert_eq!((queued, self.waiting), (waiting, waiting), "the count of waiters");
        assert_eq!(self.claims.len(), claims, "indexed claims");
        let counted: u32 = self.entries.iter().map(|(_, entry)| entry.lapsed).sum();
        assert_eq!(counted, lapsed, "lapsed claims");
    }

    fn check_owners(&self) {
        let places: usize = self.owners.iter().map(|(_, owner)| owner.places.len()).sum();
        assert_eq!(places, self.places.len(), "places of owners");
        let owned: usize = self.owners.iter().map(|(_, owner)| owner.holds.len()).sum();
        assert!(owned <= self.holds, "holds of owners");
        for (slot, owner) in self.owners.iter() {
            for (_, hold_ref) in owner.holds.iter() {
                assert_eq!(self.hold(*hold_ref).owner, slot);
            }
        }
    }
}
