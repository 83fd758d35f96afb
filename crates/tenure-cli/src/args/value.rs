//! Parsers of option values.

use std::time::Duration;

use nix::sys::signal::Signal;

/// Parses a duration above zero: `15s`, `500ms`, `1h30m`, or seconds as `timeout` takes them: `15`, `0.5`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match duration_or_zero(text)? {
        Duration::ZERO => Err("the duration must be greater than 0".to_owned()),
        duration => Ok(duration),
    }
}

/// Shortest interval between two polls of a store.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Parses the interval between polls, as [`duration`] does. An interval close to zero would keep the store busy.
pub(crate) fn poll_interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        interval if interval < MIN_POLL_INTERVAL => {
            let min = humantime::format_duration(MIN_POLL_INTERVAL);
            Err(format!("the interval must be at least {min}"))
        }
        interval => Ok(interval),
    }
}

/// Parses a text that is not blank.
pub(crate) fn non_blank(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("the text is empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// Parses a signal: its name, with or without SIG, or its number.
pub(crate) fn signal(text: &str) -> Result<Signal, String> {
    let upper = text.to_ascii_uppercase();
    let name = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    let number = text.parse().ok().and_then(|number: i32| Signal::try_from(number).ok());
    let found = name.parse().ok().or(number);
    found.ok_or_else(|| "unknown signal: use a name such as TERM, or a number".to_owned())
}

/// Parses a duration, as [`duration`] does; zero is valid.
pub(crate) fn duration_or_zero(text: &str) -> Result<Duration, String> {
    use humantime::DurationError;

    const FORMS: &str = "use 15s, 500ms, 1h30m, or a number of seconds";
    const TOO_LARGE: &str = "the number is too large";
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let parsed = if plain {
        let seconds = text.parse().map_err(|_| format!("not a number: {FORMS}"))?;
        Duration::try_from_secs_f64(seconds).map_err(|_| TOO_LARGE.to_owned())
    } else {
        humantime::parse_duration(text).map_err(|error| match error {
            DurationError::UnknownUnit { unit, .. } if !unit.is_empty() => {
                format!("unknown unit `{unit}`")
            }
            DurationError::NumberOverflow => TOO_LARGE.to_owned(),
            _ => "not a duration".to_owned(),
        })
    };
    parsed.map_err(|error| format!("{error}: {FORMS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_what_people_write() {
        for (text, ms) in [
            ("15s", 15_000),
            ("500ms", 500),
            ("2m", 120_000),
            ("1h30m", 5_400_000),
            ("15", 15_000),
            ("0.25", 250),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in
            ["", "soon", "15 parsecs", "-1s", ".", "1.2.3", "0", "0s", "99999999999999999999"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
        assert_eq!(duration_or_zero("0"), Ok(Duration::ZERO));
    }

    #[test]
    fn the_shortest_poll_interval_is_valid() {
        assert_eq!(poll_interval("10ms"), Ok(MIN_POLL_INTERVAL));
        for text in ["1ns", "9ms", "0"] {
            assert!(poll_interval(text).is_err(), "{text}");
        }
    }

    #[test]
    fn signals_are_named_as_people_do() {
        for text in ["TERM", "sigterm", "15"] {
            assert_eq!(signal(text), Ok(Signal::SIGTERM), "{text}");
        }
        for text in ["", "SIG", "stop now", "4711", "-1"] {
            assert!(signal(text).is_err(), "{text}");
        }
    }
}
