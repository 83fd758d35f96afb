//! Errors of the journal, with what the operator can do about each.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Failure to open or to write the journal.
#[derive(Debug)]
pub enum JournalError {
    /// Another process uses the directory.
    InUse {
        /// The directory.
        dir: PathBuf,
        /// Process id from the directory's `pid` file, if it can be read.
        pid: Option<u32>,
    },
    /// The directory contains other files and no data of a server.
    NotOurs {
        /// One of the files.
        path: PathBuf,
    },
    /// A file has another format version.
    Version {
        /// The file.
        path: PathBuf,
        /// Version of the file.
        found: u32,
    },
    /// A file was changed or truncated, or belongs to another server.
    Damaged {
        /// The file.
        path: PathBuf,
        /// Description of the damage: a predicate that follows the path.
        what: &'static str,
    },
    /// A required file is missing.
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A system call failed.
    Io {
        /// Operation, as a verb.
        doing: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The boot id of the machine is empty or longer than 63 bytes.
    BootId,
    /// An earlier failure stopped the journal: no further reply may be sent.
    Stopped,
}

impl JournalError {
    /// True for lost or damaged data, which [`JournalOptions::accept_loss`](super::JournalOptions::accept_loss) gets
    /// past.
    pub const fn is_loss(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Missing { .. })
    }

    /// True if a system call failed because a file does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_owned(), source }
    }
}

const RECOVERY_HINT: &str = "restore the file, or start once with --accept-loss: all holds are then lost, nothing is \
                       granted until the longest lease has passed, and fencing numbers continue to grow";

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse { dir, pid } => {
                write!(f, "the data directory {} is in use by ", dir.display())?;
                match pid {
                    Some(pid) => write!(f, "process {pid}")?,
                    None => f.write_str("another process")?,
                }
                f.write_str(": stop that process, or give each server a directory of its own")
            }
            Self::NotOurs { path } => write!(
                f,
                "{} is not data of a lock server: give the server an empty directory",
                path.display()
            ),
            Self::Version { path, found } => write!(
                f,
                "{} has format version {found}, this server reads version {}: start the release that wrote it",
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
                "the boot id of this machine must have 1 to 63 bytes: see /proc/sys/kernel/random/boot_id",
            ),
            Self::Stopped => f.write_str(
                "the journal stopped after an earlier failure: fix its cause, then restart the server",
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
