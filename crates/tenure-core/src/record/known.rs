//! Last known record of a key: it may be outdated, and a write that is decided on it names its sequence.

use std::time::Duration;

use super::decision::{CasRecord, HolderObservations, RecordHolder, is_abandoned};
use crate::{Rules, Time};

/// Last record of a key that this process has seen.
#[derive(Clone, Debug)]
pub struct KnownRecord<T> {
    /// Sequence of the key's last message; 0 if it has none.
    pub sequence: u64,
    /// Value of that message.
    pub record: CasRecord<T>,
    /// Server timestamp of that message in nanoseconds, if known.
    pub timestamp: Option<u64>,
    /// Renewals of each holder that this process has observed. They decide when the holder may be taken over.
    pub observations: HolderObservations,
    /// Local time at which the record was seen.
    pub seen_at: Time,
    /// Number of the connection over which the record was seen.
    pub connection: u64,
}

/// A record that a read or a notification showed.
#[derive(Clone, Debug)]
pub struct SeenRecord<T> {
    /// Sequence of its message.
    pub sequence: u64,
    /// The record.
    pub record: CasRecord<T>,
    /// Server timestamp of its message in nanoseconds, if known.
    pub timestamp: Option<u64>,
    /// Number of the connection over which it was seen.
    pub connection: u64,
}

/// Source of a record that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordSource {
    /// A read from the stream's leader: replaces what was known, even with a lower sequence.
    Leader,
    /// A delivery or our own write, which may arrive late: counts only if its sequence is higher than the known one.
    Notification,
}

impl<T> KnownRecord<T> {
    /// Largest age of a known record that a write may be conditional on.
    pub const MAX_AGE: Duration = Duration::from_secs(2);

    /// No record seen yet.
    pub fn new(rules: Rules) -> Self {
        Self {
            sequence: 0,
            record: CasRecord::default(),
            timestamp: None,
            observations: HolderObservations::new(rules),
            seen_at: Time::ZERO,
            connection: 0,
        }
    }

    /// Remembers a record that was read by a request sent at `sent` and answered at `replied`.
    pub fn note(&mut self, seen: SeenRecord<T>, source: RecordSource, sent: Time, replied: Time) {
        let SeenRecord { sequence, record, timestamp, connection } = seen;
        if source == RecordSource::Leader || sequence > self.sequence {
            self.observations.observe(&record, sequence, sent, replied);
            (self.sequence, self.record, self.timestamp) = (sequence, record, timestamp);
            (self.seen_at, self.connection) = (replied, connection);
        }
    }

    /// True if a claim may be written over this record without another read.
    ///
    /// Exclusion rests on the sequence that the write names, and sequences can repeat. A bucket that was deleted and
    /// created again counts from 1. A server that crashed may have lost the last writes, and gives their sequences
    /// again. In both cases the known sequence could by chance be that of another holder's record. The first case is
    /// bounded by [`MAX_AGE`](Self::MAX_AGE). In the second the connection broke: a record that was seen over an
    /// earlier one is read again.
    pub fn may_be_overwritten(&self, now: Time, connection: u64) -> bool {
        now.since(self.seen_at) < Self::MAX_AGE && self.connection == connection
    }

    /// True if a holder may be taken over: this process has observed it without a renewal for long enough, or its
    /// record is too old for a live holder by the server's own timestamps.
    pub fn may_be_taken_over(
        &self,
        holder: &RecordHolder<T>,
        now: Time,
        server_time: Option<u64>,
    ) -> bool {
        let rules = self.observations.rules;
        let age = server_time.zip(self.timestamp).map(|(now, then)| now.saturating_sub(then));
        let abandoned = age
            .zip(holder.lease)
            .is_some_and(|(age, lease)| is_abandoned(Duration::from_nanos(age), lease, rules));
        abandoned || self.observations.may_take_over(holder.claim, now)
    }

    /// Holders, without those that this process has observed for long enough to take them over.
    pub fn holders(&self, now: Time) -> impl Iterator<Item = &RecordHolder<T>> {
        self.record
            .holders
            .iter()
            .filter(move |holder| !self.observations.may_take_over(holder.claim, now))
    }

    /// Hash of the set of holders. Renewals do not change it; 0 if there is no holder.
    pub fn holders_hash(&self, now: Time) -> u128 {
        // 2^128 divided by the golden ratio: as a factor it spreads the ids of claims over all bits.
        const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        self.holders(now).fold(0, |hash: u128, holder| {
            hash.rotate_left(7) ^ holder.claim.wrapping_add(1).wrapping_mul(SPREAD)
        })
    }
}

impl<T> Default for KnownRecord<T> {
    fn default() -> Self {
        Self::new(Rules::ALL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Mode;

    fn held(renewal_count: u64, lease: Option<Duration>) -> CasRecord<()> {
        let holder = RecordHolder {
            claim: 1,
            mode: Mode::Exclusive,
            grant_number: Some(3),
            renewal_count,
            lease,
            held_for: Duration::ZERO,
            by: (),
        };
        CasRecord { holders: vec![holder], ..CasRecord::default() }
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    const LEASE: Option<Duration> = Some(Duration::from_millis(600));

    fn seen(sequence: u64, renewal_count: u64) -> SeenRecord<()> {
        SeenRecord { sequence, record: held(renewal_count, LEASE), timestamp: None, connection: 3 }
    }

    #[test]
    fn notifications_count_only_if_newer_and_leader_reads_always() {
        let mut known = KnownRecord::default();
        known.note(seen(5, 2), RecordSource::Leader, at(0), at(0));
        known.note(seen(4, 1), RecordSource::Notification, at(1), at(1));
        assert_eq!((known.sequence, known.record.holders[0].renewal_count), (5, 2));
        known.note(seen(1, 0), RecordSource::Leader, at(2), at(2));
        assert_eq!(known.sequence, 1, "the bucket was created again");
    }

    #[test]
    fn unwatched_records_expire_by_server_timestamps() {
        let mut known = KnownRecord::default();
        let written = 1_000_000_000_000;
        let first = SeenRecord { timestamp: Some(written), ..seen(5, 2) };
        known.note(first, RecordSource::Leader, at(0), at(0));
        let holder = &known.record.holders[0];
        let limit = written + 31_800_000_000;
        let taken = |now, server_time| known.may_be_taken_over(holder, now, server_time);
        assert!(!taken(at(0), Some(limit)), "3 leases and 30 s, not a moment less");
        assert!(taken(at(0), Some(limit + 1)));
        assert!(!taken(at(0), None), "without a timestamp only observation counts");
        assert!(taken(at(700), None), "observed for its lease and the margin");
        let for_ever = RecordHolder { lease: None, ..holder.clone() };
        assert!(
            !known.may_be_taken_over(&for_ever, at(0), Some(u64::MAX)),
            "a hold without a lease never ends"
        );
    }

    #[test]
    fn a_record_is_read_again_after_two_seconds_and_after_a_reconnect() {
        let mut known = KnownRecord::default();
        known.note(seen(5, 2), RecordSource::Leader, at(0), at(10));
        assert!(known.may_be_overwritten(at(2_009), 3));
        assert!(!known.may_be_overwritten(at(2_010), 3));
        assert!(!known.may_be_overwritten(at(20), 4));
    }

    #[test]
    fn a_renewal_keeps_the_hash_and_the_end_of_a_lease_changes_it() {
        let mut known = KnownRecord::default();
        known.note(seen(5, 1), RecordSource::Leader, at(0), at(0));
        let first = known.holders_hash(at(50));
        known.note(seen(6, 2), RecordSource::Notification, at(100), at(100));
        assert_eq!(first, known.holders_hash(at(100)));
        assert_eq!(known.holders_hash(at(800)), 0, "the lease is over: no holder");
        assert_ne!(first, 0);
    }
}
