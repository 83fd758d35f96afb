//! Lookups by key, by token and by owner. Values from outside the table are checked here, once.

use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use super::LockTable;
use super::bytes::KeyBytes;
use super::entries::{Hold, HoldRef, Holders};
use super::index::Index;
use super::list::List;
use super::slab::NONE;
use super::types::{Grant, KeySpace, Mode, Owner, PlaceId};
use crate::{LockToken, Time};

/// Result of a key lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Slot of the key's entry.
    Known(u32),
    /// No entry; one can be added with this hash.
    New { hash: u32 },
}

impl Found {
    pub(super) const fn id(self) -> Option<u32> {
        match self {
            Self::Known(id) => Some(id),
            Self::New { .. } => None,
        }
    }
}

impl<S: BuildHasher, M> LockTable<S, M> {
    /// Slot of a connected owner.
    pub(super) fn owner_slot(&self, owner: Owner) -> Option<u32> {
        self.owners.get(owner.slot).filter(|p| p.serial == owner.serial).map(|_| owner.slot)
    }

    /// Slot of a place that has not ended.
    pub(super) fn place_slot(&self, place: PlaceId) -> Option<u32> {
        self.places.get(place.slot).filter(|p| p.serial == place.serial).map(|_| place.slot)
    }

    pub(super) fn owner(&self, slot: u32) -> Option<Owner> {
        self.owners.get(slot).map(|owner| Owner { serial: owner.serial, slot })
    }

    /// Space and bytes of a key.
    pub(super) fn name_of(&self, key: u32) -> (KeySpace, KeyBytes) {
        let entry = &self.entries[key];
        (entry.space, entry.key.clone())
    }

    pub(super) fn place_id(&self, slot: u32) -> PlaceId {
        PlaceId { serial: self.places[slot].serial, slot }
    }

    /// Finds the key of an operation: at its prefetched entry if that matches, or in the index.
    pub(super) fn find(&mut self, space: KeySpace, key: &[u8]) -> Found {
        if let Some(probable) = self.prefetched.next()
            && self.entries.get(probable).is_some_and(|entry| entry.matches(space, key))
        {
            return Found::Known(probable);
        }
        self.search(space, key)
    }

    pub(super) fn search(&self, space: KeySpace, key: &[u8]) -> Found {
        let hash = self.hash_key(key);
        match self.index(space).find(hash, |id| self.entries[id].key.as_bytes() == key) {
            Some(id) => Found::Known(id),
            None => Found::New { hash },
        }
    }

    pub(super) fn index(&self, space: KeySpace) -> &Index {
        match space {
            KeySpace::Lock => &self.locks,
            KeySpace::Semaphore => &self.semaphores,
        }
    }

    /// Two-phase claim of an owner on a key.
    pub(super) fn two_phase_claim(&self, owner: u32, key: u32) -> Option<u32> {
        self.claims.find(self.hash_claim(owner, key), |place| {
            let place = &self.places[place];
            place.owner == owner && place.key == key
        })
    }

    /// Hold of a key that `token` proves.
    pub(super) fn hold_by_token(
        &mut self,
        space: KeySpace,
        key: &[u8],
        token: LockToken,
    ) -> Option<(u32, HoldRef)> {
        let id = self.find(space, key).id()?;
        let hold_ref = self.hold_by_number(id, token.number())?;
        (self.hold(hold_ref).token == token).then_some((id, hold_ref))
    }

    /// Hold of a key that has this fencing number.
    pub(super) fn hold_by_number(&self, key: u32, number: u64) -> Option<HoldRef> {
        match &self.entries[key].holders {
            Holders::Unheld { .. } => None,
            Holders::Sole(hold) => (hold.token.number() == number).then_some(HoldRef::Key(key)),
            Holders::Many(_) => {
                let member = self.member_numbers.find(self.hash_number(number), |member| {
                    let member = &self.members[member];
                    member.key == key && member.hold.token.number() == number
                });
                member.map(HoldRef::Member)
            }
        }
    }

    pub(super) fn hold(&self, hold_ref: HoldRef) -> &Hold {
        match hold_ref {
            HoldRef::Member(member) => &self.members[member].hold,
            HoldRef::Key(id) => match &self.entries[id].holders {
                Holders::Sole(hold) => hold,
                _ => unreachable!("key {id} has no sole hold"),
            },
        }
    }

    pub(super) fn hold_mut(&mut self, hold_ref: HoldRef) -> &mut Hold {
        match hold_ref {
            HoldRef::Member(member) => &mut self.members[member].hold,
            HoldRef::Key(id) => match &mut self.entries[id].holders {
                Holders::Sole(hold) => hold,
                _ => unreachable!("key {id} has no sole hold"),
            },
        }
    }

    /// Holds of a key, in the order of their grants.
    pub(super) fn holds_of(&self, key: u32) -> impl Iterator<Item = HoldRef> {
        let (sole, members) = match &self.entries[key].holders {
            Holders::Unheld { .. } => (None, List::EMPTY),
            Holders::Sole(_) => (Some(HoldRef::Key(key)), List::EMPTY),
            Holders::Many(members) => (None, *members),
        };
        sole.into_iter().chain(members.iter(&self.members).map(HoldRef::Member))
    }

    pub(super) fn key_of(&self, hold_ref: HoldRef) -> u32 {
        match hold_ref {
            HoldRef::Key(id) => id,
            HoldRef::Member(member) => self.members[member].key,
        }
    }

    /// True if a claim is granted at once.
    pub(super) fn is_free(&self, id: u32, mode: Mode) -> bool {
        self.embargo_until == Time::ZERO && self.is_vacant(id, mode)
    }

    /// True if the key has no waiter and no conflicting holder.
    pub(super) fn is_vacant(&self, id: u32, mode: Mode) -> bool {
        let entry = &self.entries[id];
        entry.queue.is_empty() && entry.has_room(mode)
    }

    /// Number of keys in use.
    pub(super) fn keys_in_use(&self) -> usize {
        self.entries.len() - self.idle.len() as usize
    }

    pub(super) fn count_waiters_ahead(&self, place: u32) -> usize {
        let before = |place: &u32| {
            let prev = self.places[*place].links.prev();
            (prev != NONE).then_some(prev)
        };
        std::iter::successors(Some(place), before).count() - 1
    }

    /// Hold at `hold_ref`, as reported to its owner.
    pub(super) fn grant_of(&self, hold_ref: HoldRef) -> Grant {
        let hold = self.hold(hold_ref);
        Grant {
            token: hold.token,
            lease: Duration::from_nanos(hold.lease),
            ends: hold.ends,
            waiters: self.entries[self.key_of(hold_ref)].queue.len(),
        }
    }

    pub(super) fn hash_key(&self, key: &[u8]) -> u32 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key);
        fold(hasher.finish())
    }

    pub(super) fn hash_number(&self, number: u64) -> u32 {
        fold(self.hasher.hash_one(number))
    }

    pub(super) fn hash_claim(&self, owner: u32, key: u32) -> u32 {
        fold(self.hasher.hash_one((owner, key)))
    }
}

/// Folds both halves of a hash into one: the index uses the low bits first.
#[expect(clippy::cast_possible_truncation, reason = "the halves are what is wanted")]
const fn fold(hash: u64) -> u32 {
    (hash ^ (hash >> 32)) as u32
}
