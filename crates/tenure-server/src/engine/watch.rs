//! Who wants to know when a key changes.

use std::collections::HashMap;

use tenure_core::table::{KeySpace, Owner, PlaceId};
use tenure_core::wire::Push;

use super::Engine;
use super::connection::Wake;

/// A key of a space.
type WatchedKey = (KeySpace, Box<[u8]>);

/// Watches, each good for one change.
#[derive(Debug, Default)]
pub(super) struct Watches {
    by_key: HashMap<WatchedKey, Vec<(Owner, u64)>>,
    by_owner: HashMap<Owner, HashMap<u64, WatchedKey>>,
}

impl Watches {
    pub(super) fn count(&self, owner: Owner) -> usize {
        self.by_owner.get(&owner).map_or(0, HashMap::len)
    }

    pub(super) fn insert(&mut self, space: KeySpace, key: &[u8], owner: Owner, id: u64) {
        self.remove(owner, id);
        self.by_key.entry((space, key.into())).or_default().push((owner, id));
        self.by_owner.entry(owner).or_default().insert(id, (space, key.into()));
    }

    pub(super) fn remove(&mut self, owner: Owner, id: u64) {
        let Some(own) = self.by_owner.get_mut(&owner) else { return };
        let Some(key) = own.remove(&id) else { return };
        if own.is_empty() {
            self.by_owner.remove(&owner);
        }
        if let Some(watchers) = self.by_key.get_mut(&key) {
            watchers.retain(|watcher| *watcher != (owner, id));
            if watchers.is_empty() {
                self.by_key.remove(&key);
            }
        }
    }

    pub(super) fn remove_all(&mut self, owner: Owner) {
        let ids: Vec<u64> =
            self.by_owner.get(&owner).into_iter().flat_map(HashMap::keys).copied().collect();
        for id in ids {
            self.remove(owner, id);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_owner.values().map(HashMap::len).sum()
    }

    /// Panics unless both lists agree, and all who watch are there.
    pub(super) fn check(&self, is_there: impl Fn(Owner) -> bool) {
        let by_key: usize = self.by_key.values().map(Vec::len).sum();
        assert_eq!(by_key, self.len(), "watches by key and by owner");
        assert!(self.by_owner.keys().all(|owner| is_there(*owner)), "a watch of nobody");
        assert!(self.by_owner.values().all(|own| !own.is_empty()), "an owner of no watch");
        assert!(self.by_key.values().all(|watchers| !watchers.is_empty()), "a key unwatched");
    }

    /// Those who watch a key. Each is told once.
    fn take(&mut self, space: KeySpace, key: &[u8]) -> Vec<(Owner, u64)> {
        let watchers = self.by_key.remove(&(space, key.into())).unwrap_or_default();
        for (owner, id) in &watchers {
            if let Some(own) = self.by_owner.get_mut(owner) {
                own.remove(id);
                if own.is_empty() {
                    self.by_owner.remove(owner);
                }
            }
        }
        watchers
    }
}

impl Engine {
    /// A key is not as it was.
    pub(super) fn key_changed(&mut self, space: KeySpace, key: &[u8]) {
        if self.watches.by_key.is_empty() {
            return;
        }
        for (owner, id) in self.watches.take(space, key) {
            let mut line = Vec::new();
            Push::Changed { id }.write(&mut line);
            self.woken.push_back((owner, Wake::Push(line.into())));
        }
    }

    /// The key of a place, if anybody wants to know what happens to it.
    pub(super) fn observed_key_of(
        &self,
        place: PlaceId,
    ) -> Option<(KeySpace, tenure_core::table::KeyBytes)> {
        let observed = !self.watches.by_key.is_empty() || self.history.is_enabled();
        if observed { self.table.key_of_place(place) } else { None }
    }

    /// The keys that lose a waiter when a connection ends, if anybody watches anything.
    pub(super) fn watched_keys_of(
        &self,
        owner: Owner,
    ) -> Vec<(KeySpace, tenure_core::table::KeyBytes)> {
        if self.watches.by_key.is_empty() { Vec::new() } else { self.table.keys_of_places(owner) }
    }
}
