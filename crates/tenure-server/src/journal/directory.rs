//! The storage of a server in production: a directory of the file system.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use super::error::JournalError;
use super::storage::{MergeTask, MergeWork, QUARANTINE_DIR, Storage, StorageFile};

/// A data directory, locked by this process until the value is dropped.
#[derive(Debug)]
pub(super) struct DataDirectory {
    dir: PathBuf,
    /// The directory itself, which carries the lock. A lock file could be deleted and created again: two processes
    /// would then lock two different files.
    handle: File,
}

const PID_FILE: &str = "pid";

impl DataDirectory {
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
        let directory = Self { dir: dir.to_owned(), handle };
        // For operators and for the message above. Nothing depends on it, so a failure is ignored.
        let _ = std::fs::write(directory.path(PID_FILE), format!("{}\n", std::process::id()));
        Ok(directory)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

impl Storage for DataDirectory {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            // The root of a file system has a lost+found.
            if ![PID_FILE, "lost+found"].contains(&name.as_str()) {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Creates a file of `size` zero bytes. Its blocks are allocated if the file system supports that.
    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn StorageFile>> {
        let path = self.path(name);
        let make = || -> io::Result<Box<dyn StorageFile>> {
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
            Ok(Box::new(file))
        };
        make().inspect_err(|_| {
            let _ = std::fs::remove_file(&path);
        })
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(File::open(self.path(name))?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path(from), self.path(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn sync_names(&self) -> io::Result<()> {
        self.handle.sync_all()
    }

    fn empty_quarantine(&self) -> io::Result<()> {
        let path = self.path(QUARANTINE_DIR);
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::fs::DirBuilder::new().mode(0o700).create(&path)
    }

    /// Runs the merge on a thread: it reads and writes whole files, and the server must not wait for it.
    fn spawn_merge(&self, merge: MergeWork) -> io::Result<Box<dyn MergeTask>> {
        let thread = thread::Builder::new().name("tenure-snapshot".into()).spawn(merge)?;
        Ok(Box::new(thread))
    }
}

impl Drop for DataDirectory {
    /// Unlocks explicitly. Closing the handle is not enough: a child process that another thread is starting has a copy
    /// of the handle until its exec, and would keep the lock.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.handle, FlockOperation::Unlock);
    }
}

impl StorageFile for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, bytes, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

impl MergeTask for JoinHandle<Result<u64, JournalError>> {
    fn is_finished(&self) -> bool {
        JoinHandle::is_finished(self)
    }

    fn join(self: Box<Self>) -> thread::Result<Result<u64, JournalError>> {
        JoinHandle::join(*self)
    }
}
