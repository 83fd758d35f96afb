//! How the command ends: the exit codes and what they mean.

use std::fmt;

/// The end of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It was done.
    Success,
    /// `acquire`: another holds it.
    Held,
    /// `doctor`: a check failed.
    CheckFailed,
    /// `job`: there is none such, or its state does not allow it.
    Refused,
    /// The arguments make no sense.
    Usage,
    /// Not acquired: busy, or the wait ran out; for `status`, free.
    NotAcquired,
    /// Lost while the child ran; the child was stopped.
    Lost,
    /// A failure of our own: the store, the configuration.
    Failed,
    /// The child's program cannot be executed.
    CannotExecute,
    /// The child's program was not found.
    NotFound,
    /// The child's own end.
    Child(u8),
    /// The child died of this signal, or we were told to stop by it.
    Signal(i32),
    /// The child died of Ctrl-C.
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

/// The table for `--help` of `run`.
pub(crate) const RUN: &str = "\
Exit codes:
  the command's own  it ended by itself
  2                  usage
  75                 not acquired: held with --try, or the wait ran out
  79                 lost while the command ran; the command was stopped
  125                tenure failed: the store, the configuration
  126 / 127          the command cannot be executed / was not found
  128+N              the command died of signal N, or signal N ended the wait";

/// The table for `--help` of `lead`.
pub(crate) const LEAD: &str = "\
Exit codes:
  0                  told to stop by TERM or INT while no command ran
  the command's own  it ended by itself, or by the TERM or INT that was passed on to it
  2                  usage
  75                 the election was given up: it cannot be won under these settings
  79                 the lead was lost, and --no-auto-reacquire given
  125                tenure failed: the store, the configuration
  126 / 127          the command cannot be executed / was not found
  128+N              the command died of signal N";

/// The table for `--help` of `acquire`.
pub(crate) const ACQUIRE: &str = "\
Exit codes:
  0    acquired
  1    not acquired: another holds it
  2    usage
  125  tenure failed: the store, the configuration, or a store whose holds end with their process";

/// The table for `--help` of `renew` and `release`.
pub(crate) const BY_HANDLE: &str = "\
Exit codes:
  0    done
  1    not held by this handle, or no longer
  2    usage
  125  tenure failed: the store, the configuration";

/// The table for `--help` of `status`.
pub(crate) const STATUS: &str = "\
Exit codes:
  0    held; without NAME: the list was printed
  2    usage
  75   free
  125  tenure failed: the store, the configuration";

/// The table for `--help` of `ls`.
pub(crate) const LS: &str = "\
Exit codes:
  0    the list was printed
  2    usage
  125  tenure failed: the store, the configuration";

/// The table for `--help` of `watch`.
pub(crate) const WATCH: &str = "\
Exit codes:
  0      told to stop by TERM or INT, or nobody reads any more
  2      usage
  125    tenure failed: the store, the configuration";

/// The table for `--help` of `break`.
pub(crate) const BREAK: &str = "\
Exit codes:
  0    broken
  1    not broken: no hold of NAME has this token, or no longer
  2    usage
  125  tenure failed: the store, the configuration";

/// The table for `--help` of `once`.
pub(crate) const ONCE: &str = "\
Exit codes:
  0                  another has run it in this slot, or is running it
  the command's own  it was run here, and ended by itself
  2                  usage
  75                 the run of a slot 16 periods ago still goes on
  79                 lost while the command ran; the command was stopped
  125                tenure failed: the store, the configuration, a clock that is wrong
  126 / 127          the command cannot be executed / was not found
  128+N              the command died of signal N, or signal N ended the wait";

/// The table for `--help` of `bench`.
pub(crate) const BENCH: &str = "\
Exit codes:
  0    measured
  2    usage
  125  tenure failed: the store, the configuration";

/// The table for `--help` of `doctor`.
pub(crate) const DOCTOR: &str = "\
Exit codes:
  0    nothing failed; there may be warnings
  1    a check failed
  2    usage
  125  tenure failed: the store cannot be opened or reached";

/// The table for `--help` of `gc`.
pub(crate) const GC: &str = "\
Exit codes:
  0    done; nothing was left, or it was removed
  2    usage
  125  tenure failed: the store, missing rights";

/// The table for `--help` of `work`.
pub(crate) const WORK: &str = "\
Exit codes:
  0          told to stop by INT or TERM, or --until-empty and nothing is left
  2          usage
  125        tenure failed: the server, missing rights, a table that is missing or of another shape
  126 / 127  the command cannot be executed / was not found; the job was given back";

/// The table for `--help` of `job`.
pub(crate) const JOB: &str = "\
Exit codes:
  0    done
  1    there is no such job, or its state does not allow it; nothing was changed
  2    usage
  125  tenure failed: the server, missing rights, a table that is missing or of another shape";

/// The table for `--help` of `schema`.
pub(crate) const SCHEMA: &str = "\
Exit codes:
  0    printed; with --apply: the tables are there, as they should be
  2    usage
  125  tenure failed: the server, missing rights, a table that is not understood";

/// The table for `--help` of `serve`.
pub(crate) const SERVE: &str = "\
Exit codes:
  0    told to stop by TERM or INT
  2    usage
  125  tenure failed: the address, the certificate, the data directory";

/// The table for `--help` of what only prints.
pub(crate) const PRINT: &str = "\
Exit codes:
  0    printed
  2    usage
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
