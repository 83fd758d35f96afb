//! Hash index of slab numbers.

use super::slab::NONE;

/// Open-addressing hash table of slab numbers, with linear probing.
///
/// It stores only the hash of a key: the slab's values have the keys, and the stored hash avoids loading most values
/// that do not match. A removal shifts the following slots back, so no tombstones slow later lookups. There is no
/// iteration, so the order of hashes cannot influence a decision.
#[derive(Debug)]
pub(super) struct Index {
    slots: Vec<IndexSlot>,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct IndexSlot {
    hash: u32,
    id: u32,
}

const EMPTY_SLOT: IndexSlot = IndexSlot { hash: 0, id: NONE };
const MIN_SLOTS: usize = 8;

impl Index {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Number under `hash` that `matches` accepts.
    pub(super) fn find(&self, hash: u32, mut matches: impl FnMut(u32) -> bool) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot.id == NONE {
                return None;
            }
            if slot.hash == hash && matches(slot.id) {
                return Some(slot.id);
            }
            at = (at + 1) & mask;
        }
    }

    /// Content of the slot at which a search for `hash` begins.
    pub(super) fn home(&self, hash: u32) -> u32 {
        let mask = self.slots.len().wrapping_sub(1);
        self.slots.get(hash as usize & mask).map_or(NONE, |slot| slot.id)
    }

    /// Adds a number that is not in the index.
    pub(super) fn insert(&mut self, hash: u32, id: u32) {
        // At most three quarters full: beyond that, probe sequences get long.
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            self.grow();
        }
        self.place(IndexSlot { hash, id });
        self.len += 1;
    }

    /// Removes a number, if it is in the index.
    pub(super) fn remove(&mut self, hash: u32, id: u32) {
        if self.slots.is_empty() {
            return;
        }
        let mask = self.slots.len() - 1;
        let mut hole = hash as usize & mask;
        while self.slots[hole].id != id {
            if self.slots[hole].id == NONE {
                return;
            }
            hole = (hole + 1) & mask;
        }
        self.len -= 1;
        let mut next = (hole + 1) & mask;
        while self.slots[next].id != NONE {
            let first = self.slots[next].hash as usize & mask;
            // A follower may move back into the hole unless that puts it before the slot where a search for it begins.
            if next.wrapping_sub(first) & mask >= next.wrapping_sub(hole) & mask {
                self.slots[hole] = self.slots[next];
                hole = next;
            }
            next = (next + 1) & mask;
        }
        self.slots[hole] = EMPTY_SLOT;
    }

    fn grow(&mut self) {
        let size = (self.slots.len() * 2).max(MIN_SLOTS);
        for slot in std::mem::replace(&mut self.slots, vec![EMPTY_SLOT; size]) {
            if slot.id != NONE {
                self.place(slot);
            }
        }
    }

    fn place(&mut self, slot: IndexSlot) {
        let mask = self.slots.len() - 1;
        let mut at = slot.hash as usize & mask;
        while self.slots[at].id != NONE {
            at = (at + 1) & mask;
        }
        self.slots[at] = slot;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_index_finds_nothing_and_removes_nothing() {
        let mut index = Index::new();
        assert_eq!(index.find(7, |_| true), None);
        index.remove(7, 7);
        assert_eq!(index.len(), 0);
    }

    #[test]
    fn numbers_under_one_hash_are_told_apart() {
        let mut index = Index::new();
        for id in 0..50 {
            index.insert(5, id);
        }
        for id in 0..50 {
            assert_eq!(index.find(5, |other| other == id), Some(id));
        }
        assert_eq!(index.find(5, |other| other == 50), None);
        assert_eq!(index.find(13, |_| true), None, "another hash with the same home");
    }

    #[test]
    fn nothing_is_lost_when_runs_that_wrap_around_are_cut() {
        // Few homes, many of them at the end of the table, so that runs are long and wrap.
        let hash = |id: u32| if id.is_multiple_of(3) { u32::MAX } else { u32::MAX - (id % 4) };
        let mut index = Index::new();
        let mut kept: Vec<u32> = Vec::new();
        let mut random = 1_u32;
        for id in 0..4_000 {
            index.insert(hash(id), id);
            kept.push(id);
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if kept.len() > 20 {
                let gone = kept.swap_remove(random as usize % kept.len());
                index.remove(hash(gone), gone);
                assert_eq!(index.find(hash(gone), |other| other == gone), None);
            }
            for id in &kept {
                assert_eq!(index.find(hash(*id), |other| other == *id), Some(*id));
            }
        }
        assert_eq!(index.len(), kept.len());
        assert_eq!(index.slots.len(), 32, "removed numbers leave their slots to others");
    }
}
