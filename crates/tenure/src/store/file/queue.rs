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
//! 0000000000000001 8c1f… x 00000001 00001747000000000001 …          (128 bytes: seq, seat, mode, slots, token, since,
//! 0000000000000002 53aa… x 00000001 00000000000000000000 …           promised token)
//! ```
//!
//! Lines are in no order: a blank line is reused, and `seq` gives the order of arrival. The last 16 bytes of a line do
//! not belong to its owner: a mark there means that an operator evicts it, or has cut it off. Every write is within one
//! page, so that a process killed at any moment leaves whole lines. Lines that a crash of the machine leaves are dead,
//! because no process has their seats locked.
//!
//! A new waiter is *promised* its fencing number, unless a claim before it has yet to get one. From the moment at which
//! no claim is before it, it holds the lock with that number, without a further write.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::super::{KeySpace, Mode};
use super::format::{Head, LINE, Mark, OWN, QueueLine, is_blank, lines, padded, was_marked};
use super::layout::CHECK_VALIDITY_NANOS;
use super::system::{FileId, NO_ACCESS_TIME, file_id, is_file_at, is_linked, system_error};
use crate::{Error, ErrorKind, Key, Result};

const TITLE: usize = 256;
const FIRST: usize = TITLE + LINE;
/// Bytes read at once: the title, the head and the first lines.
const CHUNK: usize = 1024;
/// Page size: every single write is within one page.
const PAGE: usize = 4096;
/// Largest number of holders and waiters of one key.
pub(super) const MAX_LINES: usize = 10_000;
/// Bound of fencing numbers, which no clock reaches: µs of 290,000 years.
const MAX_FENCE: u64 = 1 << 63;
/// Number of attempts to read a line that its owner may be blanking.
const REREADS: usize = 10;

#[derive(Debug)]
pub(super) struct QueueFile {
    pub(super) key: Key,
    path: PathBuf,
    file: OwnedFd,
    id: FileId,
    /// Time at which the path was last seen to name the file.
    checked: AtomicU64,
    title: [u8; TITLE],
    /// The bytes read. Its mutex excludes the threads of this process from each other, which `flock` does not: they
    /// share the open file.
    read: Mutex<Vec<u8>>,
}

/// State of the queue after its owner's line was blanked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// True if the owner had been evicted.
    pub(super) evicted: bool,
    /// True if there are other claims to wake.
    pub(super) others: bool,
}

/// Result of an attempt to enter a queue.
pub(super) enum Knock<'a> {
    In(Inside<'a>),
    /// Another process or thread is inside.
    Busy,
    /// The path no longer names this file.
    Stale,
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
        let (key, read, checked) = (key.clone(), Mutex::default(), AtomicU64::new(0));
        Ok(Self { key, path, file, id, checked, title, read })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Tries to enter the queue, without waiting.
    pub(super) fn knock(&self, now: u64) -> Result<Knock<'_>> {
        let mut read = match self.read.try_lock() {
            Ok(read) => read,
            Err(TryLockError::Poisoned(read)) => read.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(Knock::Busy),
        };
        match rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(Knock::Busy),
            Err(errno) => return Err(self.failed("lock", errno)),
        }
        let entered = Entered(self);
        let there = if self.is_fresh(now) { is_linked(&self.file) } else { self.is_current(now) };
        if !there {
            return Ok(Knock::Stale);
        }
        let (head, lines) = self.scan(&mut read)?;
        if head.is_none() {
            // New, or wiped by a crash of the machine. Numbers start from the wall clock, which is past the earlier
            // ones.
            let mut fresh = [0; FIRST];
            fresh[..TITLE].copy_from_slice(&self.title);
            fresh[TITLE..].copy_from_slice(&Head::default().text());
            self.write(0, &fresh)?;
            *read = fresh.to_vec();
        }
        let head = head.unwrap_or_default();
        let (mut lines, mut cut_off) = (lines, Vec::new());
        cut_off.extend(lines.extract_if(.., |line| line.mark == Mark::CutOff));
        Ok(Knock::In(Inside { _entered: entered, read, queue: self, head, lines, cut_off }))
    }

    /// Reads holders and waiters in order of arrival, without entering.
    pub(super) fn peek(&self) -> Result<Vec<QueueLine>> {
        let (_, mut lines) = self.scan(&mut Vec::new())?;
        lines.retain(|line| line.mark != Mark::CutOff);
        Ok(lines)
    }

    /// Checks, without entering, that the caller's own line, which was promised a token, holds by now. `Some` if it
    /// does, with true if other claims wait. `None` if it does not, or if that cannot be decided without entering.
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
        for (index, text) in read[FIRST..length].chunks(LINE).enumerate() {
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

    /// Writes the caller's own line, without entering.
    pub(super) fn rewrite(&self, line: QueueLine) -> Result<()> {
        self.write(FIRST + line.index * LINE, &line.text()[..OWN])
    }

    /// Blanks the caller's own line, without entering.
    pub(super) fn leave(&self, index: usize) -> Result<()> {
        self.write(FIRST + index * LINE, &padded::<LINE>("")[..OWN])
    }

    /// Reads the queue after the caller's line was blanked. A claim that arrived before that is found now, and a later
    /// one finds the line blank: no claim is left waiting for a line that is gone.
    pub(super) fn after(&self, index: usize) -> Result<Left> {
        let mut read = Vec::new();
        let (_, lines) = self.scan(&mut read)?;
        let evicted = read.get(FIRST + index * LINE..).is_some_and(was_marked);
        Ok(Left { evicted, others: !lines.is_empty() })
    }

    /// True if the caller was evicted before it blanked its line. Reads only that line.
    pub(super) fn was_evicted(&self, index: usize) -> Result<bool> {
        let mut line = [0; LINE];
        let at = FIRST + index * LINE;
        let read =
            rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut line, at as u64));
        let length = read.map_err(|errno| self.failed("read", errno))?;
        Ok(was_marked(&line[..length]))
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
    pub(super) fn is_fresh(&self, now: u64) -> bool {
        now.saturating_sub(self.checked.load(Ordering::Relaxed)) < CHECK_VALIDITY_NANOS
    }

    /// Reads the whole file; no head if it is still empty. An invalid line may be one that its owner is blanking just
    /// now, and is read again.
    fn scan(&self, read: &mut Vec<u8>) -> Result<(Option<Head>, Vec<QueueLine>)> {
        for _ in 0..REREADS {
            self.fill(read)?;
            if read.iter().all(|byte| *byte == 0) {
                return Ok((None, Vec::new()));
            }
            let head = self.head(read)?;
            if let Some(lines) = lines(&read[FIRST..], head) {
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
                if had > FIRST + MAX_LINES * LINE {
                    return Err(self.damaged("it is too long"));
                }
                read.resize(had * 2, 0);
            }
        }
        read.truncate(had);
        Ok(())
    }

    fn head(&self, read: &[u8]) -> Result<Head> {
        let Some((title, rest)) = read.split_at_checked(TITLE) else {
            return Err(self.damaged("it is cut short"));
        };
        if title != self.title {
            return Err(self.damaged("it begins with another key or format"));
        }
        let head = rest.get(..LINE).and_then(Head::parse);
        let head = head.ok_or_else(|| self.damaged("its fencing number is invalid"))?;
        if head.fence >= MAX_FENCE || head.lines > MAX_LINES {
            return Err(self.damaged("its numbers are out of range"));
        }
        Ok(head)
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let written =
            rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, bytes, at as u64));
        match written {
            Ok(all) if all == bytes.len() => Ok(()),
            Ok(_) => Err(self.failed("write", Errno::NOSPC)),
            Err(errno) => Err(self.failed("write", errno)),
        }
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

fn title(key: &Key, space: KeySpace) -> [u8; TITLE] {
    let space = match space {
        KeySpace::Lock => "lock",
        KeySpace::Semaphore => "semaphore",
    };
    padded(&format!("tenure queue 1 {space} {key}"))
}

/// Key in the title of a queue's file.
pub(super) fn key_in(path: &Path, space: KeySpace) -> Option<Key> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Permissions::empty()).ok()?;
    let mut begin = [0; TITLE];
    rustix::io::pread(&file, &mut begin, 0).ok()?;
    let text = std::str::from_utf8(&begin).ok()?.trim_end();
    let key = text.strip_prefix("tenure queue 1 ")?.split_once(' ')?.1;
    let key = Key::new(key).ok()?;
    (title(&key, space) == begin).then_some(key)
}

/// Unlocks the file on drop.
struct Entered<'a>(&'a QueueFile);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // Unlocked explicitly and not by closing: a forked copy of the process shares the open file.
        let _ = rustix::fs::flock(&self.0.file, FlockOperation::Unlock);
    }
}

/// Exclusive access to a queue: no other process adds, grants or removes lines while this lives.
pub(super) struct Inside<'a> {
    // First, so that it is dropped first: the file is unlocked before the next thread of this process may enter.
    _entered: Entered<'a>,
    /// Content of the file, as far as it was read.
    read: MutexGuard<'a, Vec<u8>>,
    queue: &'a QueueFile,
    head: Head,
    lines: Vec<QueueLine>,
    cut_off: Vec<QueueLine>,
}

impl Inside<'_> {
    /// Holders and waiters, in order of arrival.
    pub(super) fn lines(&self) -> &[QueueLine] {
        &self.lines
    }

    /// Adds a claim at the end. If it is granted, its fencing number is in the file before this returns.
    pub(super) fn add(
        &mut self,
        seat: u64,
        mode: Mode,
        granted: bool,
        now: u64,
    ) -> Result<QueueLine> {
        if self.lines.len() >= MAX_LINES {
            let message =
                format!("this key has {MAX_LINES} holders and waiters already: try again later");
            return Err(Error::new(ErrorKind::Unavailable, message).on(&self.queue.key));
        }
        let mut used: Vec<_> =
            self.lines.iter().chain(&self.cut_off).map(|line| line.index).collect();
        used.sort_unstable();
        let index = used.iter().zip(0..).find(|(used, at)| **used != *at);
        let index = index.map_or(used.len(), |(_, at)| at);
        let mut head = self.head;
        head.seq += 1;
        // Drops unused lines at the end.
        head.lines = used.last().map_or(0, |last| last + 1).max(index + 1);
        // Numbers must grow from grant to grant: a claim is promised one only if all claims before it have theirs.
        let promise = mode == Mode::Exclusive
            && self.lines.iter().all(|line| line.token != 0 || line.promised != 0);
        let number = if granted || promise { next_number(head.fence) } else { 0 };
        head.fence = head.fence.max(number);
        let (token, promised) = if granted { (number, 0) } else { (0, number) };
        let (seq, since, mark) = (head.seq, now, Mark::None);
        let line = QueueLine { index, seq, seat, mode, token, promised, since, mark };
        self.put(head, line)?;
        self.lines.push(line);
        Ok(line)
    }

    /// Grants a waiter, with the number that it was promised if there is one.
    pub(super) fn grant(&mut self, line: QueueLine, now: u64) -> Result<QueueLine> {
        if line.promised != 0 {
            let line = QueueLine { token: line.promised, since: now, ..line };
            self.write(FIRST + line.index * LINE, &line.text())?;
            self.replace(line);
            return Ok(line);
        }
        let mut head = self.head;
        head.fence = next_number(head.fence);
        let line = QueueLine { token: head.fence, since: now, ..line };
        self.put(head, line)?;
        self.replace(line);
        Ok(line)
    }

    /// Marks a line, without writing to its owner's part.
    pub(super) fn mark(&mut self, line: QueueLine, mark: Mark) -> Result<()> {
        let line = QueueLine { mark, ..line };
        self.write(FIRST + line.index * LINE + OWN, &line.text()[OWN..])?;
        self.replace(line);
        Ok(())
    }

    /// Removes the line of a dead owner.
    pub(super) fn remove(&mut self, line: QueueLine) -> Result<()> {
        self.write(FIRST + line.index * LINE, &padded::<LINE>(""))?;
        self.lines.retain(|other| other.seq != line.seq);
        self.cut_off.retain(|other| other.seq != line.seq);
        Ok(())
    }

    /// Lines that were cut off and not blanked by their owners yet.
    pub(super) fn cut_off(&self) -> &[QueueLine] {
        &self.cut_off
    }

    /// Writes head and line. The head goes first: a process killed in between has wasted a number, where the other
    /// order would issue it twice.
    fn put(&mut self, head: Head, line: QueueLine) -> Result<()> {
        let at = FIRST + line.index * LINE;
        // If the lines between head and ours are unused, no other process changes them: all is written at once.
        let used = self.lines.iter().chain(&self.cut_off).any(|other| other.index < line.index);
        if used || at + LINE > PAGE || self.read.len() < at {
            self.write(TITLE, &head.text())?;
            self.write(at, &line.text())?;
        } else {
            self.note(TITLE, &head.text());
            self.note(at, &line.text());
            self.queue.write(TITLE, &self.read[TITLE..at + LINE])?;
        }
        self.head = head;
        Ok(())
    }

    fn write(&mut self, at: usize, bytes: &[u8]) -> Result<()> {
        self.note(at, bytes);
        self.queue.write(at, bytes)
    }

    /// Updates the cached content.
    fn note(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        if self.read.len() < end {
            self.read.resize(end, b' ');
        }
        self.read[at..end].copy_from_slice(bytes);
    }

    fn replace(&mut self, line: QueueLine) {
        if let Some(old) = self.lines.iter_mut().find(|old| old.seq == line.seq) {
            *old = line;
        }
    }
}

/// Next fencing number after `last`: at least the wall clock in µs, so that numbers keep growing after the folder was
/// wiped.
fn next_number(last: u64) -> u64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let wall = u64::try_from(wall.as_micros()).unwrap_or(0).min(MAX_FENCE - 1);
    wall.max(last + 1)
}
