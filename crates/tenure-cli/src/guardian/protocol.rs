//! Protocol between the command and its guardian: short lines over a socket.

use std::fmt;
use std::str::FromStr;

/// A command to the guardian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuardianCommand {
    /// Send this signal to the child's group.
    Signal(i32),
    /// Kill everything at this time, in nanoseconds of the clock that counts suspended time: the hold has ended, and
    /// the command has not sent [`Kill`](GuardianCommand::Kill).
    KillAt(u64),
    /// Kill the child and all its descendants, and report [`AllExited`](GuardianReport::AllExited) when they have
    /// ended.
    Kill,
    /// Exit, and leave alone the processes that the child left behind.
    Quit,
}

/// A report of the guardian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuardianReport {
    /// The child was started, in the process group of this id.
    Started(i32),
    /// The child could not be started, with this `errno`.
    StartFailed(i32),
    /// The child was suspended by this signal.
    Stopped(i32),
    /// The child was continued.
    Continued,
    /// The child exited with this code.
    Exited(u8),
    /// The child died of this signal.
    Killed(i32),
    /// The child and all its descendants have ended.
    AllExited,
}

/// Maximum length of a line, in bytes.
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

/// A line that is not part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidMessage;

impl fmt::Display for InvalidMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("invalid line between the command and its guardian")
    }
}

impl std::error::Error for InvalidMessage {}

impl From<std::num::ParseIntError> for InvalidMessage {
    fn from(_: std::num::ParseIntError) -> Self {
        Self
    }
}

/// Time on the clock that counts suspended time, in nanoseconds. All processes of a host read the same clock.
pub(crate) fn boottime_nanos() -> u64 {
    tenure::Clock::system().now().as_nanos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guardian_commands_and_reports_parse_back() {
        for command in [
            GuardianCommand::Signal(15),
            GuardianCommand::KillAt(u64::MAX),
            GuardianCommand::Kill,
            GuardianCommand::Quit,
        ] {
            let line = command.to_string();
            assert_eq!(line.parse(), Ok(command));
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
