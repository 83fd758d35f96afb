//! Read-only views of the table: one key in detail, or many in order. Not on the hot path.

use std::collections::BinaryHeap;
use std::hash::BuildHasher;
use std::time::Duration;

use super::LockTable;
use super::bytes::KeyBytes;
use super::entries::{Entry, Stage};
use super::types::{
    HoldSnapshot, Holder, KeySpace, Mint, Mode, Owner, PlaceId, Summary, View, Waiter,
};
use crate::Time;

impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Key with at most `limit` of its holders and `limit` of its waiters; `None` if the table does not know the key.
    pub fn inspect(
        &mut self,
        space: KeySpace,
        key: &[u8],
        limit: usize,
        now: Time,
    ) -> Option<View> {
        self.handle_timeout(now);
        let id = self.find(space, key).id()?;
        let entry = &self.entries[id];
        Some(View {
            summary: self.summary(id),
            holders: self.holders(id).take(limit).collect(),
            waiters: entry
                .queue
                .iter(&self.places)
                .take(limit)
                .map(|place| self.waiter(place))
                .collect(),
        })
    }

    /// First `limit` keys of a space that begin with `prefix` and follow `after`, in the order of their bytes.
    ///
    /// To list all keys, pass the last key of each answer as `after`, until an answer has fewer than `limit`. Each call
    /// walks the whole table.
    pub fn list(
        &mut self,
        space: KeySpace,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
        now: Time,
    ) -> Vec<Summary> {
        self.handle_timeout(now);
        let mut first: BinaryHeap<(&[u8], u32)> = BinaryHeap::new();
        for (id, entry) in self.entries.iter().filter(|(_, entry)| entry.space == space) {
            let key = entry.key.as_bytes();
            if !key.starts_with(prefix) || after.is_some_and(|after| key <= after) {
                continue;
            }
            first.push((key, id));
            if first.len() > limit {
                first.pop();
            }
        }
        first.into_sorted_vec().into_iter().map(|(_, id)| self.summary(id)).collect()
    }

    /// Known keys of both spaces in the next `limit` slots from `from` on, in arbitrary order, and the next `from`;
    /// `None` at the end. Expired holds that have not been ended yet are included.
    ///
    /// This walks a large table in parts: a key that stays is returned once, whatever is added and removed meanwhile.
    pub fn page(&self, from: usize, limit: usize) -> (Vec<(KeySpace, Summary)>, Option<usize>) {
        let end = from.saturating_add(limit).min(self.entries.slots());
        let slots = (from..end).filter_map(|slot| u32::try_from(slot).ok());
        let known = slots.filter_map(|id| Some((self.entries.get(id)?.space, self.summary(id))));
        (known.collect(), (end < self.entries.slots()).then_some(end))
    }

    /// Start of the longest current wait. Walks all places.
    pub fn oldest_wait(&self) -> Option<Time> {
        let places = self.places.iter().map(|(_, place)| place);
        places.filter(|place| place.stage == Stage::Waiting).map(|place| place.since).min()
    }

    /// Key of a place; `None` if the place has ended.
    pub fn key_of_place(&self, place: PlaceId) -> Option<(KeySpace, KeyBytes)> {
        self.place_slot(place).map(|place| self.key_waited_for(place))
    }

    /// Keys for which an owner has places.
    pub fn keys_of_places(&self, owner: Owner) -> Vec<(KeySpace, KeyBytes)> {
        let places =
            self.owner_slot(owner).into_iter().flat_map(|slot| self.owners[slot].places.iter());
        places.map(|(_, place)| self.key_waited_for(*place)).collect()
    }

    fn key_waited_for(&self, place: u32) -> (KeySpace, KeyBytes) {
        let entry = &self.entries[self.places[place].key];
        (entry.space, entry.key.clone())
    }

    /// Every hold, for persistence, including expired holds that have not been ended yet. The order depends only on the
    /// table's history of operations.
    pub fn holds(&self) -> impl Iterator<Item = HoldSnapshot<'_>> {
        let keys = self.entries.iter();
        keys.flat_map(|(id, entry)| self.holds_of(id).map(move |hold_ref| (entry, hold_ref))).map(
            |(entry, hold_ref)| {
                let hold = self.hold(hold_ref);
                HoldSnapshot {
                    key: &entry.key,
                    mode: mode_of(entry),
                    token: hold.token,
                    ends: hold.ends,
                    owner: self.owner(hold.owner),
                }
            },
        )
    }

    fn summary(&self, id: u32) -> Summary {
        let entry = &self.entries[id];
        Summary {
            key: entry.key.clone(),
            limit: (entry.space == KeySpace::Semaphore).then_some(entry.limit),
            holders: entry.holder_count(),
            waiters: entry.queue.len(),
            first: self.holders(id).next(),
            idle_since: entry.idle_since(),
        }
    }

    fn holders(&self, id: u32) -> impl Iterator<Item = Holder> {
        let mode = mode_of(&self.entries[id]);
        self.holds_of(id).map(move |hold_ref| {
            let hold = self.hold(hold_ref);
            Holder {
                number: hold.token.number(),
                mode,
                owner: self.owner(hold.owner),
                granted: hold.granted,
                lease: Duration::from_nanos(hold.lease),
                ends: hold.ends,
            }
        })
    }

    fn waiter(&self, place: u32) -> Waiter {
        let waiting = &self.places[place];
        Waiter {
            place: self.place_id(place),
            owner: self.owner(waiting.owner).expect("the places of an owner are removed with it"),
            mode: in_use(&self.entries[waiting.key], waiting.mode),
            since: waiting.since,
        }
    }
}

/// Mode in which the key is held.
fn mode_of(entry: &Entry) -> Mode {
    let lock = if entry.is_sole() { Mode::Exclusive } else { Mode::Shared };
    in_use(entry, if entry.space == KeySpace::Lock { lock } else { Mode::Slot { limit: 0 } })
}

/// Mode with the key's actual limit.
fn in_use(entry: &Entry, mode: Mode) -> Mode {
    match mode {
        Mode::Slot { .. } => Mode::Slot { limit: entry.limit },
        mode => mode,
    }
}
