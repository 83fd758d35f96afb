//! Exit codes of the command and their meaning.

use std::fmt;

/// Result of the command as an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command succeeded.
    Success,
    /// `acquire`: another process holds the lock. `break`, `renew`, `release`: no such hold.
    Held,
    /// `doctor`: a check failed.
    CheckFailed,
    /// `job`: the job does not exist, or its state does not allow the change.
    Refused,
    /// The arguments are invalid.
    Usage,
    /// Not acquired: held, or the wait timed out; for `status`, free.
    NotAcquired,
    /// The hold was lost while the child ran; the child was stopped.
    Lost,
    /// A failure of tenure itself: the store, the configuration.
    Failed,
    /// The child's program cannot be executed.
    CannotExecute,
    /// The child's program was not found.
    NotFound,
    /// The child's own exit code.
    Child(u8),
    /// The child died of this signal, or it stopped tenure while it waited.
    Signal(i32),
    /// The child died of Ctrl-C at the terminal.
    Interrupted,
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Held | Self::Refused | Self::CheckFailed => 1,
            Self::Usage => 2,
            Self::NotAcquired => 75,
            Self::Lost => 79,
            Self::Failed => 125,
            Self::CannotExecute => 126,
            Self::NotFound => 127,
            Self::Child(code) => code,
            Self::Interrupted => 130,
            Self::Signal(number) => u8::try_from(128 + number).unwrap_or(u8::MAX),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit code {}", self.code())
    }
}

/// Exit codes in the `--help` of `run`.
pub(crate) const RUN: &str = "\
Exit codes:
  the command's own  the command ended by itself
  2                  invalid arguments
  75                 not acquired: held by another process, with --try or when --wait ended
  79                 the hold was lost while the command ran; the command was stopped
  125                tenure failed: an error of the store or the configuration
  126 / 127          the command cannot be executed / was not found
  128+N              the command was killed by signal N, or signal N ended the wait";

/// Exit codes in the `--help` of `lead`.
pub(crate) const LEAD: &str = "\
Exit codes:
  0                  stopped by TERM or INT while no command ran
  the command's own  the command ended by itself, or by the TERM or INT that was forwarded to it
  2                  invalid arguments
  75                 the election ended: it cannot be won with these settings
  79                 the leadership was lost, with --no-auto-reacquire
  125                tenure failed: an error of the store or the configuration
  126 / 127          the command cannot be executed / was not found
  128+N              the command was killed by signal N";

/// Exit codes in the `--help` of `acquire`.
pub(crate) const ACQUIRE: &str = "\
Exit codes:
  0    acquired
  1    not acquired: another process holds the lock
  2    invalid arguments
  125  tenure failed: an error of the store or the configuration, or a store whose holds end with their process";

/// Exit codes in the `--help` of `renew` and `release`.
pub(crate) const BY_HANDLE: &str = "\
Exit codes:
  0    done
  1    the hold of this handle has ended, or the handle belongs to another name
  2    invalid arguments
  125  tenure failed: an error of the store or the configuration";

/// Exit codes in the `--help` of `status`.
pub(crate) const STATUS: &str = "\
Exit codes:
  0    NAME is held; without NAME: the list was printed
  2    invalid arguments
  75   NAME is free
  125  tenure failed: an error of the store or the configuration";

/// Exit codes in the `--help` of `top`.
pub(crate) const TOP: &str = "\
Exit codes:
  0    closed by its user
  2    invalid arguments
  125  tenure failed: an error of the store or the configuration, or no terminal";

/// Exit codes in the `--help` of `ls` and `history`.
pub(crate) const LS: &str = "\
Exit codes:
  0    the list was printed
  2    invalid arguments
  125  tenure failed: an error of the store or the configuration";

/// Exit codes in the `--help` of `watch`.
pub(crate) const WATCH: &str = "\
Exit codes:
  0    stopped by TERM or INT, or the output was closed
  2    invalid arguments
  125  tenure failed: an error of the store or the configuration";

/// Exit codes in the `--help` of `break`.
pub(crate) const BREAK: &str = "\
Exit codes:
  0    broken
  1    nothing was broken: NAME has no hold with this token
  2    invalid arguments
  125  tenure failed: an error of the store or the configuration";

/// Exit codes in the `--help` of `once`.
pub(crate) const ONCE: &str = "\
Exit codes:
  0                  skipped: another process has run the command in this slot, or is running it
  the command's own  the command was run here, and ended by itself
  2                  invalid arguments
  75                 a run that was started 16 periods ago is still running
  79                 the hold was lost while the command ran; the command was stopped
  125                tenure failed: an error of the store or the configuration, or a wrong clock
  126 / 127          the command cannot be executed / was not found
  128+N              the command was killed by signal N, or signal N ended the wait";

/// Exit codes in the `--help` of `bench`.
pub(crate) const BENCH: &str = "\
Exit codes:
  0    the measurements were printed
  2    invalid arguments
  125  tenure failed: an error of the store or the configuration";

/// Exit codes in the `--help` of `doctor`.
pub(crate) const DOCTOR: &str = "\
Exit codes:
  0    no check failed; there may be warnings
  1    a check failed
  2    invalid arguments
  125  tenure failed: the store cannot be opened or reached";

/// Exit codes in the `--help` of `gc`.
pub(crate) const GC: &str = "\
Exit codes:
  0    done: leftovers were removed, or there were none
  2    invalid arguments
  125  tenure failed: an error of the store, or missing permissions";

/// Exit codes in the `--help` of `work`.
pub(crate) const WORK: &str = "\
Exit codes:
  0          stopped by INT or TERM, or with --until-empty no job is left
  2          invalid arguments
  125        tenure failed: an error of the server, missing permissions, or a missing or incompatible table
  126 / 127  the command cannot be executed / was not found; the job was released";

/// Exit codes in the `--help` of `job`.
pub(crate) const JOB: &str = "\
Exit codes:
  0    done
  1    the job does not exist, or its state does not allow the change; nothing was changed
  2    invalid arguments
  125  tenure failed: an error of the server, missing permissions, or a missing or incompatible table";

/// Exit codes in the `--help` of subcommands of `job` that change a queue as a whole.
pub(crate) const QUEUE: &str = "\
Exit codes:
  0    done
  2    invalid arguments
  125  tenure failed: an error of the server, missing permissions, or a missing or incompatible table";

/// Exit codes in the `--help` of `job schedule rm`.
pub(crate) const SCHEDULE_RM: &str = "\
Exit codes:
  0    done
  1    there is no such schedule
  2    invalid arguments
  125  tenure failed: an error of the server, missing permissions, or a missing or incompatible table";

/// Exit codes in the `--help` of `job checkpoint`.
pub(crate) const CHECKPOINT: &str = "\
Exit codes:
  0    done
  1    another worker holds the chunk, or its claim was lost; nothing was changed
  2    invalid arguments
  125  tenure failed: an error of the server, missing permissions, or a missing or incompatible table";

/// Exit codes in the `--help` of `schema`.
pub(crate) const SCHEMA: &str = "\
Exit codes:
  0    printed; with --apply: the tables exist and are compatible, or with --undo: have nothing of tenure's any longer
  2    invalid arguments
  125  tenure failed: an error of the server, missing permissions, or an incompatible table";

/// Exit codes in the `--help` of `serve`.
pub(crate) const SERVE: &str = "\
Exit codes:
  0    stopped by TERM or INT
  2    invalid arguments
  125  tenure failed: an error of the address, the certificate or the data directory";

/// Exit codes in the `--help` of commands that only print.
pub(crate) const PRINT: &str = "\
Exit codes:
  0    printed
  2    invalid arguments
  125  the output could not be written";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_counted_from_128() {
        assert_eq!(Exit::Signal(15).code(), 143);
        assert_eq!(Exit::Child(7).code(), 7);
    }
}
