//! Records that this process has seen: the last one of each key, and when it was seen by this process's own clock.
//!
//! This is a cache, and may be outdated. A write that is decided on it names the cached sequence, and the server
//! refuses the write if the record has changed since.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::record::{HolderObservations, is_abandoned};
use tenure_core::{Rules, Time};

use super::format::{KeyRecord, RecordHolder};
use crate::store::Version;

/// Largest number of keys that are remembered.
const MAX_KNOWN_KEYS: usize = 10_000;

#[derive(Default)]
pub(super) struct KnownKeys(Mutex<HashMap<String, KnownKey>>);

/// Last known record of a key.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownKey {
    /// Sequence of the key's last message; 0 if it has none.
    pub(super) sequence: u64,
    pub(super) record: KeyRecord,
    /// Server timestamp of that message in nanoseconds, if known.
    pub(super) timestamp: Option<u64>,
    /// Renewals of each holder that this process has observed. They decide when the holder may be taken over.
    pub(super) observations: HolderObservations,
    /// Local time at which the record was seen.
    pub(super) seen_at: Time,
}

/// Source of a record that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadSource {
    /// A read from the stream's leader: replaces what was known, even with a lower sequence.
    Leader,
    /// A delivery or our own write, which may arrive late: counts only if its sequence is higher than the known one.
    Notification,
}

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
        (sequence, record, time): (u64, KeyRecord, Option<u64>),
        source: ReadSource,
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
        if source == ReadSource::Leader || sequence > known.sequence {
            known.observations.observe(&record, sent, replied);
            (known.sequence, known.record, known.timestamp) = (sequence, record, time);
            known.seen_at = replied;
        }
        known.clone()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, KnownKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KnownKey {
    /// True if a holder may be taken over: this process has observed it without a renewal for long enough, or its
    /// record is too old for a live holder by the server's own timestamps.
    pub(super) fn may_be_taken_over(
        &self,
        holder: &RecordHolder,
        now: Time,
        server_time: Option<u64>,
    ) -> bool {
        let age = server_time.zip(self.timestamp).map(|(now, then)| now.saturating_sub(then));
        let abandoned = age
            .zip(holder.lease)
            .is_some_and(|(age, lease)| is_abandoned(Duration::from_nanos(age), lease, Rules::ALL));
        abandoned || self.observations.may_take_over(holder.claim, now)
    }

    /// Holders, without those that this process has observed for long enough to take them over.
    pub(super) fn holders(&self, now: Time) -> impl Iterator<Item = &RecordHolder> {
        self.record
            .holders
            .iter()
            .filter(move |holder| !self.observations.may_take_over(holder.claim, now))
    }

    /// Version of the set of holders. Renewals do not change it.
    pub(super) fn version(&self, now: Time) -> Version {
        // 2^128 divided by the golden ratio: as a factor it spreads the ids of claims over all bits.
        const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        Version(self.holders(now).fold(0, |hash: u128, holder| {
            hash.rotate_left(7) ^ holder.claim.wrapping_add(1).wrapping_mul(SPREAD)
        }))
    }
}

#[cfg(test)]
mod tests {
    use tenure_core::table::Mode;

    use super::*;
    use crate::store::Identity;

    fn held(renewal_count: u64, lease: Option<Duration>) -> KeyRecord {
        let by = Identity::default();
        let holder = RecordHolder {
            claim: 1,
            mode: Mode::Exclusive,
            grant_number: Some(3),
            renewal_count,
            lease,
            held_for: Duration::ZERO,
            by,
        };
        KeyRecord { holders: vec![holder], ..KeyRecord::default() }
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn notifications_count_only_if_newer_and_leader_reads_always() {
        let keys = KnownKeys::default();
        let lease = Some(Duration::from_millis(600));
        keys.note("k", (5, held(2, lease), None), ReadSource::Leader, (at(0), at(0)));
        let known =
            keys.note("k", (4, held(1, lease), None), ReadSource::Notification, (at(1), at(1)));
        assert_eq!((known.sequence, known.record.holders[0].renewal_count), (5, 2));
        let known = keys.note("k", (1, held(0, lease), None), ReadSource::Leader, (at(2), at(2)));
        assert_eq!(known.sequence, 1, "the bucket was created again");
    }

    #[test]
    fn unwatched_records_expire_by_server_timestamps() {
        let lease = Duration::from_millis(600);
        let keys = KnownKeys::default();
        let written = 1_000_000_000_000;
        let seen = (5, held(2, Some(lease)), Some(written));
        let known = keys.note("k", seen, ReadSource::Leader, (at(0), at(0)));
        let holder = &known.record.holders[0];
        let limit = written + 31_800_000_000;
        assert!(
            !known.may_be_taken_over(holder, at(0), Some(limit)),
            "3 leases and 30 s, not a moment less"
        );
        assert!(known.may_be_taken_over(holder, at(0), Some(limit + 1)));
        assert!(
            !known.may_be_taken_over(holder, at(0), None),
            "without a timestamp only observation counts"
        );
        assert!(
            known.may_be_taken_over(holder, at(700), None),
            "observed for its lease and the margin"
        );
        let for_ever = RecordHolder { lease: None, ..holder.clone() };
        assert!(
            !known.may_be_taken_over(&for_ever, at(0), Some(u64::MAX)),
            "a hold without a lease never ends"
        );
    }

    #[test]
    fn a_renewal_keeps_the_version_and_the_end_of_a_lease_changes_it() {
        let keys = KnownKeys::default();
        let lease = Some(Duration::from_millis(600));
        let first = keys.note("k", (5, held(1, lease), None), ReadSource::Leader, (at(0), at(0)));
        let second =
            keys.note("k", (6, held(2, lease), None), ReadSource::Notification, (at(100), at(100)));
        assert_eq!(first.version(at(50)), second.version(at(100)));
        assert_eq!(second.version(at(800)), Version::default(), "the lease is over: no holder");
        assert_ne!(second.version(at(100)), Version::default());
    }
}
