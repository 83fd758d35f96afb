//! Timestamps in the formats of object stores.

use std::time::{Duration, UNIX_EPOCH};

/// Parses the date of an HTTP header, `Sun, 06 Nov 1994 08:49:37 GMT`, into the time since 1970. A fraction of a second
/// is accepted.
pub(super) fn http(text: &str) -> Option<Duration> {
    let whole = |text: &str| httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok();
    let Some((start, rest)) = text.trim().split_once('.') else { return whole(text.trim()) };
    let (digits, zone) = rest.split_once(' ')?;
    if !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let fraction = format!("0.{digits}").parse().ok()?;
    Some(whole(&format!("{start} {zone}"))? + Duration::try_from_secs_f64(fraction).ok()?)
}

/// Parses the time of a JSON field, `1994-11-06T08:49:37.123Z`, into the time since 1970.
pub(super) fn rfc3339(text: &str) -> Option<Duration> {
    // Some servers write this instead of `Z`.
    let text = text.strip_suffix("+00:00").unwrap_or(text);
    let time = humantime::parse_rfc3339_weak(text).ok()?;
    time.duration_since(UNIX_EPOCH).ok()
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
            "Sun, 06 Nov 1994 08:49:37.1e9 GMT",
            "Sun, 06 Nov 1994 08:49:37.-5 GMT",
            "Sun, 06 Nov 1994 08:49:37.5",
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
