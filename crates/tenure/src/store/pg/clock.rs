//! Model of the database's clock: its readings, and since when it is known to be steady.

use std::sync::MutexGuard;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tenure_core::Time;
use tenure_core::lease::margin;
use tokio_postgres::Row;

use crate::mutex::Mutex;
use crate::{Error, ErrorKind, Result};

/// SQL of the database's clock, in microseconds since 1970. Statements return it as the column `now`.
pub(crate) const NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8";

/// A reading of the database's clock, taken at some instant between two instants of ours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) sent: Time,
    pub(crate) replied: Time,
    /// Microseconds since 1970.
    pub(crate) db: i64,
}

/// Interval of the database's clock in which a claim may be executed, and how far that clock is trusted. All values are
/// in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) from: i64,
    pub(crate) until: i64,
    pub(crate) expected: i64,
    /// Time for which the clock is assumed to have been steady.
    pub(crate) steady: i64,
    /// Time for which the clock was observed to be steady.
    pub(crate) measured: i64,
    /// Time by which the clock may be ahead of the clock that earlier leases were counted on: it was set forward by this
    /// much, or is ahead of ours. Meaningless once the clock has been steady for longer than those leases.
    #[cfg_attr(not(feature = "jobs"), expect(dead_code, reason = "only jobs use it"))]
    pub(crate) ahead: i64,
}

impl Window {
    pub(crate) fn contains(&self, db: i64) -> bool {
        (self.from..=self.until).contains(&db)
    }
}

/// Maximum difference between our wall clock and the database's for which the latter is assumed to be steady.
const TRUSTED_SKEW_MICROS: i64 = 250_000;
/// Tolerated difference between two readings beyond the time between them.
const JITTER_MICROS: i64 = 50_000;
/// Steady time of a trusted clock: longer than every lease.
const TRUSTED_MICROS: i64 = i64::MAX / 4;

/// Tracks the database's clock, and detects jumps.
#[derive(Debug, Default)]
pub(crate) struct DbClock(Mutex<ClockState>);

#[derive(Clone, Copy, Debug, Default)]
struct ClockState {
    last: Option<Reading>,
    /// Start of the time for which the clock was observed to be steady.
    measured: Option<Time>,
    /// True as long as no reading contradicted it.
    trusted: bool,
    /// Sum of the jumps forward since the clock was last steady for long, or its first difference to ours.
    ahead: i64,
}

impl DbClock {
    /// Records a reading. Returns the minimum jump since the last one in microseconds, if the clock jumped.
    pub(crate) fn note(&self, reading: Reading) -> Option<i64> {
        self.note_with_wall(reading, wall())
    }

    fn note_with_wall(&self, reading: Reading, wall: i64) -> Option<i64> {
        let mut known = self.lock();
        let Some(last) = known.last else {
            let apart = wall.saturating_sub(reading.db);
            let trip = micros(reading.replied.since(reading.sent));
            // Our own wall clock decides no lease. If it disagrees, one of the two clocks was set, maybe just now. The
            // database's clock may then not end another holder's lease until it was observed to be steady.
            let trusted = (-TRUSTED_SKEW_MICROS..=trip + TRUSTED_SKEW_MICROS).contains(&apart);
            let (last, measured) = (Some(reading), Some(reading.replied));
            let ahead = if trusted { 0 } else { apart.saturating_neg().max(0) };
            *known = ClockState { last, measured, trusted, ahead };
            return None;
        };
        let jump = last.jump(&reading);
        let between = micros(reading.sent.since(last.replied));
        let allowed = JITTER_MICROS + (between / 6).min(1_000_000).max(between / 500);
        if reading.sent >= last.sent {
            known.last = Some(reading);
        }
        if jump.abs() <= allowed {
            return None;
        }
        known.measured = Some(reading.replied);
        known.trusted = false;
        // A jump back only makes earlier leases end later.
        known.ahead = known.ahead.saturating_add(jump).max(0);
        Some(jump)
    }

    /// Interval in which a claim sent at `now` may be executed. Without a reading, the interval is unbounded.
    pub(crate) fn window(&self, now: Time, limit: Duration) -> Window {
        let ClockState { last, measured, trusted, ahead } = *self.lock();
        let Some(last) = last else {
            let (until, steady, measured) = (TRUSTED_MICROS, 0, 0);
            return Window { from: 0, until, expected: 0, steady, measured, ahead };
        };
        let age = micros(now.since(last.replied));
        let slack = 20_000 + age / 500;
        let expected = last.db + micros(now.since(last.sent)) + slack;
        let measured = measured.map_or(0, |since| micros(now.since(since)));
        Window {
            from: last.db + age - slack,
            until: expected + micros(limit),
            expected,
            steady: if trusted { TRUSTED_MICROS } else { measured },
            measured,
            ahead,
        }
    }

    /// True once there was a reading.
    pub(crate) fn is_known(&self) -> bool {
        self.lock().last.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, ClockState> {
        self.0.lock()
    }
}

impl Reading {
    /// Reads the column `now` of the first row; zero if there is no row.
    pub(crate) fn of(rows: &[Row], sent: Time, replied: Time) -> Result<Self> {
        let db = rows.first().map_or(Ok(0), |row| row.try_get("now")).map_err(|error| {
            Error::new(ErrorKind::Misconfigured, "the server sent an unexpected answer")
                .because(error)
        })?;
        Ok(Self { sent, replied, db })
    }

    /// Minimum jump of the clock between two readings, in microseconds: the part that neither round trip explains.
    fn jump(&self, later: &Self) -> i64 {
        let passed = later.db.saturating_sub(self.db);
        let longest = span(self.sent, later.replied);
        let shortest = span(self.replied, later.sent);
        if passed > longest { passed - longest } else { (passed - shortest).min(0) }
    }

    /// The [`jump`](Self::jump), if it exceeds half the margin of a lease of `ttl`.
    pub(crate) fn jump_beyond(&self, later: &Self, ttl: Duration) -> Option<i64> {
        let jump = self.jump(later);
        (jump.unsigned_abs() > micros(margin(ttl) / 2).unsigned_abs()).then_some(jump)
    }
}

/// Signed time from one instant to another, in microseconds.
fn span(from: Time, to: Time) -> i64 {
    micros(to.since(from)) - micros(from.since(to))
}

pub(crate) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(TRUSTED_MICROS).min(TRUSTED_MICROS)
}

fn wall() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DB: i64 = 1_800_000_000_000_000;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn reading(sent: u64, replied: u64, db_ms: i64) -> Reading {
        Reading { sent: at(sent), replied: at(replied), db: DB + db_ms * 1_000 }
    }

    #[test]
    fn a_slow_round_trip_is_no_jump_and_a_step_is() {
        let clock = DbClock::default();
        assert_eq!(clock.note_with_wall(reading(0, 2, 1), DB), None);
        assert_eq!(clock.note_with_wall(reading(100, 900, 850), DB), None);
        assert_eq!(clock.note_with_wall(reading(1_000, 1_900, 1_010), DB), None);
        assert_eq!(clock.note_with_wall(reading(950, 960, 955), DB), None, "readings out of order");
        let hour = 3_600_000;
        let forward = clock.note_with_wall(reading(2_000, 2_002, 2_001 + hour), DB).unwrap();
        assert!((3_599_000_000..=3_600_000_000).contains(&forward), "{forward}");
        let back = clock.note_with_wall(reading(3_000, 3_002, 3_001), DB).unwrap();
        assert!((-3_600_000_000..=-3_599_000_000).contains(&back), "{back}");
    }

    #[test]
    fn a_claim_lands_in_its_time_only() {
        let clock = DbClock::default();
        clock.note_with_wall(reading(0, 2, 1), DB);
        let window = clock.window(at(10_000), Duration::from_secs(1));
        for (ms, inside) in
            [(9_950, false), (10_000, true), (10_900, true), (11_100, false), (3_600_000, false)]
        {
            assert_eq!(window.contains(DB + ms * 1_000), inside, "{ms}");
        }
    }

    #[test]
    fn after_a_step_the_clock_is_trusted_only_as_long_as_it_was_seen_to_be_steady() {
        let clock = DbClock::default();
        clock.note_with_wall(reading(0, 2, 1), DB);
        assert_eq!(clock.window(at(10), Duration::ZERO).steady, TRUSTED_MICROS);
        clock.note_with_wall(reading(100, 102, 5_000), DB);
        assert_eq!(clock.window(at(1_102), Duration::ZERO).steady, 1_000_000);
        let doubtful = DbClock::default();
        doubtful.note_with_wall(reading(0, 2, 1), DB + 5_000_000);
        assert_eq!(doubtful.window(at(1_002), Duration::ZERO).steady, 1_000_000);
    }

    #[test]
    fn a_clock_that_was_set_forward_is_ahead_by_that_much() {
        let ahead = |clock: &DbClock| clock.window(at(9_000), Duration::ZERO).ahead / 1_000_000;
        let clock = DbClock::default();
        clock.note_with_wall(reading(0, 2, 1), DB);
        assert_eq!(ahead(&clock), 0);
        clock.note_with_wall(reading(1_000, 1_002, 61_001), DB);
        assert_eq!(ahead(&clock), 59, "at least, as the round trips may explain a part of it");
        clock.note_with_wall(reading(2_000, 2_002, 2_001), DB);
        assert_eq!(ahead(&clock), 0, "set back");
        clock.note_with_wall(reading(3_000, 3_002, -99_000), DB);
        assert_eq!(ahead(&clock), 0);
        let first = DbClock::default();
        first.note_with_wall(reading(0, 2, 90_000), DB);
        assert_eq!(ahead(&first), 90, "ahead of ours");
        let first = DbClock::default();
        first.note_with_wall(reading(0, 2, -90_000), DB);
        assert_eq!(ahead(&first), 0);
    }

    #[test]
    fn a_hold_bears_half_its_margin() {
        let ttl = Duration::from_secs(12);
        let first = reading(0, 2, 1);
        assert_eq!(first.jump_beyond(&reading(4_000, 4_002, 4_900), ttl), None);
        assert!(first.jump_beyond(&reading(4_000, 4_002, 5_100), ttl).is_some());
        assert!(first.jump_beyond(&reading(4_000, 4_002, 2_900), ttl).is_some());
    }
}
