//! Work that runs once per period: the slots of time, the marks of slots that were run, and the decision to run a slot.
//!
//! Time is divided into slots of one period each, counted from the Unix epoch, so all hosts compute the same slots. The
//! first process to run a slot leaves a mark that is kept for two periods. In its own period the mark shows that the
//! slot was run. In the next period it shows that a clock which still reads the old period is wrong. The marks of a
//! name rotate over [`MARK_KEYS_PER_NAME`] keys, so a name that is run for years leaves no more keys than that.

use std::fmt;
use std::time::Duration;

use crate::{Key, KeyError};

/// Number of keys over which the marks of a name rotate: a key is used again after this many periods.
///
/// The earlier mark has ended by then. A store that ends holds by observation keeps a mark for at most six periods and
/// half a minute, which is less than 16 periods if a period is at least 4 s.
pub const MARK_KEYS_PER_NAME: u64 = 16;

/// Length of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Period(Duration);

impl Period {
    /// Shortest period.
    pub const MIN: Duration = Duration::from_millis(100);
    /// Longest period: ten years.
    pub const MAX: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

    /// Creates a period of whole milliseconds.
    ///
    /// # Errors
    ///
    /// If the length is out of range or not in whole milliseconds.
    pub fn new(length: Duration) -> Result<Self, PeriodError> {
        let whole = Duration::from_millis(u64::try_from(length.as_millis()).unwrap_or(u64::MAX));
        if length < Self::MIN || length > Self::MAX || whole != length {
            return Err(PeriodError(length));
        }
        Ok(Self(length))
    }

    /// Slot that contains `wall`, a time since the Unix epoch.
    pub fn slot_at(self, wall: Duration) -> Slot {
        let period = millis(self.0);
        Slot { begins: millis(wall) / period * period, period }
    }
}

/// Invalid period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeriodError(Duration);

impl fmt::Display for PeriodError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(length) = self;
        if length.is_zero() {
            return f.write_str("a period of 0 has no slots: give its length, such as 1h");
        }
        write!(f, "invalid period of {length:?}: give whole milliseconds from 100 ms to ten years")
    }
}

impl std::error::Error for PeriodError {}

/// One slot, in milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    begins: u64,
    period: u64,
}

impl Slot {
    /// Start of the slot, as the time since the Unix epoch.
    pub fn begins(self) -> Duration {
        Duration::from_millis(self.begins)
    }

    /// Remaining time of the slot at `wall`; zero after its end.
    pub fn remaining_at(self, wall: Duration) -> Duration {
        (self.begins() + Duration::from_millis(self.period)).saturating_sub(wall)
    }

    /// Time for which a mark made at `wall` is kept: two periods, or `longest` if the store keeps nothing for longer.
    /// `None` if that is less than the remaining time of the slot.
    pub fn mark_ttl(self, longest: Option<Duration>, wall: Duration) -> Option<Duration> {
        let keep = self.full_mark_ttl(longest);
        (keep >= self.remaining_at(wall)).then_some(keep)
    }

    fn full_mark_ttl(self, longest: Option<Duration>) -> Duration {
        let two_periods = Duration::from_millis(self.period.saturating_mul(2));
        longest.map_or(two_periods, |longest| longest.min(two_periods))
    }

    /// Latest wall time at which a grant of the mark's key may begin a run of this slot.
    ///
    /// An earlier run of the slot has left a mark, which is kept until after this time. A grant that comes later,
    /// because the process or the store was stopped, may have been made after that mark had ended: the slot would be run
    /// twice. Half of the time between the end of the slot and the earliest end of a mark is left for differences of
    /// clocks.
    pub fn latest_grant(self, longest: Option<Duration>) -> Duration {
        let period = Duration::from_millis(self.period);
        self.begins() + period + self.full_mark_ttl(longest).saturating_sub(period) / 2
    }

    /// Key of the slot's mark.
    ///
    /// # Errors
    ///
    /// If the name is so long that the key would be invalid.
    pub fn key(self, name: &Key) -> Result<Key, KeyError> {
        Key::new(&format!("{name}@once-{:02}", self.begins / self.period % MARK_KEYS_PER_NAME))
    }

    /// Common prefix of the keys of a name's marks.
    pub fn prefix(name: &Key) -> String {
        format!("{name}@once-")
    }

    /// Mark as text, for the note of a hold.
    pub fn mark(self) -> String {
        format!("once {}+{}ms", self.begins, self.period)
    }

    /// Parses a mark; `None` if the text is not a mark.
    pub fn parse(text: &str) -> Option<Self> {
        let (begins, period) = text.strip_prefix("once ")?.strip_suffix("ms")?.split_once('+')?;
        let slot = Self { begins: begins.parse().ok()?, period: period.parse().ok()? };
        (slot.period > 0).then_some(slot)
    }

    /// Status of this slot, given an existing mark.
    pub fn status(self, found: Self) -> SlotStatus {
        match found.begins.cmp(&self.begins) {
            std::cmp::Ordering::Less => SlotStatus::Runnable,
            std::cmp::Ordering::Equal => SlotStatus::AlreadyRun,
            std::cmp::Ordering::Greater => SlotStatus::Superseded,
        }
    }
}

/// Status of a slot, which decides if the slot may be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotStatus {
    /// No mark prevents it.
    Runnable,
    /// The slot was run, or is being run.
    AlreadyRun,
    /// A later slot was run: the clock of this host or of the other host is wrong.
    Superseded,
}

/// Key of the mark of a slot that has a name of its own.
///
/// # Errors
///
/// If the two names together are not a valid key.
pub fn named_key(name: &Key, slot: &str) -> Result<Key, KeyError> {
    Key::new(&format!("{name}@slot-{slot}"))
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn hourly(wall: Duration) -> Slot {
        Period::new(HOUR).unwrap().slot_at(wall)
    }

    #[test]
    fn all_times_of_a_period_are_one_slot() {
        let begin = HOUR * 491_234;
        let slot = hourly(begin);
        assert_eq!(slot, hourly(begin + HOUR.saturating_sub(Duration::from_millis(1))));
        assert_ne!(slot, hourly(begin + HOUR));
        assert_ne!(slot, hourly(begin.saturating_sub(Duration::from_millis(1))));
        assert_eq!(slot.begins(), begin);
        assert_eq!(slot.remaining_at(begin + HOUR / 4), HOUR / 4 * 3);
        assert_eq!(slot.remaining_at(begin + HOUR * 2), Duration::ZERO);
        assert_eq!(slot.mark_ttl(None, begin), Some(HOUR * 2));
    }

    #[test]
    fn a_mark_outlasts_its_slot_or_is_not_made() {
        let begin = HOUR * 5;
        let slot = hourly(begin);
        assert_eq!(slot.mark_ttl(Some(HOUR * 24), begin), Some(HOUR * 2));
        assert_eq!(slot.mark_ttl(Some(HOUR), begin), Some(HOUR), "just enough");
        assert_eq!(
            slot.mark_ttl(Some(HOUR / 2), begin),
            None,
            "it could be run again in its own slot"
        );
        assert_eq!(slot.mark_ttl(Some(HOUR / 2), begin + HOUR / 2), Some(HOUR / 2));
    }

    #[test]
    fn a_grant_comes_before_any_mark_of_its_slot_has_ended() {
        let begin = HOUR * 5;
        let slot = hourly(begin);
        for (longest, latest) in [
            (None, begin + HOUR * 3 / 2),
            (Some(HOUR * 24), begin + HOUR * 3 / 2),
            (Some(HOUR * 3 / 2), begin + HOUR * 5 / 4),
            (Some(HOUR), begin + HOUR),
            (Some(HOUR / 2), begin + HOUR),
        ] {
            assert_eq!(slot.latest_grant(longest), latest, "{longest:?}");
            for made in [begin, begin + HOUR / 2, begin + HOUR * 9 / 10] {
                if let Some(keep) = slot.mark_ttl(longest, made) {
                    assert!(made + keep >= latest, "{longest:?}: a mark made at {made:?}");
                }
            }
        }
    }

    #[test]
    fn a_period_has_a_length() {
        for bad in [Duration::ZERO, Duration::from_millis(99), Duration::MAX] {
            assert!(Period::new(bad).is_err(), "{bad:?}");
        }
        assert!(Period::new(Duration::from_micros(100_001)).is_err(), "whole milliseconds");
        let message = Period::new(Duration::ZERO).unwrap_err().to_string();
        assert!(message.contains("a period of 0"), "{message}");
    }

    #[test]
    fn a_mark_survives_its_text_and_other_notes_are_none() {
        let slot = hourly(HOUR * 77);
        assert_eq!(Slot::parse(&slot.mark()), Some(slot));
        for text in ["", "once", "once 5+0ms", "once 5ms", "deploy 42", "once x+5ms"] {
            assert_eq!(Slot::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_marks_of_a_name_take_turns_on_a_few_keys() {
        let name = Key::new("reports/nightly").unwrap();
        let keys: std::collections::BTreeSet<_> =
            (0..1_000).map(|hour| hourly(HOUR * hour).key(&name).unwrap()).collect();
        assert_eq!(keys.len() as u64, MARK_KEYS_PER_NAME);
        assert!(keys.iter().all(|key| key.as_str().starts_with(&Slot::prefix(&name))));
        assert!(
            Slot::parse("once 1+1ms").unwrap().key(&Key::new(&"x".repeat(199)).unwrap()).is_err()
        );
    }

    #[test]
    fn a_slot_is_run_once_and_never_after_a_later_one() {
        let slot = hourly(HOUR * 10);
        assert_eq!(slot.status(hourly(HOUR * 9)), SlotStatus::Runnable);
        assert_eq!(slot.status(slot), SlotStatus::AlreadyRun);
        assert_eq!(slot.status(hourly(HOUR * 11)), SlotStatus::Superseded, "the clock went back");
        // The period was changed between two roll-outs: what began later is later.
        let half = Period::new(HOUR / 2).unwrap().slot_at(HOUR * 10 + HOUR / 2);
        assert_eq!(slot.status(half), SlotStatus::Superseded);
        assert_eq!(half.status(slot), SlotStatus::Runnable);
    }
}
