//! Schedules of jobs: which of their slots are due.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Slots of a schedule that passed while no worker ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CatchUp {
    /// A slot that is more than [`MISSED_AFTER`] late is skipped.
    None,
    /// The latest slot fires, however late, and the others are skipped.
    #[default]
    Last,
    /// The latest [`MAX_CAUGHT_UP`] slots fire, however late, and earlier ones are skipped.
    All,
}

/// Lateness of a slot from which it counts as missed.
pub const MISSED_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of missed slots that fire at once.
pub const MAX_CAUGHT_UP: usize = 100;

impl CatchUp {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::None, Self::Last, Self::All];

    /// Slots that fire at `now`, in their order. `passed` has the slots of the schedule that are not after `now`, the
    /// latest first; it is read only as far as necessary. `from` is the first slot that has not fired. All times are in
    /// microseconds.
    ///
    /// ```
    /// use tenure_core::jobs::CatchUp;
    ///
    /// let hour = 3_600_000_000;
    /// let passed = [5, 4, 3, 2, 1].map(|slot| slot * hour);
    /// assert_eq!(CatchUp::Last.due(passed, 3 * hour, 5 * hour + 1), [5 * hour]);
    /// assert_eq!(CatchUp::All.due(passed, 3 * hour, 5 * hour + 1), [3 * hour, 4 * hour, 5 * hour]);
    /// assert_eq!(CatchUp::None.due(passed, 3 * hour, 6 * hour - 1), []);
    /// ```
    pub fn due(self, passed: impl IntoIterator<Item = i64>, from: i64, now: i64) -> Vec<i64> {
        let most = if self == Self::All { MAX_CAUGHT_UP } else { 1 };
        let missed_before = match self {
            Self::None => {
                now.saturating_sub(i64::try_from(MISSED_AFTER.as_micros()).unwrap_or(i64::MAX))
            }
            Self::Last | Self::All => i64::MIN,
        };
        let passed = passed.into_iter().take_while(|slot| *slot >= from && *slot >= missed_before);
        let mut due: Vec<i64> = passed.take(most).collect();
        due.reverse();
        due
    }

    const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Last => "last",
            Self::All => "all",
        }
    }
}

impl fmt::Display for CatchUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CatchUp {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| format!("unknown catch-up policy {text:?}; supported: none, last, all"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = 60_000_000;

    /// The slots of every minute, the latest first, without end.
    fn minutes(now: i64) -> impl Iterator<Item = i64> {
        (0..).map(move |nth| (now / MINUTE - nth) * MINUTE)
    }

    #[test]
    fn a_slot_in_time_fires_once_under_every_policy() {
        for policy in CatchUp::ALL {
            let now = 7 * MINUTE + 1;
            assert_eq!(policy.due(minutes(now), 7 * MINUTE, now), [7 * MINUTE]);
            assert_eq!(policy.due(minutes(now), 8 * MINUTE, now), [], "it has fired");
            assert_eq!(policy.due(minutes(7 * MINUTE), 7 * MINUTE, 7 * MINUTE), [7 * MINUTE]);
        }
    }

    #[test]
    fn missed_slots_are_caught_up_within_bounds() {
        let now = 1_000 * MINUTE;
        assert_eq!(CatchUp::Last.due(minutes(now), MINUTE, now), [now]);
        let all = CatchUp::All.due(minutes(now), MINUTE, now);
        assert_eq!((all.len(), all[0], all[99]), (MAX_CAUGHT_UP, 901 * MINUTE, now));
        let hourly = [0, -60, -120].map(|slot| slot * MINUTE);
        assert_eq!(CatchUp::None.due(hourly, i64::MIN, MINUTE), [0]);
        assert_eq!(CatchUp::None.due(hourly, i64::MIN, MINUTE + 1), []);
        assert_eq!(CatchUp::Last.due(hourly, i64::MIN, 59 * MINUTE), [0]);
    }

    #[test]
    fn policies_are_read_as_they_are_written() {
        for policy in CatchUp::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert!("some".parse::<CatchUp>().unwrap_err().contains("none, last, all"));
    }
}
