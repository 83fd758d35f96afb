//! The liveness lock: a lock on a file of its own, which proves that a holder or waiter is alive.
//!
//! The owner keeps the file open and locked by `flock`. The kernel drops that lock when the last copy of the descriptor
//! is closed, and so when the process ends, however it ends. A liveness lock serves one claim at a time. Between claims
//! it is kept for the next one: a free lock is acquired and released without creating or removing a file.
//!
//! Liveness files are in the folder `seats`. The file contains its owner's identity.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode as Permissions, OFlags, Timespec, Timestamps, UTIME_NOW,
};
use rustix::io::Errno;

use super::layout::{CHECK_VALIDITY_NANOS, Folder};
use super::notification::{FileEvents, Hub, Wake, Watch};
use super::system::{NO_ACCESS_TIME, is_linked, names_in, system_error};
use crate::store::Identity;
use crate::{Result, identity};

/// Largest number of bytes read of a liveness file.
const MAX_IDENTITY_BYTES: usize = 2048;
/// Largest number of files that are checked for dead owners when a store is opened.
const MAX_CHECKED_AT_OPEN: usize = 256;
/// Number of attempts to create a file. One fails if another process takes the file for a dead owner's before it is
/// locked.
const CREATE_ATTEMPTS: usize = 100;

/// A locked liveness file.
#[derive(Debug)]
pub(super) struct LivenessLock {
    pub(super) name: u64,
    pub(super) wake: Arc<Wake>,
    path: PathBuf,
    file: OwnedFd,
    /// Notifies of evictions, of waiters and of the file's removal; `None` if the system cannot.
    watch: Option<Watch>,
    /// Identity written to the file, and its length in bytes.
    written: (Identity, usize),
    /// Time at which the file was last seen to exist.
    checked: AtomicU64,
    /// True if a copy of the descriptor was passed on. It would keep alive the next claim of this lock, too.
    duplicated: bool,
    pid: u32,
}

impl LivenessLock {
    /// Creates a file and locks it.
    pub(super) fn create(folder: &Folder, hub: &Arc<Hub>, by: &Identity, now: u64) -> Result<Self> {
        let flags = OFlags::RDWR
            | OFlags::CREATE
            | OFlags::EXCL
            | OFlags::NOFOLLOW
            | OFlags::CLOEXEC
            | NO_ACCESS_TIME;
        for _ in 0..CREATE_ATTEMPTS {
            let name = u64::from_be_bytes(identity::random()?);
            let path = folder.liveness_file(name);
            let file = match rustix::fs::open(&path, flags, folder.files()) {
                Err(Errno::EXIST) => continue,
                made => made.map_err(|errno| system_error("make", &path, errno))?,
            };
            let wake = Arc::<Wake>::default();
            let pid = std::process::id();
            let (written, checked) = Default::default();
            let (watch, duplicated) = (None, false);
            let mut lock =
                Self { name, wake, path, file, watch, written, checked, duplicated, pid };
            if lock.lock(folder.files())? && lock.exists(now) {
                lock.watch = hub.watch(&lock.path, FileEvents::Changed, &lock.wake);
                lock.write_identity(by)?;
                return Ok(lock);
            }
        }
        Err(system_error("keep a file in", &folder.liveness_files(), Errno::BUSY))
    }

    /// Locks a new file; false if a check for dead owners came first.
    fn lock(&self, permissions: Permissions) -> Result<bool> {
        let locked = rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive);
        match locked.and_then(|()| rustix::fs::fchmod(&self.file, permissions)) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
            Err(errno) => Err(system_error("lock", &self.path, errno)),
        }
    }

    /// Replaces the notifier if an earlier claim of this lock still has it: a released claim may still be waiting on
    /// it.
    pub(super) fn replace_shared_notifier(&mut self) {
        let known = 1 + usize::from(self.is_watched());
        if Arc::strong_count(&self.wake) > known {
            self.wake = Arc::default();
            self.watch.iter().for_each(|watch| watch.redirect_to(&self.wake));
        }
    }

    /// Writes the owner's identity to the file, for other processes to read.
    pub(super) fn write_identity(&mut self, by: &Identity) -> Result<()> {
        let (written, length) = &self.written;
        if *length > 0 && written == by {
            return Ok(());
        }
        let Identity { id, host, pid, note } = by;
        let plain = |text: &str| text.replace(char::is_control, " ");
        let mut text =
            format!("{}\n{}\n{pid}\n{}\n", plain(id), plain(host), plain(note)).into_bytes();
        text.truncate(MAX_IDENTITY_BYTES);
        // Overwrites the rest of a longer identity.
        text.resize(text.len().max(*length), b'\n');
        match rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, &text, 0)) {
            Ok(all) if all == text.len() => {}
            Ok(_) => return Err(system_error("write", &self.path, Errno::NOSPC)),
            Err(errno) => return Err(system_error("write", &self.path, errno)),
        }
        self.written = (by.clone(), text.len());
        Ok(())
    }

    /// True if the file was not removed.
    pub(super) fn exists(&self, now: u64) -> bool {
        let there = is_linked(&self.file);
        self.checked.store(if there { now } else { 0 }, Ordering::Relaxed);
        there
    }

    /// True if the file exists, or existed a moment ago.
    pub(super) fn existed_recently(&self, now: u64) -> bool {
        now.saturating_sub(self.checked.load(Ordering::Relaxed)) < CHECK_VALIDITY_NANOS
            || self.exists(now)
    }

    pub(super) fn is_watched(&self) -> bool {
        self.watch.is_some()
    }

    pub(super) fn is_duplicated(&self) -> bool {
        self.duplicated
    }

    /// Wakes the waiters that watch this file for their turn.
    pub(super) fn wake_waiters(&self) {
        // By a read, which changes nothing on disk and does not wake ourselves. If it fails, by touching the file.
        if !matches!(rustix::io::pread(&self.file, &mut [0], 0), Ok(1)) {
            let _ = rustix::fs::futimens(&self.file, &NOW);
        }
    }

    /// Duplicates the descriptor. The owner counts as alive as long as a copy is open in any process.
    pub(super) fn duplicate(&mut self) -> std::io::Result<OwnedFd> {
        let copy = self.file.try_clone()?;
        self.duplicated = true;
        Ok(copy)
    }
}

impl Drop for LivenessLock {
    /// Frees the lock at once, even if another process has a copy of the descriptor.
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        let _ = rustix::fs::unlink(&self.path);
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

const NOW: Timestamps = {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    Timestamps { last_access: now, last_modification: now }
};

/// Wakes the owner and the watchers of a liveness file.
pub(super) fn touch(folder: &Folder, owner: u64) {
    // Fails if the owner has just left.
    let _ =
        rustix::fs::utimensat(CWD, folder.liveness_file(owner), &NOW, AtFlags::SYMLINK_NOFOLLOW);
}

/// True if the owner of a liveness file is alive. Removes the file of a dead owner.
pub(super) fn is_alive(folder: &Folder, owner: u64) -> bool {
    is_locked(&folder.liveness_file(owner))
}

fn is_locked(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Permissions::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::NOTDIR) => return false,
        // An owner whose file cannot be opened never counts as dead.
        Err(_) => return true,
    };
    // A shared lock: two processes that check at once must not take each other for the owner.
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            let _ = rustix::fs::unlink(path);
            false
        }
        Err(_) => true,
    }
}

/// Identity of a liveness file's owner.
pub(super) fn identity_of(folder: &Folder, owner: u64) -> Option<Identity> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder.liveness_file(owner), flags, Permissions::empty()).ok()?;
    let mut text = [0; MAX_IDENTITY_BYTES];
    let length = rustix::io::pread(&file, &mut text, 0).ok()?;
    let mut lines = std::str::from_utf8(&text[..length]).ok()?.lines();
    let mut line = || lines.next().map(str::to_owned);
    let (id, host, pid, note) = (line()?, line()?, line()?.parse().ok()?, line()?);
    Some(Identity { id, host, pid, note })
}

/// Removes liveness files of killed processes.
pub(super) fn remove_dead(folder: &Folder) -> Result<()> {
    let files = folder.liveness_files();
    for name in names_in(&files, MAX_CHECKED_AT_OPEN)? {
        if let Some(name) = std::str::from_utf8(&name).ok().filter(|name| name.len() == 16) {
            is_locked(&files.join(name));
        }
    }
    Ok(())
}
