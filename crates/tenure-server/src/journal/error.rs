//! Why a data directory cannot be used, and what to do about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why the journal cannot be opened, or cannot go on.
#[derive(Debug)]
pub enum JournalError {
    /// Another process has the directory.
    InUse {
        /// The directory.
        dir: PathBuf,
        /// Which process, as far as it said.
        pid: Option<u32>,
    },
    /// The directory holds other things, and nothing of ours.
    NotOurs {
        /// What is in it.
        path: PathBuf,
    },
    /// Written by another version.
    Version {
        /// The file.
        path: PathBuf,
        /// The version it names.
        found: u32,
    },
    /// A file is not as it was written, or belongs elsewhere.
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A file that must be there is not.
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The operating system refused.
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The name of the machine's boot is empty or longer than 63 bytes.
    BootId,
    /// An earlier failure stopped the journal: nothing may be answered any more.
    Stopped,
}

impl JournalError {
    /// Whether this is a matter of lost or damaged data, which [`Options::accept_loss`](super::Options::accept_loss)
    /// gets past.
    pub const fn is_loss(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Missing { .. })
    }

    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_owned(), source }
    }
}

const RECOVERY_HINT: &str = "put back the file as it was, or start once with --accept-loss: every hold is then forgotten, \
                       nothing is granted until the longest lease has passed, and the fencing numbers go on";

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse { dir, pid } => {
                write!(f, "the data directory {} is in use by ", dir.display())?;
                match pid {
                    Some(pid) => write!(f, "process {pid}")?,
                    None => f.write_str("another process")?,
                }
                f.write_str(": stop that one, or give each server a directory of its own")
            }
            Self::NotOurs { path } => write!(
                f,
                "{} is there and no server's data: give the server an empty directory",
                path.display()
            ),
            Self::Version { path, found } => write!(
                f,
                "{} is of version {found}, this server reads version {}: start the server that wrote it",
                path.display(),
                super::format::FORMAT_VERSION
            ),
            Self::Damaged { path, what } => {
                write!(f, "{} {what}: {RECOVERY_HINT}", path.display())
            }
            Self::Missing { path } => write!(f, "{} is missing: {RECOVERY_HINT}", path.display()),
            Self::Io { doing, path, source } => {
                write!(f, "cannot {doing} {}", path.display())?;
                match source.kind() {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                        f.write_str(": the disk is full: free some space, then start the server again")
                    }
                    io::ErrorKind::PermissionDenied => {
                        f.write_str(": not permitted: the directory must belong to the server's user")
                    }
                    _ => Ok(()),
                }
            }
            Self::BootId => f.write_str(
                "the boot id of this machine cannot be used: it has 1 to 63 bytes, see /proc/sys/kernel/random/boot_id",
            ),
            Self::Stopped => f.write_str(
                "the journal stopped at an earlier failure: start the server again once that is mended",
            ),
        }
    }
}

impl std::error::Error for JournalError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
