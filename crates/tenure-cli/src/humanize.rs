//! Text for people: identities, tokens, durations and ordinals.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tenure::FencingToken;
use tenure::store::Identity;

/// A holder or waiter, in short form: `web-2 (pid 311)`.
pub(crate) fn identity(by: Option<&Identity>) -> String {
    by.map_or_else(|| "an unknown client".to_owned(), Identity::to_string)
}

/// A fencing token as text, if there is one.
pub(crate) fn token(token: FencingToken) -> Option<String> {
    (!token.is_none()).then(|| token.to_string())
}

/// A duration in whole seconds, or in milliseconds below one second: `42s`, `1h 5m 3s`, `300ms`.
pub(crate) fn span(span: Duration) -> String {
    let rounded = match span.as_secs() {
        0 => Duration::from_millis(u64::from(span.subsec_millis())),
        seconds => Duration::from_secs(seconds),
    };
    humantime::format_duration(rounded).to_string()
}

/// A duration that the store may not know; `-` if so.
pub(crate) fn optional_span(span: Option<Duration>) -> String {
    span.map_or_else(|| "-".to_owned(), self::span)
}

/// A time in UTC: `2026-11-17T08:00:00.000Z`; `None` before 1970 and after the year 9999.
pub(crate) fn rfc3339(at: SystemTime) -> Option<String> {
    const YEAR_10000: Duration = Duration::from_secs(253_402_300_800);
    let since = at.duration_since(UNIX_EPOCH).ok()?;
    (since < YEAR_10000).then(|| humantime::format_rfc3339_millis(at).to_string())
}

/// `1st`, `2nd`, `3rd`, `11th`.
pub(crate) fn ordinal(number: usize) -> String {
    let suffix = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{suffix}")
}

/// Untrusted text without control characters: it must not move the cursor.
pub(crate) fn without_control_chars(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_names_and_not_nonces() {
        let mut by = Identity {
            id: "web-2:311:00af".into(),
            host: "web-2".into(),
            pid: 311,
            note: String::new(),
        };
        assert_eq!(identity(Some(&by)), "web-2 (pid 311)");
        by.id = "deployer\x1b[2J".into();
        by.note = "v42".into();
        assert_eq!(identity(Some(&by)), "deployer[2J (pid 311): v42");
        assert_eq!(identity(None), "an unknown client");
    }

    #[test]
    fn numbers_are_said_as_people_do() {
        let ordinals: Vec<_> = [1, 2, 3, 4, 11, 12, 13, 21, 102, 111].map(ordinal).into();
        assert_eq!(
            ordinals,
            ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]
        );
        assert_eq!(span(Duration::from_millis(42_900)), "42s");
        assert_eq!(span(Duration::from_millis(300)), "300ms");
    }
}
