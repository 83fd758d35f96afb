//! The directory and every change made to it: one small method an operation, so that a test can stop after any of them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use super::error::JournalError;

/// A data directory that this process has to itself, until the value is dropped.
#[derive(Debug)]
pub(super) struct Disk {
    dir: PathBuf,
    /// The directory itself, which carries the lock: unlike a lock file it cannot be deleted and made anew.
    handle: File,
    #[cfg(test)]
    pub(super) hook: Option<Hook>,
}

/// Where evidence goes that is not trusted any more.
pub(super) const QUARANTINE_DIR: &str = "quarantine";
const PID_FILE: &str = "pid";

impl Disk {
    /// Makes the directory where it is missing, and locks it.
    pub(super) fn open(dir: &Path) -> Result<Self, JournalError> {
        match std::fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(JournalError::io("make the data directory", dir)(error));
            }
            Err(_) => {}
            Ok(()) => {
                // A directory that a crash takes away again would be a silent fresh start.
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
        // For people and for the message above: nothing depends on it, not even its being written.
        let _ = std::fs::write(disk.path(PID_FILE), format!("{}\n", std::process::id()));
        Ok(disk)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// What is in the directory, but for what may always be there.
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

    /// A new file of `size` bytes, all zero and all backed by the disk where the file system can promise that.
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
                    // A file system without it: then a full disk is met by a write, which stops the server all the same.
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
            // A write that a signal cuts short leaves its beginning.
            let cut = usize::try_from(error.raw_os_error().unwrap_or(0)).expect("not negative");
            let _ = file.write_all_at(&bytes[..cut.min(bytes.len())], offset);
            return Err(JournalError::io("write", &self.path(name))(error));
        }
        file.write_all_at(bytes, offset)
            .map_err(|error| JournalError::io("write", &self.path(name))(error))
    }

    /// Makes what was written to a file outlive the machine.
    pub(super) fn sync(&self, file: &File, name: &str) -> Result<(), JournalError> {
        let sync = || -> io::Result<()> {
            #[cfg(test)]
            self.run_hook(&Op::Sync(name))?;
            file.sync_all()
        };
        sync().map_err(JournalError::io("sync", &self.path(name)))
    }

    /// Makes the names outlive the machine.
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

    /// Makes an empty place for evidence; what an earlier accident left there goes.
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
    /// In so many words: a child that another thread is just starting has a copy of the handle until it runs its program,
    /// and closing ours alone would leave the lock to it.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.handle, FlockOperation::Unlock);
    }
}

/// What is about to be done.
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

/// Sees every operation before it happens and may forbid it: with how many bytes of a write are still to land.
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
