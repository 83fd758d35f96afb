//! Looking ahead: fetching what the coming operations need all at once.
//!
//! In a large table the cost of an operation is the wait for memory: the slot of the index, then the entry, then the seat
//! among its owner's holds, each known only when the one before has come. For one operation nothing can be done about
//! it. For many that are known beforehand, each step is taken for all of them before the next, so that the waits overlap.

use std::hash::BuildHasher;
use std::hint::black_box;

use super::LockTable;
use super::parts::Holders;
use super::slab::NONE;
use super::types::{Mint, Space};

/// How many keys [`LockTable::look_ahead`] takes at most: what it fetches must stay in the nearest cache until it is
/// used.
pub const MOST_AHEAD: usize = 32;

/// The numbers of the keys that were looked up ahead, in the order of the operations to come.
#[derive(Debug)]
pub(super) struct Ahead {
    ids: [u32; MOST_AHEAD],
    next: usize,
    len: usize,
}

impl Ahead {
    pub(super) const NOTHING: Self = Self { ids: [NONE; MOST_AHEAD], next: 0, len: 0 };

    /// Where the key of the next operation may be; no slot where nobody looked ahead.
    pub(super) fn next(&mut self) -> u32 {
        if self.next == self.len {
            return NONE;
        }
        self.next += 1;
        self.ids[self.next - 1]
    }
}

impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    pub fn look_ahead<'a>(&mut self, keys: impl IntoIterator<Item = (Space, &'a [u8])>) {
        let mut sought = [(Space::Lock, 0); MOST_AHEAD];
        let mut len = 0;
        for (space, key) in keys.into_iter().take(MOST_AHEAD) {
            sought[len] = (space, self.hash_key(key));
            len += 1;
        }
        let sought = &sought[..len];
        let mut seen = 0;
        for (space, hash) in sought {
            seen ^= self.index(*space).home(*hash).unwrap_or(0);
        }
        // The first key with the hash is nearly always the right one, and the operation looks closely.
        let mut ids = [NONE; MOST_AHEAD];
        for (id, (space, hash)) in ids.iter_mut().zip(sought) {
            *id = self.index(*space).find(*hash, |_| true).unwrap_or(NONE);
        }
        for id in &ids[..len] {
            seen ^= self.glance(*id);
        }
        for id in &ids[..len] {
            seen ^= self.glance_around(*id);
        }
        self.ahead = Ahead { ids, next: 0, len };
        black_box(seen);
    }

    /// Reads both lines of an entry.
    fn glance(&self, id: u32) -> u32 {
        self.entries.get(id).map_or(0, |entry| entry.limit ^ u32::from(entry.is_sole()))
    }

    /// Reads what stands around an entry: its holder's seat.
    fn glance_around(&self, id: u32) -> u32 {
        let Some(entry) = self.entries.get(id) else { return 0 };
        match &entry.holders {
            Holders::Sole(hold) => {
                let party = self.parties.get(hold.owner);
                u32::from(party.is_some_and(|party| party.holds.get(hold.seat).is_some()))
            }
            _ => 0,
        }
    }
}
