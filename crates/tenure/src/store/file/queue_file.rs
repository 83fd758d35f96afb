//! The file of one key: the last fencing number issued, and a line per holder and waiter.
//!
//! The file is its own mutex. A process that adds a line, grants one or removes that of another process holds `flock`
//! on it, for some microseconds and never across an await. The lock is only ever tried: if a process was stopped while
//! it had the lock, other processes report that and do not hang. Leaving needs no lock: a line belongs to its owner,
//! which blanks it in one write.
//!
//! ```text
//! tenure queue 1 lock reports/nightly                               (256 bytes, padded)
//! fence 00001747000000000002 seq 0000000000000002 lines 00000002    (128 bytes, padded)
//! 0000000000000001 8c1f… x 00000001 00001747000000000001 …          (128 bytes: seq, owner, mode, slots, token,
//! 0000000000000002 53aa… x 00000001 00000000000000000000 …           since, promised token)
//! ```
//!
//! Lines are in no order: a blank line is reused, and `seq` gives the order of arrival. The last 16 bytes of a line do
//! not belong to its owner: a mark there means that an operator evicts it, or has cut it off. Every write is within one
//! page, so that a process killed at any moment leaves whole lines. Lines that a crash of the machine leaves are dead,
//! because no process has the liveness files of their owners locked.
//!
//! A new waiter is *promised* its fencing number, unless a claim before it has yet to get one. From the moment at which
//! no claim is before it, it holds the lock with that number, without a further write.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::format::{
    Head, LINE_BYTES, LINES_AT, MAX_FENCE, MAX_LINES, Mark, OWNER_BYTES, QueueLine, TITLE_BYTES,
    is_blank, key_in_title, line_at, padded, parse_lines, title, was_marked,
};
use super::layout::CHECK_VALIDITY_NANOS;
use super::system::{FileId, NO_ACCESS_TIME, file_id, is_file_at, is_linked, system_error};
use crate::mutex::Mutex;
use crate::store::KeySpace;
use crate::{Error, ErrorKind, Key, Result};

/// Bytes read at once: the title, the head and the first lines.
const CHUNK: usize = 1024;
/// Number of attempts to read a line that its owner may be blanking.
const REREADS: usize = 10;

/// Open file of a key.
#[derive(Debug)]
pub(super) struct QueueFile {
    pub(super) key: Key,
    path: PathBuf,
    file: OwnedFd,
    id: FileId,
    /// Time at which the path was last seen to name the file.
    checked: AtomicU64,
    title: [u8; TITLE_BYTES],
    /// The bytes read. Its mutex excludes the threads of this process from each other, which `flock` does not: they
    /// share the open file.
    content: Mutex<Vec<u8>>,
}

/// State of the queue after its owner's line was blanked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AfterLeaving {
    /// True if the owner had been evicted.
    pub(super) evicted: bool,
    /// True if there are other claims to wake.
    pub(super) others: bool,
}

impl QueueFile {
    /// Opens the file of a key, and creates it if it is missing.
    pub(super) fn open(
        key: &Key,
        space: KeySpace,
        path: PathBuf,
        permissions: Permissions,
    ) -> std::result::Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = open_or_make(&path, flags, permissions)?;
        let id = file_id(&file)?;
        let title = title(key, space);
        let (key, content, checked) = (key.clone(), Mutex::default(), AtomicU64::new(0));
        Ok(Self { key, path, file, id, checked, title, content })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Tries to lock the file, without waiting; `None` if another process or thread has it locked.
    pub(super) fn try_lock(&self) -> Result<Option<QueueFileLock<'_>>> {
        let Some(content) = self.content.try_lock() else { return Ok(None) };
        match rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(QueueFileLock { _flock: Flock(&self.file), content })),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
            Err(errno) => Err(self.failed("lock", errno)),
        }
    }

    /// Reads holders and waiters in order of arrival, without the lock.
    pub(super) fn read_lines(&self) -> Result<Vec<QueueLine>> {
        let (_, mut lines) = self.scan(&mut Vec::new())?;
        lines.retain(|line| line.mark != Mark::CutOff);
        Ok(lines)
    }

    /// Checks, without the lock, that the caller's own line, which was promised a token, holds by now. `Some` if it
    /// does, with true if other claims wait. `None` if it does not, or if that cannot be decided without the lock.
    ///
    /// Safe without the lock: claims before it leave by a write of their own, and no new claim comes before it. A line
    /// that is absent now is gone for good.
    pub(super) fn is_first(&self, line: QueueLine) -> Option<bool> {
        let mut read = [0; CHUNK];
        let length = rustix::io::pread(&self.file, &mut read, 0).ok()?;
        if length == CHUNK || self.head(&read[..length]).is_err() {
            return None;
        }
        let (mut ours, mut others) = (false, false);
        // The number of lines in the head is ignored, because another process may be writing it. Lines beyond it are
        // blank.
        for (index, text) in read[LINES_AT..length].chunks(LINE_BYTES).enumerate() {
            if is_blank(text) {
                continue;
            }
            let other = QueueLine::parse(index, text)?;
            if other.seq < line.seq {
                return None;
            }
            ours |= other == line;
            others |= other.seq > line.seq;
        }
        ours.then_some(others)
    }

    /// Writes the caller's own line, without the lock.
    pub(super) fn rewrite(&self, line: QueueLine) -> Result<()> {
        self.write(line_at(line.index), &line.text()[..OWNER_BYTES])
    }

    /// Blanks the caller's own line, without the lock.
    pub(super) fn blank(&self, index: usize) -> Result<()> {
        self.write(line_at(index), &padded::<LINE_BYTES>("")[..OWNER_BYTES])
    }

    /// Reads the queue after the caller's line was blanked. A claim that arrived before that is found now, and a later
    /// one finds the line blank: no claim is left waiting for a line that is gone.
    pub(super) fn read_after_leaving(&self, index: usize) -> Result<AfterLeaving> {
        let mut read = Vec::new();
        let (_, lines) = self.scan(&mut read)?;
        let evicted = read.get(line_at(index)..).is_some_and(was_marked);
        Ok(AfterLeaving { evicted, others: !lines.is_empty() })
    }

    /// True if the caller was evicted before it blanked its line. Reads only that line.
    pub(super) fn was_evicted(&self, index: usize) -> Result<bool> {
        let mut line = [0; LINE_BYTES];
        let at = line_at(index);
        let read =
            rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut line, at as u64));
        let length = read.map_err(|errno| self.failed("read", errno))?;
        Ok(was_marked(&line[..length]))
    }

    /// True if the file was not removed, checked under the lock.
    ///
    /// The full check that the path names it is made only from time to time. In between it suffices that the file still has
    /// a name.
    pub(super) fn is_there(&self, now: u64) -> bool {
        if self.was_current_recently(now) { is_linked(&self.file) } else { self.is_current(now) }
    }

    /// True if the path still names the open file.
    pub(super) fn is_current(&self, now: u64) -> bool {
        let current = is_file_at(&self.path, self.id);
        if current {
            self.checked.store(now, Ordering::Relaxed);
        }
        current
    }

    /// True if that was checked a moment ago.
    pub(super) fn was_current_recently(&self, now: u64) -> bool {
        now.saturating_sub(self.checked.load(Ordering::Relaxed)) < CHECK_VALIDITY_NANOS
    }

    /// Reads the whole file; no head if it is still empty. An invalid line may be one that its owner is blanking just
    /// now, and is read again.
    pub(super) fn scan(&self, read: &mut Vec<u8>) -> Result<(Option<Head>, Vec<QueueLine>)> {
        for _ in 0..REREADS {
            self.fill(read)?;
            if read.iter().all(|byte| *byte == 0) {
                return Ok((None, Vec::new()));
            }
            let head = self.head(read)?;
            if let Some(lines) = parse_lines(&read[LINES_AT..], head) {
                return Ok((Some(head), lines));
            }
            std::thread::yield_now();
        }
        Err(self.damaged("a line of it cannot be read"))
    }

    fn fill(&self, read: &mut Vec<u8>) -> Result<()> {
        read.resize(CHUNK, 0);
        let mut had = 0;
        loop {
            match rustix::io::pread(&self.file, &mut read[had..], had as u64) {
                Ok(0) => break,
                Ok(more) => had += more,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(self.failed("read", errno)),
            }
            // A file that was never longer than a chunk takes one call.
            if had < CHUNK {
                break;
            }
            if had == read.len() {
                if had > line_at(MAX_LINES) {
                    return Err(self.damaged("it is too long"));
                }
                read.resize(had * 2, 0);
            }
        }
        read.truncate(had);
        Ok(())
    }

    fn head(&self, read: &[u8]) -> Result<Head> {
        let Some((title, rest)) = read.split_at_checked(TITLE_BYTES) else {
            return Err(self.damaged("it is cut short"));
        };
        if title != self.title {
            return Err(self.damaged("it begins with another key or format"));
        }
        let head = rest.get(..LINE_BYTES).and_then(Head::parse);
        let head = head.ok_or_else(|| self.damaged("its fencing number is invalid"))?;
        if head.fence >= MAX_FENCE || head.lines > MAX_LINES {
            return Err(self.damaged("its numbers are out of range"));
        }
        Ok(head)
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let written =
            rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, bytes, at as u64));
        match written {
            Ok(all) if all == bytes.len() => Ok(()),
            Ok(_) => Err(self.failed("write", Errno::NOSPC)),
            Err(errno) => Err(self.failed("write", errno)),
        }
    }

    /// Writes title and head to an empty file, and returns the bytes written.
    pub(super) fn write_head(&self, head: Head) -> Result<Vec<u8>> {
        let mut bytes = [0; LINES_AT];
        bytes[..TITLE_BYTES].copy_from_slice(&self.title);
        bytes[TITLE_BYTES..].copy_from_slice(&head.text());
        self.write(0, &bytes)?;
        Ok(bytes.to_vec())
    }

    fn failed(&self, what: &str, errno: Errno) -> Error {
        system_error(what, &self.path, errno).on(&self.key)
    }

    fn damaged(&self, how: &str) -> Error {
        let message = format!(
            "{} is damaged ({how}): remove it once this key has no holder or waiter",
            self.path.display()
        );
        Error::new(ErrorKind::Misconfigured, message).on(&self.key)
    }
}

fn open_or_make(
    path: &Path,
    flags: OFlags,
    permissions: Permissions,
) -> std::result::Result<OwnedFd, Errno> {
    let open = || match rustix::fs::open(path, flags | NO_ACCESS_TIME, Permissions::empty()) {
        // Only the owner of a file may open it with `NOATIME`.
        Err(Errno::PERM) => rustix::fs::open(path, flags, Permissions::empty()),
        opened => opened,
    };
    match open() {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    match rustix::fs::open(
        path,
        flags | NO_ACCESS_TIME | OFlags::CREATE | OFlags::EXCL,
        permissions,
    ) {
        Ok(file) => {
            // A file of a shared store gets the permissions that the umask removed.
            rustix::fs::fchmod(&file, permissions)?;
            Ok(file)
        }
        Err(Errno::EXIST) => open(),
        Err(errno) => Err(errno),
    }
}

/// Key in the title of a queue's file.
pub(super) fn key_in(path: &Path, space: KeySpace) -> Option<Key> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Permissions::empty()).ok()?;
    let mut begin = [0; TITLE_BYTES];
    rustix::io::pread(&file, &mut begin, 0).ok()?;
    key_in_title(&begin, space)
}

/// Exclusive lock of a queue's file, against other processes and the other threads of this one.
pub(super) struct QueueFileLock<'a> {
    // First, so that it is dropped first: the file is unlocked before the next thread of this process may lock it.
    _flock: Flock<'a>,
    /// Content of the file, as far as it was read.
    pub(super) content: MutexGuard<'a, Vec<u8>>,
}

/// Unlocks the file on drop.
struct Flock<'a>(&'a OwnedFd);

impl Drop for Flock<'_> {
    fn drop(&mut self) {
        // Unlocked explicitly and not by closing: a forked copy of the process shares the open file.
        let _ = rustix::fs::flock(self.0, FlockOperation::Unlock);
    }
}
