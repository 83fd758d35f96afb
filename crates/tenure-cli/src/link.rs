//! What the command and its guardian say to each other: short lines over a socket.

use std::fmt;
use std::str::FromStr;

/// What the guardian is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Send this signal to the child's group.
    Signal(i32),
    /// If this moment comes (nanoseconds of the clock that counts suspended time), kill everything: the hold is over and
    /// nobody was there to say so.
    Until(u64),
    /// Kill the child and all its descendants, and say when they are gone.
    Kill,
    /// End, and leave alone what the child left behind.
    Bye,
}

/// What the guardian tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The child runs, in the group of this id.
    Started(i32),
    /// The child could not be started; the number of the error.
    Cannot(i32),
    /// The child was stopped by this signal.
    Stopped(i32),
    /// The child goes on.
    Continued,
    /// The child ended by itself.
    Exited(u8),
    /// The child died of this signal.
    Killed(i32),
    /// Of the child and its descendants nobody is left.
    Gone,
}

/// The longest line, in bytes.
pub(crate) const MAX_LINE: usize = 64;

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(number) => write!(f, "signal {number}"),
            Self::Until(nanos) => write!(f, "until {nanos}"),
            Self::Kill => f.write_str("kill"),
            Self::Bye => f.write_str("bye"),
        }
    }
}

impl FromStr for Order {
    type Err = Unintelligible;

    fn from_str(line: &str) -> Result<Self, Unintelligible> {
        let (word, number) = line.split_once(' ').unwrap_or((line, ""));
        Ok(match word {
            "signal" => Self::Signal(number.parse()?),
            "until" => Self::Until(number.parse()?),
            "kill" => Self::Kill,
            "bye" => Self::Bye,
            _ => return Err(Unintelligible),
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started(group) => write!(f, "started {group}"),
            Self::Cannot(number) => write!(f, "cannot {number}"),
            Self::Stopped(signal) => write!(f, "stopped {signal}"),
            Self::Continued => f.write_str("continued"),
            Self::Exited(code) => write!(f, "exited {code}"),
            Self::Killed(signal) => write!(f, "killed {signal}"),
            Self::Gone => f.write_str("gone"),
        }
    }
}

impl FromStr for Report {
    type Err = Unintelligible;

    fn from_str(line: &str) -> Result<Self, Unintelligible> {
        let (word, number) = line.split_once(' ').unwrap_or((line, ""));
        Ok(match word {
            "started" => Self::Started(number.parse()?),
            "cannot" => Self::Cannot(number.parse()?),
            "stopped" => Self::Stopped(number.parse()?),
            "continued" => Self::Continued,
            "exited" => Self::Exited(number.parse()?),
            "killed" => Self::Killed(number.parse()?),
            "gone" => Self::Gone,
            _ => return Err(Unintelligible),
        })
    }
}

/// A line that is none of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unintelligible;

impl fmt::Display for Unintelligible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an unintelligible line between the command and its guardian")
    }
}

impl std::error::Error for Unintelligible {}

impl From<std::num::ParseIntError> for Unintelligible {
    fn from(_: std::num::ParseIntError) -> Self {
        Self
    }
}

/// The moment by the clock that counts suspended time, the same in every process of a host.
pub(crate) fn now() -> u64 {
    #[cfg(target_os = "linux")]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(CLOCK);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u64::try_from(time.tv_nsec).unwrap_or_default();
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        for order in [Order::Signal(15), Order::Until(u64::MAX), Order::Kill, Order::Bye] {
            let line = order.to_string();
            assert_eq!(line.parse(), Ok(order));
            assert!(line.len() < MAX_LINE);
        }
        for report in [
            Report::Started(i32::MAX),
            Report::Cannot(2),
            Report::Stopped(20),
            Report::Continued,
            Report::Exited(255),
            Report::Killed(9),
            Report::Gone,
        ] {
            assert_eq!(report.to_string().parse(), Ok(report));
        }
    }

    #[test]
    fn what_is_none_of_ours_is_refused() {
        for line in
            ["", "signal", "signal x", "bye bye bye ", "exited 256", "started", "killed nine"]
        {
            assert_eq!(line.parse::<Report>(), Err(Unintelligible), "{line}");
            if !line.starts_with("bye") {
                assert_eq!(line.parse::<Order>(), Err(Unintelligible), "{line}");
            }
        }
    }
}
