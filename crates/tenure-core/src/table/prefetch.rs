//! Looking ahead: fetching what the coming operations need all at once.
//!
//! In a large table the cost of an operation is the wait for memory: the slot of the index, then the entry, then what
//! stands around it, each known only when the one before has come. For a single operation nothing can be done about
//! that. For many that are known beforehand, each step is taken for all of them before the next, so that the processor
//! waits for all of them at once.

use std::hash::BuildHasher;
use std::hint::black_box;

use super::LockTable;
use super::entries::{Entry, Holders};
use super::slab::NONE;
use super::types::{KeySpace, Mint, UpcomingOp};

/// How many operations [`LockTable::look_ahead`] looks at: with many more, the first would be out of the nearest cache
/// before its turn comes.
pub const MAX_PREFETCH: usize = 64;

/// The operations to come, and where their keys were seen.
#[derive(Debug)]
pub(super) struct Prefetched {
    keys: Vec<PrefetchedKey>,
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct PrefetchedKey {
    space: KeySpace,
    is_renewal: bool,
    hash: u32,
    /// Of the key, or none.
    id: u32,
}

impl Prefetched {
    pub(super) const NOTHING: Self = Self { keys: Vec::new(), next: 0 };

    /// Where the key of the next operation may be.
    pub(super) fn next(&mut self) -> Option<u32> {
        let sought = self.keys.get(self.next)?;
        self.next += 1;
        Some(sought.id)
    }
}

impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Prepares for the operations that come next, in their order: each that takes a key, up to [`MOST_AHEAD`] of them.
    ///
    /// It changes no answer, only how soon it comes. With a million keys, 32 operations that are known at once take a
    /// third of the time; with few keys it costs nothing. Only a key that the table does not know costs a second hash.
    /// What is looked at and then not done, or done in another order, is harmless, and so is the opposite.
    ///
    /// ```
    /// # use std::hash::{BuildHasherDefault, DefaultHasher};
    /// # use std::time::Duration;
    /// # use tenure_core::table::{Coming, Config, LockTable, MOST_AHEAD, Mode, Space, Want};
    /// # use tenure_core::{LockToken, Time};
    /// # let hasher = BuildHasherDefault::<DefaultHasher>::default();
    /// # let mut table = LockTable::new(Config::default(), hasher, || LockToken::new(1, 1));
    /// # let owner = table.connect();
    /// # let want = Want { owner, mode: Mode::Exclusive, lease: Duration::MAX, queue: true };
    /// # let now = Time::ZERO;
    /// let read: [&[u8]; 3] = [b"reports", b"invoices", b"mail"]; // asked for in one go
    /// for keys in read.chunks(MOST_AHEAD) {
    ///     let coming = |key: &&'static [u8]| Coming { space: Space::Lock, key, renews: false };
    ///     table.look_ahead(keys.iter().map(coming));
    ///     for key in keys {
    ///         table.ask(key, want, now);
    ///     }
    /// }
    /// ```
    pub fn prefetch<'a>(&mut self, coming: impl IntoIterator<Item = UpcomingOp<'a>>) {
        let mut sought = std::mem::take(&mut self.prefetched.keys);
        sought.clear();
        sought.extend(coming.into_iter().take(MAX_PREFETCH).map(|coming| {
            let UpcomingOp { space, key, is_renewal: renews } = coming;
            PrefetchedKey { space, is_renewal: renews, hash: self.hash_key(key), id: NONE }
        }));
        // Short loops over values that do not depend on each other: so the processor runs ahead of the ones it waits
        // for.
        let mut glimpse = 0;
        for PrefetchedKey { space, hash, .. } in &sought {
            glimpse ^= self.index(*space).home(*hash);
        }
        for PrefetchedKey { space, hash, id, .. } in &mut sought {
            // The first key with this hash is nearly always the right one, and the operation itself looks closely.
            *id = self.index(*space).find(*hash, |_| true).unwrap_or(NONE);
        }
        for PrefetchedKey { id, .. } in &sought {
            glimpse ^= self.touch(*id);
        }
        for PrefetchedKey { id, .. } in sought.iter().filter(|sought| !sought.is_renewal) {
            glimpse ^= self.entries.get(*id).map_or(0, |entry| self.touch_neighbours(entry));
        }
        // Nothing is done with what was read; this keeps the compiler from noticing.
        black_box(glimpse);
        self.prefetched = Prefetched { keys: sought, next: 0 };
    }

    /// Reads what stands around an entry and changes when a hold begins or ends.
    fn touch_neighbours(&self, entry: &Entry) -> u32 {
        let holder = match &entry.holders {
            Holders::Unheld { .. } => {
                let (prev, next) = (entry.links.prev(), entry.links.next());
                self.touch(prev) ^ self.touch(next)
            }
            Holders::Sole(hold) => {
                let party = self.owners.get(hold.owner);
                u32::from(party.is_some_and(|party| party.holds.get(hold.owner_index).is_some()))
            }
            Holders::Many(members) => {
                let first = members.first().and_then(|member| self.members.get(member));
                first.map_or(0, |member| member.key)
            }
        };
        let waiter = entry.queue.first().and_then(|place| self.places.get(place));
        holder
            ^ waiter.map_or(0, |place| {
                let party = self.owners.get(place.owner);
                party.and_then(|party| party.places.get(place.owner_index)).map_or(0, |seat| *seat)
            })
    }

    fn touch(&self, id: u32) -> u32 {
        self.entries.get(id).map_or(0, Entry::touch)
    }
}
