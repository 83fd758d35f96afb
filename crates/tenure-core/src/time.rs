//! Time as an argument: the machines never read a clock.

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// Instant on a monotonic clock, in nanoseconds since an origin that the caller chose.
///
/// Arithmetic saturates: an instant beyond the range is [`Time::MAX`], which means *never*.
///
/// ```
/// use std::time::Duration;
/// use tenure_core::Time;
///
/// let sent = Time::from_nanos(5_000);
/// assert_eq!(sent + Duration::from_nanos(10), Time::from_nanos(5_010));
/// assert_eq!(sent - Duration::from_secs(1), Time::ZERO);
/// assert_eq!(sent + Duration::MAX, Time::MAX);
/// assert_eq!(Time::ZERO.since(sent), Duration::ZERO);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

impl Time {
    /// Origin of the clock.
    pub const ZERO: Self = Self(0);
    /// Instant that no clock reaches: *never*.
    pub const MAX: Self = Self(u64::MAX);

    /// Instant `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time from `earlier` to this instant; zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }
}

impl Sub<Duration> for Time {
    type Output = Self;

    /// Subtracts a duration. *Never* stays never: if a hold has no end, the end of the hold less a margin is never as
    /// well.
    fn sub(self, span: Duration) -> Self {
        if self == Self::MAX { self } else { Self(self.0.saturating_sub(nanos(span))) }
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::MAX {
            f.write_str("never")
        } else {
            write!(f, "{:?}", Duration::from_nanos(self.0))
        }
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_stays_never() {
        assert_eq!(Time::MAX - Duration::from_secs(5), Time::MAX);
        assert_eq!(Time::MAX + Duration::from_secs(5), Time::MAX);
        assert_eq!(format!("{:?}", Time::MAX), "never");
    }

    #[test]
    fn spans_saturate_at_zero() {
        let early = Time::from_nanos(3);
        let late = Time::from_nanos(10);
        assert_eq!(late.since(early), Duration::from_nanos(7));
        assert_eq!(early.since(late), Duration::ZERO);
    }
}
