//! Slab: values at stable small numbers, with reuse of freed slots.

use std::ops::{Index, IndexMut};

/// Number of no slot: the end of a list, a hold without an owner.
pub(super) const NONE: u32 = u32::MAX;

/// Values under numbers that stay valid until removal. The slot freed last is reused first: it is most likely still in
/// the cache.
#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<SlabSlot<T>>,
    free: u32,
    len: usize,
}

#[derive(Debug)]
enum SlabSlot<T> {
    Full(T),
    /// Number of the next free slot.
    Free(u32),
}

impl<T> Slab<T> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: NONE, len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        if self.free == NONE {
            let id = u32::try_from(self.slots.len()).ok().filter(|id| *id != NONE);
            self.slots.push(SlabSlot::Full(value));
            return id.expect("memory ends before four billion slots do");
        }
        let id = self.free;
        let slot = &mut self.slots[id as usize];
        if let SlabSlot::Free(next) = *slot {
            self.free = next;
        }
        *slot = SlabSlot::Full(value);
        id
    }

    pub(super) fn remove(&mut self, id: u32) -> T {
        let slot = std::mem::replace(&mut self.slots[id as usize], SlabSlot::Free(self.free));
        let SlabSlot::Full(value) = slot else { unreachable!("slot {id} was free already") };
        self.free = id;
        self.len -= 1;
        value
    }

    /// Discards all free slots if the slab is empty, so that iteration does not cost what the slab once held.
    pub(super) fn reset_if_empty(&mut self) {
        if self.len == 0 {
            self.slots.clear();
            self.free = NONE;
        }
    }

    /// Value at `id`, which may come from outside: any number is harmless.
    pub(super) fn get(&self, id: u32) -> Option<&T> {
        match self.slots.get(id as usize) {
            Some(SlabSlot::Full(value)) => Some(value),
            _ => None,
        }
    }

    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        match self.slots.get_mut(id as usize) {
            Some(SlabSlot::Full(value)) => Some(value),
            _ => None,
        }
    }

    /// Number of slots, used or free.
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Every value with its number, in the order of the slots.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.slots).filter_map(|(id, slot)| match slot {
            SlabSlot::Full(value) => Some((id, value)),
            SlabSlot::Free(_) => None,
        })
    }
}

/// Access by a number from inside the table: its links only name used slots.
impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, id: u32) -> &T {
        match &self.slots[id as usize] {
            SlabSlot::Full(value) => value,
            SlabSlot::Free(_) => unreachable!("slot {id} is free"),
        }
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        match &mut self.slots[id as usize] {
            SlabSlot::Full(value) => value,
            SlabSlot::Free(_) => unreachable!("slot {id} is free"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_freed_last_is_used_first() {
        let mut slab = Slab::new();
        let ids: Vec<_> = ["a", "b", "c"].into_iter().map(|v| slab.insert(v)).collect();
        assert_eq!(slab.remove(ids[0]), "a");
        assert_eq!(slab.remove(ids[2]), "c");
        assert_eq!(slab.insert("d"), ids[2]);
        assert_eq!(slab.insert("e"), ids[0]);
        assert_eq!(slab.insert("f"), 3);
        assert_eq!(slab.len(), 4);
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(0, &"e"), (1, &"b"), (2, &"d"), (3, &"f")]);
    }

    #[test]
    fn a_number_from_outside_is_harmless() {
        let mut slab = Slab::new();
        let id = slab.insert(7);
        assert_eq!(slab.get(id), Some(&7));
        slab.remove(id);
        assert_eq!(slab.get(id), None);
        assert_eq!(slab.get(NONE), None);
    }
}
