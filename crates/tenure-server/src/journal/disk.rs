//! The directory and every change made to it. One small method per operation, so that a test can fail any of them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use super::error::JournalError;

/// A data directory, locked by this process until the value is dropped.
#[derive(Debug)]
pub(super) struct Disk {
    dir: PathBuf,
    /// The directory itself, which carries the lock. A lock file could be deleted and created again: two processes
    /// would then lock two different files.
    handle: File,
    #[cfg(test)]
    pub(super) hook: Option<Hook>,
}

/// Directory for files that are no longer trusted, kept for examination.
pub(super) const QUARANTINE_DIR: &str = "quarantine";
const PID_FILE: &str = "pid";

impl Disk {
    /// Creates the directory if it is missing, and locks it.
    pub(super) fn open(dir: &Path) -> Result<Self, JournalError> {
        match std::fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(JournalError::io("make the data directory", dir)(error));
            }
            Err(_) => {}
            Ok(()) => {
                // The parent is synced. Otherwise a machine crash could remove the new directory again, and the next
                // start would silently be a fresh one.
                let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
                let parent = parent.unwrap_or(Path::new("."));
                File::open(parent)
                    .and_then(|parent| parent.sync_all())
                    .map_err(JournalError::io("make the data directory", dir))?;
            }
        }
        let handle = File::open(dir).map_err(JournalError::io("open the data directory", dir))?;
        match rustix::fs::flock(&handle, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let pid = std::fs::read_to_string(dir.join(PID_FILE)).ok();
                let pid = pid.and_then(|pid| pid.trim().parse().ok());
                return Err(JournalError::InUse { dir: dir.to_owned(), pid });
            }
            Err(error) => {
                return Err(JournalError::io("lock the data directory", dir)(error.into()));
            }
        }
        let disk = Self {
            dir: dir.to_owned(),
            handle,
            #[cfg(test)]
            hook: None,
        };
        // For operators and for the message above. Nothing depends on it, so a failure is ignored.
        let _ = std::fs::write(disk.path(PID_FILE), format!("{}\n", std::process::id()));
        Ok(disk)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Names in the directory, except those that may always be there.
    pub(super) fn names(&self) -> Result<Vec<String>, JournalError> {
        let list = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in std::fs::read_dir(&self.dir)? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                // The root of a file system has a lost+found.
                if ![PID_FILE, QUARANTINE_DIR, "lost+found"].contains(&name.as_str()) {
                    names.push(name);
                }
            }
            names.sort_unstable();
            Ok(names)
        };
        list().map_err(JournalError::io("list", &self.dir))
    }

    /// Creates a file of `size` zero bytes. Its blocks are allocated if the file system supports that.
    pub(super) fn create(&self, name: &str, size: u64) -> Result<File, JournalError> {
        let path = self.path(name);
        let make = || -> io::Result<File> {
            #[cfg(test)]
            self.run_hook(&Op::Create(name, size))?;
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(true).mode(0o600);
            let file = options.open(&path)?;
            if size > 0 {
                match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size) {
                    Ok(()) => {}
                    // The file system cannot allocate ahead. A full disk is then noticed by a later write, which stops
                    // the server as well.
                    Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(size)?,
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(file)
        };
        make().map_err(|error| {
            let _ = std::fs::remove_file(&path);
            JournalError::io("make", &path)(error)
        })
    }

    pub(super) fn write(
        &self,
        file: &File,
        name: &str,
        bytes: &[u8],
        offset: u64,
    ) -> Result<(), JournalError> {
        #[cfg(test)]
        if let Err(error) = self.run_hook(&Op::Write(name, bytes, offset)) {
            // Like a real write that was cut short, the failed write leaves its first bytes.
            let cut = usize::try_from(error.raw_os_error().unwrap_or(0)).expect("not negative");
            let _ = file.write_all_at(&bytes[..cut.min(bytes.len())], offset);
            return Err(JournalError::io("write", &self.path(name))(error));
        }
        file.write_all_at(bytes, offset)
            .map_err(|error| JournalError::io("write", &self.path(name))(error))
    }

    /// Makes the content of a file durable.
    pub(super) fn sync(&self, file: &File, name: &str) -> Result<(), JournalError> {
        let sync = || -> io::Result<()> {
            #[cfg(test)]
            self.run_hook(&Op::Sync(name))?;
            file.sync_all()
        };
        sync().map_err(JournalError::io("sync", &self.path(name)))
    }

    /// Makes created, renamed and removed names durable.
    pub(super) fn sync_names(&self) -> Result<(), JournalError> {
        let sync = || -> io::Result<()> {
            #[cfg(test)]
            self.run_hook(&Op::SyncNames)?;
            self.handle.sync_all()
        };
        sync().map_err(JournalError::io("sync", &self.dir))
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> Result<(), JournalError> {
        let rename = || -> io::Result<()> {
            #[cfg(test)]
            self.run_hook(&Op::Rename(from, to))?;
            std::fs::rename(self.path(from), self.path(to))
        };
        rename().map_err(JournalError::io("rename", &self.path(from)))
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), JournalError> {
        let remove = || -> io::Result<()> {
            #[cfg(test)]
            self.run_hook(&Op::Remove(name))?;
            match std::fs::remove_file(self.path(name)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            }
        };
        remove().map_err(JournalError::io("remove", &self.path(name)))
    }

    /// Creates an empty quarantine. The files of an earlier crash are removed.
    pub(super) fn empty_quarantine(&self) -> Result<(), JournalError> {
        let path = self.path(QUARANTINE_DIR);
        let empty = || -> io::Result<()> {
            #[cfg(test)]
            self.run_hook(&Op::EmptyQuarantine)?;
            match std::fs::remove_dir_all(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            std::fs::DirBuilder::new().mode(0o700).create(&path)
        };
        empty().map_err(JournalError::io("empty", &path))
    }
}

impl Drop for Disk {
    /// Unlocks explicitly. Closing the handle is not enough: a child process that another thread is starting has a copy
    /// of the handle until its exec, and would keep the lock.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.handle, FlockOperation::Unlock);
    }
}

/// An operation that is about to be executed.
#[cfg(test)]
#[derive(Debug)]
pub(super) enum Op<'a> {
    Create(&'a str, u64),
    Write(&'a str, &'a [u8], u64),
    Sync(&'a str),
    SyncNames,
    Rename(&'a str, &'a str),
    Remove(&'a str),
    EmptyQuarantine,
}

/// Test hook, called before every operation. An error fails the operation; its value is the number of bytes of a write
/// that are written nevertheless.
#[cfg(test)]
#[derive(Clone)]
pub(super) struct Hook(pub(super) std::sync::Arc<HookFn>);

#[cfg(test)]
type HookFn = dyn Fn(&Op<'_>) -> Result<(), i32> + Send + Sync;

#[cfg(test)]
impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

#[cfg(test)]
impl Disk {
    fn run_hook(&self, op: &Op<'_>) -> io::Result<()> {
        match &self.hook {
            Some(Hook(hook)) => hook(op).map_err(io::Error::from_raw_os_error),
            None => Ok(()),
        }
    }
}
