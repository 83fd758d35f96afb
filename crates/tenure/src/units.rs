//! Durations in messages.

use std::time::Duration;

/// A duration in the largest unit that divides it, for messages: `24h`, `90m`, `45s`.
pub(crate) fn in_whole_units(duration: Duration) -> String {
    match duration.as_secs() {
        _ if duration.subsec_nanos() > 0 => format!("{duration:.1?}"),
        0 => "0s".to_owned(),
        seconds if seconds % 3_600 == 0 => format!("{}h", seconds / 3_600),
        seconds if seconds % 60 == 0 => format!("{}m", seconds / 60),
        seconds => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_printed_in_the_largest_whole_unit() {
        for (duration, text) in [
            (Duration::ZERO, "0s"),
            (Duration::from_millis(1_500), "1.5s"),
            (Duration::from_secs(45), "45s"),
            (Duration::from_secs(5_400), "90m"),
            (Duration::from_secs(86_400), "24h"),
        ] {
            assert_eq!(in_whole_units(duration), text);
        }
    }
}
