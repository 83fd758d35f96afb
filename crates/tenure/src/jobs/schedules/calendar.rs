//! The slots of a cron expression in a time zone.
//!
//! A time that the start of daylight saving time skips fires at the first moment after it, and a time that occurs twice at
//! its end fires at the first of the two. Expressions with a wildcard in the minute or the hour count intervals: they skip
//! what does not exist, and fire in both occurrences.

use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};

use crate::Result;
use crate::jobs::db::invalid;

/// Maximum length of an expression, in bytes.
const MAX_EXPRESSION: usize = 200;

/// A cron expression in a time zone.
#[derive(Clone, Debug)]
pub(super) struct Calendar {
    cron: Cron,
    zone: TimeZone,
}

impl Calendar {
    /// Parses an expression of five fields, or a name such as `@daily`, and the IANA name of a time zone.
    pub(super) fn parse(expression: &str, zone: &str) -> Result<Self> {
        if expression.len() > MAX_EXPRESSION {
            return Err(invalid("invalid cron expression: it is longer than 200 bytes"));
        }
        let parser =
            CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
        let cron = parser.parse(expression).map_err(|error| {
            invalid(&format!("invalid cron expression {expression:?}: {error}"))
        })?;
        let zone = TimeZone::get(zone).map_err(|error| {
            invalid(&format!(
                "invalid time zone {zone:?}: give an IANA name, such as Europe/Berlin"
            ))
            .because(error)
        })?;
        Ok(Self { cron, zone })
    }

    /// First slot after a time; `None` if no slot is left.
    pub(super) fn next_after(&self, micros: i64) -> Option<i64> {
        let next = self.cron.find_next_occurrence(&self.zoned(micros)?, false).ok()?;
        Some(next.timestamp().as_microsecond())
    }

    /// Slots that are not after a time, the latest first.
    pub(super) fn passed(&self, now: i64) -> impl Iterator<Item = i64> {
        let mut before = self.zoned(now);
        let mut inclusive = true;
        std::iter::from_fn(move || {
            let found = self.cron.find_previous_occurrence(before.as_ref()?, inclusive).ok();
            inclusive = false;
            before = found;
            Some(before.as_ref()?.timestamp().as_microsecond())
        })
    }

    fn zoned(&self, micros: i64) -> Option<Zoned> {
        let at = Timestamp::from_microsecond(micros).ok()?;
        Some(at.to_zoned(self.zone.clone()))
    }
}

/// A time in microseconds as RFC 3339, in UTC.
pub(super) fn rfc3339(micros: i64) -> String {
    Timestamp::from_microsecond(micros).map_or_else(|_| micros.to_string(), |at| at.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slots from one time to another, forwards, as RFC 3339.
    fn slots(expression: &str, zone: &str, from: &str, to: &str) -> Vec<String> {
        let calendar = Calendar::parse(expression, zone).unwrap();
        let micros = |text: &str| text.parse::<Timestamp>().unwrap().as_microsecond();
        let (from, to) = (micros(from), micros(to));
        let mut forwards: Vec<i64> = Vec::new();
        let mut at = from;
        while let Some(next) = calendar.next_after(at).filter(|next| *next <= to) {
            assert!(next > at, "{expression} stays at {at}");
            forwards.push(next);
            at = next;
        }
        let mut backwards: Vec<i64> = calendar.passed(to).take_while(|slot| *slot > from).collect();
        backwards.reverse();
        assert_eq!(forwards, backwards, "{expression}: both directions have the same slots");
        forwards.into_iter().map(rfc3339).collect()
    }

    #[test]
    fn a_skipped_time_fires_right_after_the_gap_and_intervals_skip_it() {
        // 2026-03-29 in Berlin: 02:00 is 03:00.
        let (zone, from, to) = ("Europe/Berlin", "2026-03-28T12:00:00Z", "2026-03-30T12:00:00Z");
        assert_eq!(
            slots("30 2 * * *", zone, from, to),
            ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]
        );
        let hourly = slots("0 * * * *", zone, "2026-03-28T23:30:00Z", "2026-03-29T03:30:00Z");
        assert_eq!(hourly.len(), 4, "{hourly:?}");
    }

    #[test]
    fn a_repeated_time_fires_once_and_intervals_fire_in_both() {
        // 2026-10-25 in Berlin: 03:00 is 02:00 again.
        let (zone, from, to) = ("Europe/Berlin", "2026-10-24T12:00:00Z", "2026-10-26T12:00:00Z");
        assert_eq!(
            slots("30 2 * * *", zone, from, to),
            ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]
        );
        let hourly = slots("0 * * * *", zone, "2026-10-24T22:30:00Z", "2026-10-25T03:30:00Z");
        assert_eq!(hourly.len(), 5, "{hourly:?}");
    }

    #[test]
    fn names_stand_for_expressions_and_others_are_refused() {
        let (from, to) = ("2026-01-01T00:30:00Z", "2026-01-03T00:30:00Z");
        assert_eq!(
            slots("@daily", "UTC", from, to),
            ["2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z"]
        );
        assert_eq!(slots("@hourly", "UTC", from, to).len(), 48);
        for (expression, zone, says) in [
            ("* * * *", "UTC", "cron expression"),
            ("* * * * * *", "UTC", "cron expression"),
            ("61 * * * *", "UTC", "cron expression"),
            ("@sometimes", "UTC", "cron expression"),
            ("* * * * *", "Europe/Nowhere", "time zone"),
        ] {
            let error = Calendar::parse(expression, zone).unwrap_err();
            assert!(error.to_string().contains(says), "{expression} {zone}: {error}");
        }
        assert_eq!(
            Calendar::parse("0 0 30 2 *", "UTC").unwrap().next_after(0),
            None,
            "no such day"
        );
    }
}
