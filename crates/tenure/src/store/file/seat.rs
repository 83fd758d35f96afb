//! A seat: the file whose lock proves that a holder or waiter is alive.
//!
//! Its owner keeps it open and locked by `flock`. The kernel drops that lock when the last copy of the descriptor is
//! closed, and so when the process ends, however it ends. A seat serves one claim at a time. Between claims it is kept
//! for the next one: a free lock is acquired and released without creating or removing a file.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode as Permissions, OFlags, Timespec, Timestamps, UTIME_NOW,
};
use rustix::io::Errno;

use super::super::Identity;
use super::layout::{CHECK_VALIDITY_NANOS, Folder};
use super::notification::{FileEvents, Hub, Wake, Watch};
use super::system::{NO_ACCESS_TIME, is_linked, names_in, system_error};
use crate::{Result, identity};

/// Largest number of bytes read of a seat.
const MAX_BYTES: usize = 2048;
/// Largest number of seats that are checked for dead owners when a store is opened.
const SWEPT: usize = 256;
/// Number of attempts to create a seat. One fails if a sweep takes the file for a dead owner's before it is locked.
const TRIES: usize = 100;

#[derive(Debug)]
pub(super) struct Seat {
    pub(super) name: u64,
    pub(super) wake: Arc<Wake>,
    path: PathBuf,
    file: OwnedFd,
    /// Notifies of evictions, of waiters and of the file's removal; `None` if the system cannot.
    watch: Option<Watch>,
    /// Identity written to the file, and its length in bytes.
    signed: (Identity, usize),
    /// Time at which the file was last seen to exist.
    checked: AtomicU64,
    /// True if a copy of the descriptor was passed on. It would keep alive the next claim of this seat, too.
    lent: bool,
    pid: u32,
}

impl Seat {
    pub(super) fn make(folder: &Folder, hub: &Arc<Hub>, by: &Identity, now: u64) -> Result<Self> {
        let flags = OFlags::RDWR
            | OFlags::CREATE
            | OFlags::EXCL
            | OFlags::NOFOLLOW
            | OFlags::CLOEXEC
            | NO_ACCESS_TIME;
        for _ in 0..TRIES {
            let name = u64::from_be_bytes(identity::random()?);
            let path = folder.seat(name);
            let file = match rustix::fs::open(&path, flags, folder.files()) {
                Err(Errno::EXIST) => continue,
                made => made.map_err(|errno| system_error("make", &path, errno))?,
            };
            let wake = Arc::<Wake>::default();
            let pid = std::process::id();
            let (signed, checked) = Default::default();
            let (watch, lent) = (None, false);
            let mut seat = Self { name, wake, path, file, watch, signed, checked, lent, pid };
            if seat.lock(folder.files())? && seat.is_there(now) {
                seat.watch = hub.watch(&seat.path, FileEvents::Changed, &seat.wake);
                seat.sign(by)?;
                return Ok(seat);
            }
        }
        Err(system_error("keep a file in", &folder.seats(), Errno::BUSY))
    }

    /// Locks a new seat; false if a sweep came first.
    fn lock(&self, permissions: Permissions) -> Result<bool> {
        let locked = rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive);
        match locked.and_then(|()| rustix::fs::fchmod(&self.file, permissions)) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
            Err(errno) => Err(system_error("lock", &self.path, errno)),
        }
    }

    /// Replaces the notifier if an earlier claim of this seat still has it: a released claim may still be waiting on
    /// it.
    pub(super) fn listen_alone(&mut self) {
        let known = 1 + usize::from(self.is_watched());
        if Arc::strong_count(&self.wake) > known {
            self.wake = Arc::default();
            self.watch.iter().for_each(|watch| watch.redirect_to(&self.wake));
        }
    }

    /// Writes the owner's identity to the file, for other processes to read.
    pub(super) fn sign(&mut self, by: &Identity) -> Result<()> {
        let (signed, length) = &self.signed;
        if *length > 0 && signed == by {
            return Ok(());
        }
        let Identity { id, host, pid, note } = by;
        let plain = |text: &str| text.replace(char::is_control, " ");
        let mut text =
            format!("{}\n{}\n{pid}\n{}\n", plain(id), plain(host), plain(note)).into_bytes();
        text.truncate(MAX_BYTES);
        // Overwrites the rest of a longer identity.
        text.resize(text.len().max(*length), b'\n');
        let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, &text, 0));
        match written {
            Ok(all) if all == text.len() => {}
            Ok(_) => return Err(system_error("write", &self.path, Errno::NOSPC)),
            Err(errno) => return Err(system_error("write", &self.path, errno)),
        }
        self.signed = (by.clone(), text.len());
        Ok(())
    }

    /// True if the file was not removed.
    pub(super) fn is_there(&self, now: u64) -> bool {
        let there = is_linked(&self.file);
        self.checked.store(if there { now } else { 0 }, Ordering::Relaxed);
        there
    }

    /// True if the file exists, or existed a moment ago.
    pub(super) fn was_there(&self, now: u64) -> bool {
        now.saturating_sub(self.checked.load(Ordering::Relaxed)) < CHECK_VALIDITY_NANOS
            || self.is_there(now)
    }

    pub(super) fn is_watched(&self) -> bool {
        self.watch.is_some()
    }

    pub(super) fn is_lent(&self) -> bool {
        self.lent
    }

    /// Wakes the waiters that watch this seat for their turn.
    pub(super) fn call(&self) {
        // By a read, which changes nothing on disk and does not wake ourselves. If it fails, by touching the file.
        if !matches!(rustix::io::pread(&self.file, &mut [0], 0), Ok(1)) {
            let _ = rustix::fs::futimens(&self.file, &NOW);
        }
    }

    /// Duplicates the descriptor. The seat counts as taken as long as a copy is open in any process.
    pub(super) fn lend(&mut self) -> std::io::Result<OwnedFd> {
        let copy = self.file.try_clone()?;
        self.lent = true;
        Ok(copy)
    }
}

impl Drop for Seat {
    /// Frees the seat at once, even if another process has a copy of the descriptor.
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

/// Wakes the owner and the watchers of a seat.
pub(super) fn touch(folder: &Folder, seat: u64) {
    // Fails if the owner has just left.
    let _ = rustix::fs::utimensat(CWD, folder.seat(seat), &NOW, AtFlags::SYMLINK_NOFOLLOW);
}

/// True if the owner of a seat is alive. Removes the seat of a dead owner.
pub(super) fn is_taken(folder: &Folder, seat: u64) -> bool {
    is_taken_at(&folder.seat(seat))
}

fn is_taken_at(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Permissions::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::NOTDIR) => return false,
        // A seat that cannot be opened never counts as dead.
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

/// Identity of a seat's owner.
pub(super) fn signature(folder: &Folder, seat: u64) -> Option<Identity> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder.seat(seat), flags, Permissions::empty()).ok()?;
    let mut text = [0; MAX_BYTES];
    let length = rustix::io::pread(&file, &mut text, 0).ok()?;
    let mut lines = std::str::from_utf8(&text[..length]).ok()?.lines();
    let mut line = || lines.next().map(str::to_owned);
    let (id, host, pid, note) = (line()?, line()?, line()?.parse().ok()?, line()?);
    Some(Identity { id, host, pid, note })
}

/// Removes seats of killed processes.
pub(super) fn sweep(folder: &Folder) -> Result<()> {
    let seats = folder.seats();
    for name in names_in(&seats, SWEPT)? {
        if let Some(name) = std::str::from_utf8(&name).ok().filter(|name| name.len() == 16) {
            is_taken_at(&seats.join(name));
        }
    }
    Ok(())
}
