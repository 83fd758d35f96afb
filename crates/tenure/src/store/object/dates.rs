//! Timestamps in the formats of object stores.

use std::time::Duration;

/// Parses the date of an HTTP header, `Sun, 06 Nov 1994 08:49:37 GMT`, into the time since 1970. A fraction of a second
/// is accepted.
pub(super) fn http(text: &str) -> Option<Duration> {
    let (_, rest) = text.trim().split_once(", ")?;
    let mut parts = rest.split(' ');
    let day: u64 = parts.next()?.parse().ok().filter(|day| (1..=31).contains(day))?;
    let name = parts.next()?;
    let month = MONTHS.iter().position(|month| *month == name)?;
    let year: u64 = parts.next()?.parse().ok().filter(|year| (1970..=9999).contains(year))?;
    let time = parts.next()?;
    if parts.next()? != "GMT" || parts.next().is_some() {
        return None;
    }
    let mut clock = time.split(':');
    let hours: u64 = clock.next()?.parse().ok().filter(|hours| *hours < 24)?;
    let minutes: u64 = clock.next()?.parse().ok().filter(|minutes| *minutes < 60)?;
    let seconds: f64 =
        clock.next()?.parse().ok().filter(|seconds| (0.0..61.0).contains(seconds))?;
    if clock.next().is_some() {
        return None;
    }
    let days = days(year, month as u64 + 1, day);
    let whole = Duration::from_secs(((days * 24 + hours) * 60 + minutes) * 60);
    Some(whole + Duration::try_from_secs_f64(seconds).ok()?)
}

/// Parses the time of a JSON field, `1994-11-06T08:49:37.123Z`, into the time since 1970.
pub(super) fn rfc3339(text: &str) -> Option<Duration> {
    // Some servers write this instead of `Z`.
    let text = text.strip_suffix("+00:00").unwrap_or(text);
    let time = humantime::parse_rfc3339_weak(text).ok()?;
    time.duration_since(std::time::UNIX_EPOCH).ok()
}

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Number of days since 1970-01-01.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let leaps = |before: u64| {
        let last = before - 1;
        last / 4 - last / 100 + last / 400
    };
    let years = (year - 1970) * 365 + leaps(year) - leaps(1970);
    let lengths = [31, if leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let months: u64 = lengths.iter().zip(1..month).map(|(length, _)| length).sum();
    years + months + day - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_headers_are_read() {
        for (text, seconds) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777.0),
            ("Thu, 29 Feb 2024 23:59:59 GMT", 1_709_251_199.0),
            ("Fri, 01 Mar 2024 00:00:00 GMT", 1_709_251_200.0),
            ("Wed, 31 Dec 2098 12:00:00.250 GMT", 4_070_865_600.25),
        ] {
            let read = http(text).unwrap_or_default();
            assert!((read.as_secs_f64() - seconds).abs() < 1e-6, "{text}: {read:?}");
        }
        for text in [
            "",
            "yesterday",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sun, 06 Foo 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 25:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:-1 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(http(text), None, "{text}");
        }
    }

    #[test]
    fn times_of_fields_are_read() {
        let read = rfc3339("1994-11-06T08:49:37.123Z").unwrap();
        assert_eq!(read, Duration::from_millis(784_111_777_123));
        assert_eq!(rfc3339("1994-11-06T08:49:37.123+00:00"), Some(read));
        assert_eq!(rfc3339("soon"), None);
    }
}
