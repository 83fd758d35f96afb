//! What the command and its guardian say to each other: short lines over a socket.

use std::fmt;
use std::str::FromStr;

/// What the guardian is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuardianCommand {
    /// Send this signal to the child's group.
    Signal(i32),
    /// If this moment comes (nanoseconds of the clock that counts suspended time), kill everything: the hold is over and
    /// nobody was there to say so.
    KillAt(u64),
    /// Kill the child and all its descendants, and say when they are gone.
    Kill,
    /// End, and leave alone what the child left behind.
    Quit,
}

/// What the guardian tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuardianReport {
    /// The child runs, in the group of this id.
    Started(i32),
    /// The child could not be started; the number of the error.
    StartFailed(i32),
    /// The child was stopped by this signal.
    Stopped(i32),
    /// The child goes on.
    Continued,
    /// The child ended by itself.
    Exited(u8),
    /// The child died of this signal.
    Killed(i32),
    /// Of the child and its descendants nobody is left.
    AllExited,
}

/// The longest line, in bytes.
pub(crate) const MAX_LINE: usize = 64;

impl fmt::Display for GuardianCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(number) => write!(f, "signal {number}"),
            Self::KillAt(nanos) => write!(f, "until {nanos}"),
            Self::Kill => f.write_str("kill"),
            Self::Quit => f.write_str("bye"),
        }
    }
}

impl FromStr for GuardianCommand {
    type Err = InvalidMessage;

    fn from_str(line: &str) -> Result<Self, InvalidMessage> {
        let (word, number) = line.split_once(' ').unwrap_or((line, ""));
        Ok(match word {
            "signal" => Self::Signal(number.parse()?),
            "until" => Self::KillAt(number.parse()?),
            "kill" => Self::Kill,
            "bye" => Self::Quit,
            _ => return Err(InvalidMessage),
        })
    }
}

impl fmt::Display for GuardianReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started(group) => write!(f, "started {group}"),
            Self::StartFailed(number) => write!(f, "cannot {number}"),
            Self::Stopped(signal) => write!(f, "stopped {signal}"),
            Self::Continued => f.write_str("continued"),
            Self::Exited(code) => write!(f, "exited {code}"),
            Self::Killed(signal) => write!(f, "killed {signal}"),
            Self::AllExited => f.write_str("gone"),
        }
    }
}

impl FromStr for GuardianReport {
    type Err = InvalidMessage;

    fn from_str(line: &str) -> Result<Self, InvalidMessage> {
        let (word, number) = line.split_once(' ').unwrap_or((line, ""));
        Ok(match word {
            "started" => Self::Started(number.parse()?),
            "cannot" => Self::StartFailed(number.parse()?),
            "stopped" => Self::Stopped(number.parse()?),
            "continued" => Self::Continued,
            "exited" => Self::Exited(number.parse()?),
            "killed" => Self::Killed(number.parse()?),
            "gone" => Self::AllExited,
            _ => return Err(InvalidMessage),
        })
    }
}

/// A line that is none of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidMessage;

impl fmt::Display for InvalidMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an unintelligible line between the command and its guardian")
    }
}

impl std::error::Error for InvalidMessage {}

impl From<std::num::ParseIntError> for InvalidMessage {
    fn from(_: std::num::ParseIntError) -> Self {
        Self
    }
}

/// The moment by the clock that counts suspended time, the same in every process of a host.
pub(crate) fn boottime_nanos() -> u64 {
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
    fn guardian_commands_and_reports_parse_back() {
        for order in [
            GuardianCommand::Signal(15),
            GuardianCommand::KillAt(u64::MAX),
            GuardianCommand::Kill,
            GuardianCommand::Quit,
        ] {
            let line = order.to_string();
            assert_eq!(line.parse(), Ok(order));
            assert!(line.len() < MAX_LINE);
        }
        for report in [
            GuardianReport::Started(i32::MAX),
            GuardianReport::StartFailed(2),
            GuardianReport::Stopped(20),
            GuardianReport::Continued,
            GuardianReport::Exited(255),
            GuardianReport::Killed(9),
            GuardianReport::AllExited,
        ] {
            assert_eq!(report.to_string().parse(), Ok(report));
        }
    }

    #[test]
    fn malformed_guardian_lines_are_rejected() {
        for line in
            ["", "signal", "signal x", "bye bye bye ", "exited 256", "started", "killed nine"]
        {
            assert_eq!(line.parse::<GuardianReport>(), Err(InvalidMessage), "{line}");
            if !line.starts_with("bye") {
                assert_eq!(line.parse::<GuardianCommand>(), Err(InvalidMessage), "{line}");
            }
        }
    }
}
