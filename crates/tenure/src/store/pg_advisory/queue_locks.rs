//! Locks that limit the server's queue for a key, and list the sessions that stand by for a place in it.
//!
//! Both are advisory locks, which end with their session. They are locks of the other form than that of the key: of one
//! number for a pair, of two for a 64-bit number. So no key of a store is the number of a place in one of its queues.
//! Their upper half is a hash of the key's numbers. No session ever waits for one of them. A waiter that stands by for a
//! place is a *reserve*.
//!
//! - A *place* is an exclusive lock. A session that has one may block for the lock of the key.
//! - A *ticket* is a shared lock of a session that stands by. Its lower half is the time of arrival, so `pg_locks` lists
//!   reserves in their order, for every role.
//!
//! A key of the other form may have such a number by accident. Then one of them finds its lock taken for a while, and
//! that is all: a store works without places and tickets, by its polls.

use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::lock_id::{LockId, joined, literal};
use super::options::KeyForm;

/// Ticks of tickets per second. A ticket counts ticks modulo 2^32: it is unique for 497 days.
const TICKS_PER_SECOND: u32 = 100;
/// Ticks by which the database's clock may be set back without making a new ticket the oldest.
const CLOCK_STEP_TICKS: u32 = 1_000_000;
/// Prefix of the notification channel of a reserve, before its process number. With a channel per session, the server
/// sends a notification to the called client alone.
const RESERVE_CHANNEL: &str = "tenure_reserve_";

/// Shortest interval between two polls of a reserve, unless its ttl is less than twice that.
const MIN_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Part of the interval between two polls that each reserve adds: all reserves together send about four per second.
const POLL_INTERVAL_PER_RESERVE: Duration = Duration::from_millis(250);
/// Longest interval between two polls. If most reserves vanish at once, the others find that out by a poll.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(120);
/// Number of intervals without a poll after which the server ends the session of a reserve.
const MISSED_POLLS: u32 = 4;

/// Interval between two polls of a reserve.
///
/// It grows with the number of reserves, so that a large fleet costs the server no more than a small one. The poll also
/// proves that the server answers.
pub(super) fn poll_interval(ttl: Duration, reserves: u32) -> Duration {
    let shared = POLL_INTERVAL_PER_RESERVE.saturating_mul(reserves);
    shared.clamp(MIN_POLL_INTERVAL.min(ttl / 2), MAX_POLL_INTERVAL)
}

/// SQL of the idle timeout of a reserve in milliseconds. The SQL `reserves` computes their number; if it is null, the
/// session does not stand by, and the timeout is the ttl.
pub(super) fn reserve_timeout_millis(ttl: Duration, reserves: &str) -> String {
    let per_reserve = (POLL_INTERVAL_PER_RESERVE * MISSED_POLLS).as_millis();
    let max = (MAX_POLL_INTERVAL * MISSED_POLLS).as_millis();
    let min = (MIN_POLL_INTERVAL * MISSED_POLLS).max(ttl).as_millis();
    let otherwise = ttl.as_millis();
    format!(
        "CASE WHEN {reserves} IS NULL THEN {otherwise} \
         ELSE greatest(least({reserves} * {per_reserve}, {max}), {min}) END"
    )
}

/// Numbers of the locks that belong to the queue of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueLocks {
    /// Form of these locks.
    form: KeyForm,
    /// Upper half of places.
    places: u32,
    /// Upper half of tickets.
    tickets: u32,
}

impl QueueLocks {
    pub(super) fn of(lock: LockId) -> Self {
        let hash = Sha256::digest(format!("tenure queue {lock}"));
        let form = lock.form().other();
        let half = |at: usize| {
            let half = u32::from_be_bytes([hash[at], hash[at + 1], hash[at + 2], hash[at + 3]]);
            match form {
                // Small numbers, which people choose, have the upper half 0, or all ones if they are negative.
                KeyForm::Bigint if matches!(half, 0 | u32::MAX) => 0x7e40_c0de,
                KeyForm::Bigint => half,
                // The two upper bits differ. So a pair whose first number is less than 2^30 is never one of these, nor
                // is its negative.
                KeyForm::Pair => (half & !(1 << 30)) | ((!half >> 1) & (1 << 30)),
            }
        };
        Self { form, places: half(0), tickets: half(4) }
    }

    /// Upper halves of all locks of the queue.
    pub(super) fn classes(self) -> [u32; 2] {
        [self.places, self.tickets]
    }

    /// Upper half of tickets, as `pg_locks` shows it.
    pub(super) fn ticket_class(self) -> u32 {
        self.tickets
    }

    /// SQL arguments of a place.
    fn place(self, place: u8) -> String {
        match self.form {
            KeyForm::Bigint => literal(joined(self.places, place.into())),
            KeyForm::Pair => format!("{}, {place}", self.places.cast_signed()),
        }
    }

    /// SQL arguments of the ticket that the SQL `ticket` computes.
    fn ticket(self, ticket: &str) -> String {
        match self.form {
            KeyForm::Bigint => format!("{} | {ticket}", literal(joined(self.tickets, 0))),
            KeyForm::Pair => {
                format!("{}, ({ticket})::bit(32)::int4", self.tickets.cast_signed())
            }
        }
    }

    /// SQL branches of a CASE that take the first free place of `queue`, with the outcome `place N`.
    pub(super) fn take_place(self, queue: u8) -> String {
        let branch = |place| {
            format!("WHEN pg_try_advisory_lock({}) THEN 'place {place}' ", self.place(place))
        };
        (0..queue).map(branch).collect()
    }

    /// SQL condition that frees a place of this session. It is true.
    pub(super) fn free_place(self, place: u8) -> String {
        format!("pg_advisory_unlock({}) IS NOT NULL", self.place(place))
    }

    /// SQL condition that registers this session under the ticket that the SQL `ticket` computes. It is true, even if a
    /// program holds that number: the session then goes on without a ticket, and is not called.
    pub(super) fn register(self, ticket: &str) -> String {
        format!("pg_try_advisory_lock_shared({}) IS NOT NULL", self.ticket(ticket))
    }

    /// SQL condition that removes the ticket that the SQL `ticket` computes. It is true.
    pub(super) fn unregister(self, ticket: &str) -> String {
        format!("pg_advisory_unlock_shared({}) IS NOT NULL", self.ticket(ticket))
    }

    /// SQL condition that sessions stand by.
    pub(super) fn has_reserves(self) -> String {
        format!(
            "EXISTS (SELECT FROM pg_locks WHERE {} AND {})",
            self.in_class(self.tickets),
            is_advisory()
        )
    }

    /// SQL condition that the older reserves need all free places of `queue`. The SQL `ticket` computes the ticket of
    /// this session, which is registered. It also counts the reserves, for [`COUNTED_RESERVES`].
    ///
    /// A waiter registers, and then reads this. A session that is granted the lock frees its place, and then reads the
    /// tickets for [`call_if_low`](Self::call_if_low). So either the waiter finds the free place here, or its ticket is
    /// found there. Newer tickets do not count here: of several waiters that register at once, the oldest must see the
    /// free place as its own.
    pub(super) fn is_full(self, queue: u8, ticket: &str) -> String {
        self.reads_queue(ticket, &format!("ahead >= {queue}"))
    }

    /// As [`is_full`](Self::is_full), but false if no session has a place. Reserves that are frozen take no place until
    /// the server ends their sessions: a queue that is empty is free to the first reserve that polls.
    pub(super) fn is_full_unless_empty(self, queue: u8, ticket: &str) -> String {
        self.reads_queue(ticket, &format!("ahead >= {queue} AND placed > 0"))
    }

    fn reads_queue(self, ticket: &str, condition: &str) -> String {
        format!(
            "(SELECT set_config('tenure.reserves', reserves::text, false) IS NULL OR {condition} \
             FROM (SELECT {} FROM pg_locks WHERE {} AND {} OFFSET 0) AS q)",
            self.counts(ticket),
            self.is_in_queue(),
            is_advisory()
        )
    }

    /// SQL of a poll, to which a WHERE clause can be added: the columns `reserves` and `may_enter`, and `more`, which may
    /// use `q.reserves`. The SQL condition `is_holder` is that of rows of the lock itself.
    ///
    /// A place that stays free was left by a waiter that died or gave up, or by grants that did not call. So a poll also
    /// calls the oldest reserves, if half of the places are free: with one frozen reserve at the head, they are not
    /// called by every poll.
    pub(super) fn poll(self, queue: u8, ticket: &str, is_holder: &str, more: &str) -> String {
        let (counts, call) = (self.counts(ticket), self.call(queue));
        format!(
            "SELECT q.reserves, (q.ahead < {queue} OR q.placed = 0 OR q.holders = 0)::int AS may_enter, {more}, \
             CASE WHEN q.placed <= {} THEN {call} END \
             FROM (SELECT {counts}, count(*) FILTER (WHERE granted AND {is_holder}) AS holders FROM pg_locks \
             WHERE ({} OR {is_holder}) AND {} OFFSET 0) AS q",
            queue / 2,
            self.is_in_queue(),
            is_advisory()
        )
    }

    /// SQL columns: the numbers of reserves, of places that are taken, and of places and reserves before the SQL
    /// `ticket`.
    fn counts(self, ticket: &str) -> String {
        let (is_place, is_ticket) = (self.in_class(self.places), self.in_class(self.tickets));
        let distance = format!("(({ticket} - objid::int8) & {})", u32::MAX);
        let is_older = format!(
            "({distance} BETWEEN 1 AND {} OR {distance} = 0 AND pid < pg_backend_pid())",
            1_u32 << 31
        );
        format!(
            "count(*) FILTER (WHERE {is_ticket}) AS reserves, count(*) FILTER (WHERE {is_place}) AS placed, \
             count(*) FILTER (WHERE {is_place} OR {is_ticket} AND {is_older}) AS ahead"
        )
    }

    /// SQL that notifies the oldest reserves: as many as there are free places of `queue`. Returns their number.
    fn call(self, queue: u8) -> String {
        self.call_if(queue, "true")
    }

    /// As [`call`](Self::call), if a quarter of the places or less is taken.
    ///
    /// The server signals every listening session of the database for a notification. The take-over by the next leader
    /// should not compete with that. While waiters are left in the queue, calls can wait for the next poll.
    pub(super) fn call_if_low(self, queue: u8) -> String {
        self.call_if(queue, &format!("placed <= {}", queue / 4))
    }

    fn call_if(self, queue: u8, condition: &str) -> String {
        let (is_place, is_ticket, age) =
            (self.in_class(self.places), self.in_class(self.tickets), age());
        format!(
            "(SELECT count(pg_notify('{RESERVE_CHANNEL}' || pid, '')) FROM (\
             SELECT pid, {is_ticket} AS is_ticket, \
             row_number() OVER (PARTITION BY classid ORDER BY {age} DESC, pid) AS nth, \
             count(*) FILTER (WHERE {is_place}) OVER () AS placed FROM pg_locks WHERE {} AND {}) AS q \
             WHERE is_ticket AND nth <= {queue} - placed AND {condition})",
            self.is_in_queue(),
            is_advisory()
        )
    }

    fn is_in_queue(self) -> String {
        let objsubid = self.form.objsubid();
        format!("objsubid = {objsubid} AND classid IN ({}, {})", self.places, self.tickets)
    }

    /// SQL condition that a row of `pg_locks` is a lock with this upper half.
    fn in_class(self, class: u32) -> String {
        format!("objsubid = {} AND classid = {class}", self.form.objsubid())
    }
}

/// SQL of the number of reserves, after the statement has read [`QueueLocks::is_full`].
pub(super) const COUNTED_RESERVES: &str = "current_setting('tenure.reserves')::int8";

/// SQL of the ticket of a session that arrives now.
pub(super) fn new_ticket() -> String {
    format!("{} & {}", now_ticks(), u32::MAX)
}

/// SQL of the time since the arrival of the ticket `objid`, in microseconds.
pub(super) fn waited_micros() -> String {
    format!("({} - {CLOCK_STEP_TICKS}) * {}", age(), 1_000_000 / TICKS_PER_SECOND)
}

/// Notification channel of the reserve whose process has this number.
pub(super) fn reserve_channel(pid: i32) -> String {
    format!("{RESERVE_CHANNEL}{pid}")
}

/// SQL of the age of the ticket `objid` in ticks, plus [`CLOCK_STEP_TICKS`].
fn age() -> String {
    format!("(({} + {CLOCK_STEP_TICKS} - objid::int8) & {})", now_ticks(), u32::MAX)
}

fn now_ticks() -> String {
    format!("(extract(epoch FROM clock_timestamp()) * {TICKS_PER_SECOND})::int8")
}

/// SQL condition that a row of `pg_locks` is an advisory lock of this database.
fn is_advisory() -> &'static str {
    "locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
}

#[cfg(test)]
mod tests {
    use super::super::pair::Pair;
    use super::*;

    #[test]
    fn numbers_of_a_queue_are_the_same_for_ever_and_far_from_small_ones() {
        // Participants of all versions must agree on them.
        let pair = |first, second| LockId::Pair(Pair { first, second });
        let locks = QueueLocks::of(pair(1234, 5678));
        let form = KeyForm::Bigint;
        assert_eq!(locks, QueueLocks { form, places: 0x2ac7_2b6e, tickets: 0x26f8_ac78 });
        assert_ne!(locks, QueueLocks::of(pair(5678, 1234)));
        assert_eq!(locks.place(3), "'3082480221404790787'::int8");
        assert_eq!(locks.ticket("t"), "'2808183999061557248'::int8 | t");
    }

    #[test]
    fn the_queue_of_a_64_bit_key_has_pairs_far_from_small_ones() {
        // Participants of all versions must agree on them.
        let locks = QueueLocks::of(LockId::Bigint(42));
        assert_eq!(locks.place(3), "-1381310788, 3");
        assert_eq!(locks.ticket("t"), "-1702865188, (t)::bit(32)::int4");
        for number in -500..500 {
            let QueueLocks { places, tickets, .. } = QueueLocks::of(LockId::Bigint(number));
            for class in [places, tickets] {
                assert!(class.cast_signed().unsigned_abs() >= 1 << 30, "{number}: {class}");
            }
        }
    }

    #[test]
    fn a_large_fleet_polls_no_more_than_a_small_one() {
        let (ttl, seconds) = (Duration::from_secs(15), Duration::from_secs);
        assert_eq!(poll_interval(ttl, 0), seconds(2));
        assert_eq!(poll_interval(ttl, 8), seconds(2));
        assert_eq!(poll_interval(ttl, 100), seconds(25));
        assert_eq!(poll_interval(ttl, 10_000), MAX_POLL_INTERVAL);
        assert_eq!(poll_interval(seconds(1), 1), Duration::from_millis(500));
    }
}
