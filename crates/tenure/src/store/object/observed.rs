//! Observations of locks: the time since which each was seen at its version, by this client's own clock.
//!
//! They outlive single claims, so that a client that tries repeatedly can take over a dead holder just as a waiter can.

use std::collections::HashMap;
use std::sync::MutexGuard;

use tenure_core::observe::Observation;
use tenure_core::{Rules, Time};

use super::bucket::ObjectVersion;
use crate::mutex::Mutex;

/// Largest number of locks that are observed at a time.
const MAX_OBSERVED: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Observed(Mutex<HashMap<String, ObservedEntry>>);

#[derive(Debug)]
struct ObservedEntry {
    observation: Observation<ObjectVersion>,
    /// Time of the last read.
    last: Time,
}

impl Observed {
    /// Records that a request sent at `sent` and answered at `replied` showed an object at a version. Returns the time
    /// since which it was seen at that version.
    pub(super) fn first_seen(
        &self,
        name: &str,
        version: &ObjectVersion,
        sent: Time,
        replied: Time,
    ) -> Time {
        let mut entries = self.lock();
        if entries.len() >= MAX_OBSERVED && !entries.contains_key(name) {
            // The half that was not read for the longest is dropped, and observed from the start if it is read again.
            let mut lasts: Vec<_> = entries.values().map(|entry| entry.last).collect();
            let middle = lasts.len() / 2;
            let (_, median, _) = lasts.select_nth_unstable(middle);
            let median = *median;
            entries.retain(|_, entry| entry.last > median);
        }
        let entry = entries.entry(name.to_owned()).or_insert_with(|| ObservedEntry {
            observation: Observation::new(Rules::ALL),
            last: replied,
        });
        entry.last = replied;
        entry.observation.first_seen(version.clone(), sent, replied)
    }

    /// Drops the observation of an object that no longer exists.
    pub(super) fn forget(&self, name: &str) {
        self.lock().remove(name);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, ObservedEntry>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn many_locks_make_room_for_more_and_the_last_ones_stay() {
        let observed = Observed::default();
        let at = |n: usize| Time::ZERO + Duration::from_secs(n as u64);
        let see = |n: usize, now| {
            observed.first_seen(&n.to_string(), &ObjectVersion("v".into()), now, now)
        };
        for n in 0..=MAX_OBSERVED {
            assert_eq!(see(n, at(n)), at(n));
        }
        let later = at(MAX_OBSERVED + 5);
        assert_eq!(see(MAX_OBSERVED - 1, later), at(MAX_OBSERVED - 1), "still observed");
        assert_eq!(see(0, later), later, "was dropped");
        assert!(observed.lock().len() <= MAX_OBSERVED);
    }
}
