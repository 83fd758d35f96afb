//! Watches: one-shot notifications of a change to a key.

use std::collections::HashMap;

use tenure_core::table::{KeySpace, Owner};

type WatchedKey = (KeySpace, Box<[u8]>);

/// All watches, by key and by connection. A watch is removed when it fires.
#[derive(Debug, Default)]
pub(super) struct Watches {
    by_key: HashMap<WatchedKey, Vec<(Owner, u64)>>,
    by_owner: HashMap<Owner, HashMap<u64, WatchedKey>>,
}

impl Watches {
    pub(super) fn count_of(&self, owner: Owner) -> usize {
        self.by_owner.get(&owner).map_or(0, HashMap::len)
    }

    /// Adds a watch. `id` is chosen by the client; a watch of the same connection and id is replaced.
    pub(super) fn insert(&mut self, space: KeySpace, key: &[u8], owner: Owner, id: u64) {
        self.remove(owner, id);
        self.by_key.entry((space, key.into())).or_default().push((owner, id));
        self.by_owner.entry(owner).or_default().insert(id, (space, key.into()));
    }

    pub(super) fn remove(&mut self, owner: Owner, id: u64) {
        let Some(own_watches) = self.by_owner.get_mut(&owner) else { return };
        let Some(key) = own_watches.remove(&id) else { return };
        if own_watches.is_empty() {
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

    /// Panics unless both indexes agree and every watching connection is open.
    pub(super) fn check(&self, is_open: impl Fn(Owner) -> bool) {
        let by_key: usize = self.by_key.values().map(Vec::len).sum();
        assert_eq!(by_key, self.len(), "watches by key and by owner");
        assert!(self.by_owner.keys().all(|owner| is_open(*owner)), "watch of a closed connection");
        assert!(
            self.by_owner.values().all(|own_watches| !own_watches.is_empty()),
            "connection without a watch"
        );
        assert!(self.by_key.values().all(|watchers| !watchers.is_empty()), "key without a watch");
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Removes and returns the watches of a key.
    pub(super) fn take(&mut self, space: KeySpace, key: &[u8]) -> Vec<(Owner, u64)> {
        let watchers = self.by_key.remove(&(space, key.into())).unwrap_or_default();
        for (owner, id) in &watchers {
            if let Some(own_watches) = self.by_owner.get_mut(owner) {
                own_watches.remove(id);
                if own_watches.is_empty() {
                    self.by_owner.remove(owner);
                }
            }
        }
        watchers
    }
}
