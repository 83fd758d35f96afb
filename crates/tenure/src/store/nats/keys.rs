//! What this process knows of keys: the last record it saw of each, and since when on its own clock.
//!
//! Nothing is decided here. A write that was decided on what is known names the sequence it is known at, and is refused
//! where that is old news.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::record::{HolderObservations, is_abandoned};
use tenure_core::{Rules, Time};

use super::format::{KeyRecord, RecordHolder};
use crate::store::Version;

/// The most keys that are remembered.
const MAX_KNOWN_KEYS: usize = 10_000;

#[derive(Default)]
pub(super) struct Keys(Mutex<HashMap<String, KnownKey>>);

/// What is known of a key.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownKey {
    /// The sequence of its last message; 0 where there was none.
    pub(super) sequence: u64,
    pub(super) record: KeyRecord,
    /// The server's timestamp of that message, where it was told.
    pub(super) time: Option<u64>,
    pub(super) watched: HolderObservations,
    /// When it was noted.
    pub(super) at: Time,
}

/// Where news of a key comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadSource {
    /// The leader said so: it is so, whatever was known.
    Leader,
    /// It was so at some time: only what is later than what is known counts.
    Notification,
}

impl Keys {
    /// What is known of a key.
    pub(super) fn known(&self, subject: &str) -> Option<KnownKey> {
        self.lock().get(subject).cloned()
    }

    /// Notes what was seen by a request that was sent at `sent` and answered at `replied`; what is known now.
    pub(super) fn note(
        &self,
        subject: &str,
        (sequence, record, time): (u64, KeyRecord, Option<u64>),
        source: ReadSource,
        (sent, replied): (Time, Time),
    ) -> KnownKey {
        let mut keys = self.lock();
        if keys.len() >= MAX_KNOWN_KEYS && !keys.contains_key(subject) {
            // What is forgotten costs a read, and to who watched it the time it had watched for.
            let now = replied;
            keys.retain(|_, known| known.watched.next_takeover(now) != Time::MAX);
            if keys.len() >= MAX_KNOWN_KEYS {
                keys.clear();
            }
        }
        let known = keys.entry(subject.to_owned()).or_default();
        if source == ReadSource::Leader || sequence > known.sequence {
            known.watched.observe(&record, sent, replied);
            (known.sequence, known.record, known.time) = (sequence, record, time);
            known.at = replied;
        }
        known.clone()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, KnownKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KnownKey {
    /// Whether a holder may be taken over: it was watched for long enough, or its record is older by the server's own
    /// timestamps than any live holder's.
    pub(super) fn may_be_taken_over(
        &self,
        holder: &RecordHolder,
        now: Time,
        server: Option<u64>,
    ) -> bool {
        let age = server.zip(self.time).map(|(now, then)| now.saturating_sub(then));
        let abandoned = age
            .zip(holder.lease)
            .is_some_and(|(age, lease)| is_abandoned(Duration::from_nanos(age), lease, Rules::ALL));
        abandoned || self.watched.may_take_over(holder.claim, now)
    }

    /// Who holds the key, as far as can be seen: a lease that is over is no hold.
    pub(super) fn holders(&self, now: Time) -> impl Iterator<Item = &RecordHolder> {
        self.record
            .holders
            .iter()
            .filter(move |holder| !self.watched.may_take_over(holder.claim, now))
    }

    /// The version of who holds it: renewals do not change it.
    pub(super) fn version(&self, now: Time) -> Version {
        const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        Version(self.holders(now).fold(0, |seen: u128, holder| {
            seen.rotate_left(7) ^ holder.claim.wrapping_add(1).wrapping_mul(SPREAD)
        }))
    }
}

#[cfg(test)]
mod tests {
    use tenure_core::table::Mode;

    use super::*;
    use crate::store::Identity;

    fn held(beat: u64, lease: Option<Duration>) -> KeyRecord {
        let by = Identity::default();
        let holder = RecordHolder {
            claim: 1,
            mode: Mode::Exclusive,
            grant: Some(3),
            renewal_count: beat,
            lease,
            held: Duration::ZERO,
            by,
        };
        KeyRecord { holders: vec![holder], ..KeyRecord::default() }
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn hearsay_counts_only_where_it_is_news_and_the_leader_always() {
        let keys = Keys::default();
        let lease = Some(Duration::from_millis(600));
        keys.note("k", (5, held(2, lease), None), ReadSource::Leader, (at(0), at(0)));
        let known =
            keys.note("k", (4, held(1, lease), None), ReadSource::Notification, (at(1), at(1)));
        assert_eq!((known.sequence, known.record.holders[0].renewal_count), (5, 2));
        let known = keys.note("k", (1, held(0, lease), None), ReadSource::Leader, (at(2), at(2)));
        assert_eq!(known.sequence, 1, "the bucket was made anew");
    }

    #[test]
    fn unwatched_records_expire_by_server_timestamps() {
        let lease = Duration::from_millis(600);
        let keys = Keys::default();
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
        assert!(!known.may_be_taken_over(holder, at(0), None), "without a timestamp it is watched");
        assert!(
            known.may_be_taken_over(holder, at(700), None),
            "as long as its lease and the margin"
        );
        let for_ever = RecordHolder { lease: None, ..holder.clone() };
        assert!(!known.may_be_taken_over(&for_ever, at(0), Some(u64::MAX)), "no lease, no end");
    }

    #[test]
    fn a_renewal_is_no_change_to_what_is_seen_and_an_end_is() {
        let keys = Keys::default();
        let lease = Some(Duration::from_millis(600));
        let first = keys.note("k", (5, held(1, lease), None), ReadSource::Leader, (at(0), at(0)));
        let second =
            keys.note("k", (6, held(2, lease), None), ReadSource::Notification, (at(100), at(100)));
        assert_eq!(first.version(at(50)), second.version(at(100)));
        assert_eq!(second.version(at(800)), Version::default(), "over: nobody holds it");
        assert_ne!(second.version(at(100)), Version::default());
    }
}
