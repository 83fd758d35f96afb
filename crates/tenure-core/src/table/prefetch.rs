//! Prefetching the memory that a batch of coming operations needs.
//!
//! In a large table the cost of an operation is cache misses: on the index slot, then on the entry, then on the records
//! linked to it. Each address is known only after the previous load. A single operation cannot avoid this chain. For a
//! batch that is known in advance, each step is done for every operation before the next step, so the processor
//! overlaps the misses of all operations.

use std::hash::BuildHasher;
use std::hint::black_box;

use super::LockTable;
use super::entries::{Entry, Holders};
use super::prefetched::{MAX_PREFETCH, Prefetched, PrefetchedKey};
use super::slab::NONE;
use super::types::{Mint, UpcomingOp};

impl<S: BuildHasher, M: Mint> LockTable<S, M> {
    /// Loads the memory that the next operations need. `upcoming` lists the next operations that take a key, in the
    /// order in which they will be made. Only the first [`MAX_PREFETCH`] count.
    ///
    /// This changes no answer, only the time that it takes. With a million keys, a batch of 32 operations takes a third
    /// of the time; with few keys a prefetch costs nothing. Only a key that is not in the table costs a second hash. It
    /// is harmless to prefetch for operations that are not made or are made in another order, and to make operations
    /// without a prefetch.
    ///
    /// ```
    /// # use std::hash::{BuildHasherDefault, DefaultHasher};
    /// # use std::time::Duration;
    /// # use tenure_core::table::{KeySpace, LockTable, MAX_PREFETCH, Mode, TableClaim, TableConfig, UpcomingOp};
    /// # use tenure_core::{LockToken, Time};
    /// # let hasher = BuildHasherDefault::<DefaultHasher>::default();
    /// # let mut table = LockTable::new(TableConfig::default(), hasher, || LockToken::new(1, 1));
    /// # let owner = table.connect();
    /// # let claim = TableClaim { owner, mode: Mode::Exclusive, lease: Duration::MAX, queue: true };
    /// # let now = Time::ZERO;
    /// let requested: [&[u8]; 3] = [b"reports", b"invoices", b"mail"]; // received together
    /// for keys in requested.chunks(MAX_PREFETCH) {
    ///     let upcoming = |key: &&'static [u8]| UpcomingOp { space: KeySpace::Lock, key, is_renewal: false };
    ///     table.prefetch(keys.iter().map(upcoming));
    ///     for key in keys {
    ///         table.claim(key, claim, now);
    ///     }
    /// }
    /// ```
    pub fn prefetch<'a>(&mut self, upcoming: impl IntoIterator<Item = UpcomingOp<'a>>) {
        let mut keys = std::mem::take(&mut self.prefetched.keys);
        keys.clear();
        keys.extend(upcoming.into_iter().take(MAX_PREFETCH).map(|op| {
            let UpcomingOp { space, key, is_renewal } = op;
            PrefetchedKey { space, is_renewal, hash: self.hash_key(key), id: NONE }
        }));
        // One short loop per step of the chain, over all keys. Within a loop no load depends on another, so the
        // processor starts the later ones while it waits for the first. One loop that took each key through all steps
        // would lose this: the dependent loads and branches of one key fill the processor's out-of-order window, and
        // delay the loads of the next key.
        let mut loaded = 0;
        for PrefetchedKey { space, hash, .. } in &keys {
            loaded ^= self.index(*space).home(*hash);
        }
        for PrefetchedKey { space, hash, id, .. } in &mut keys {
            // This accepts the first entry with the hash. To compare the keys here would load the entries one after
            // another, and these are the misses that the next loop overlaps. So the entry may be the wrong one. It may
            // also be removed, or its slot reused, before the operation runs. `LockTable::find` therefore compares
            // space and key, and searches the index if they differ: a stale id costs time, and never finds another key.
            *id = self.index(*space).find(*hash, |_| true).unwrap_or(NONE);
        }
        for PrefetchedKey { id, .. } in &keys {
            loaded ^= self.touch(*id);
        }
        // The entries are in the cache now, so their links can be followed. A renewal changes no links.
        for PrefetchedKey { id, .. } in keys.iter().filter(|key| !key.is_renewal) {
            loaded ^= self.entries.get(*id).map_or(0, |entry| self.touch_neighbours(entry));
        }
        // The loaded values have no other use: without this the compiler would remove the loads.
        black_box(loaded);
        self.prefetched = Prefetched { keys, next: 0 };
    }

    /// Loads the records linked to an entry that change when a hold begins or ends.
    fn touch_neighbours(&self, entry: &Entry) -> u32 {
        let holder = match &entry.holders {
            Holders::Unheld { .. } => {
                let (prev, next) = (entry.links.prev(), entry.links.next());
                self.touch(prev) ^ self.touch(next)
            }
            Holders::Sole(hold) => {
                let owner = self.owners.get(hold.owner);
                u32::from(owner.is_some_and(|owner| owner.holds.get(hold.owner_index).is_some()))
            }
            Holders::Many(members) => {
                let first = members.first().and_then(|member| self.members.get(member));
                first.map_or(0, |member| member.key)
            }
        };
        let waiter = entry.queue.first().and_then(|place| self.places.get(place));
        holder
            ^ waiter.map_or(0, |place| {
                let owner = self.owners.get(place.owner);
                owner
                    .and_then(|owner| owner.places.get(place.owner_index))
                    .map_or(0, |place| *place)
            })
    }

    fn touch(&self, id: u32) -> u32 {
        self.entries.get(id).map_or(0, Entry::touch)
    }
}
