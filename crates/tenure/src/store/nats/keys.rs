//! Records that this process has seen: the last one of each key, and when it was seen by this process's own clock.
//!
//! This is a cache, and may be outdated. A write that is decided on it names the cached sequence, and the server
//! refuses the write if the record has changed since.

use std::collections::HashMap;
use std::sync::MutexGuard;

use tenure_core::Time;
use tenure_core::record::{KnownRecord, RecordSource, SeenRecord};

use crate::mutex::Mutex;
use crate::store::{Identity, Version};

/// Largest number of keys that are remembered.
const MAX_KNOWN_KEYS: usize = 10_000;

#[derive(Default)]
pub(super) struct KnownKeys(Mutex<HashMap<String, KnownKey>>);

/// Last known record of a key.
pub(super) type KnownKey = KnownRecord<Identity>;

impl KnownKeys {
    /// Last known record of a subject.
    pub(super) fn known(&self, subject: &str) -> Option<KnownKey> {
        self.lock().get(subject).cloned()
    }

    /// Remembers a record. It was read by a request that was sent at `sent` and answered at `replied`. Returns the
    /// record that is known afterwards.
    pub(super) fn note(
        &self,
        subject: &str,
        seen: SeenRecord<Identity>,
        source: RecordSource,
        (sent, replied): (Time, Time),
    ) -> KnownKey {
        let mut keys = self.lock();
        if keys.len() >= MAX_KNOWN_KEYS && !keys.contains_key(subject) {
            // A forgotten record costs a read. If it has a holder, the observation starts again, which delays a
            // takeover: so keys without a pending takeover are forgotten first.
            let now = replied;
            keys.retain(|_, known| known.observations.next_takeover(now) != Time::MAX);
            if keys.len() >= MAX_KNOWN_KEYS {
                keys.clear();
            }
        }
        let known = keys.entry(subject.to_owned()).or_default();
        known.note(seen, source, sent, replied);
        known.clone()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, KnownKey>> {
        self.0.lock()
    }
}

/// Version of the set of holders. Renewals do not change it.
pub(super) fn version_of(known: &KnownKey, now: Time) -> Version {
    Version(known.holders_hash(now))
}
