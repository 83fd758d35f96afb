//! The file of one key: the last fencing number given, and a line for each who holds or waits.
//!
//! It is its own mutex: whoever adds a line, grants one or removes that of another has `flock` on it for some
//! microseconds and never across an await. The lock is only ever tried, so that a process which was stopped within it
//! makes others report that, and not hang. To leave, nobody needs it: a line is its owner's, who blanks it in one write.
//!
//! ```text
//! tenure queue 1 lock reports/nightly                               (256 bytes, padded)
//! fence 00001747000000000002 seq 0000000000000002 lines 00000002    (128 bytes, padded)
//! 0000000000000001 8c1f… x 00000001 00001747000000000001 …          (128 bytes: seq, seat, mode, slots, token, since,
//! 0000000000000002 53aa… x 00000001 00000000000000000000 …           promised token)
//! ```
//!
//! Lines are in no order: a free one is taken again, and `seq` says who came first. The last 16 bytes of a line are not
//! its owner's: a mark there says that an operator evicts it, or has cut it off. Every write is within one page, and so a
//! process killed at any moment leaves whole lines. What a crash of the machine leaves is ended by the seats, which nobody
//! has locked then.
//!
//! Who comes to wait is *promised* its fencing number, unless one before it is still to get a larger one. From the moment
//! on at which nobody is before it, it holds with that number, without a further write.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::super::{KeySpace, Mode};
use super::folder::{FileId, failed, file_id, is_linked, names};
use super::format::{Head, LINE, Mark, OWN, QueueLine, is_blank, lines, padded, was_marked};
use crate::{Error, ErrorKind, Key, Result};

const TITLE: usize = 256;
const FIRST: usize = TITLE + LINE;
/// What is read at once: the title, the head and the first lines.
const CHUNK: usize = 1024;
/// What is written at once is within one of these.
const PAGE: usize = 4096;
/// The most who hold and wait for one key.
pub(super) const MAX_LINES: usize = 10_000;
/// Larger numbers can come from no clock: µs for 290,000 years.
const MAX_FENCE: u64 = 1 << 63;
/// How often a line is read again that its owner may be blanking.
const REREADS: usize = 10;
/// How long it is taken for granted that nobody has removed a seat or moved the folder, in ns. Who holds without its seat
/// learns of that at once anyhow, and in another folder at the next check.
pub(super) const FRESH: u64 = 50_000_000;

#[derive(Debug)]
pub(super) struct QueueFile {
    pub(super) key: Key,
    path: PathBuf,
    file: OwnedFd,
    id: FileId,
    /// When the path last named the file.
    checked: AtomicU64,
    title: [u8; TITLE],
    /// Keeps the threads of this process apart, which share the open file, and has what was read.
    read: Mutex<Vec<u8>>,
}

/// What an owner found when it left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// It had been evicted.
    pub(super) evicted: bool,
    /// There are others to wake.
    pub(super) others: bool,
}

/// The result of knocking at a queue.
pub(super) enum Knock<'a> {
    In(Inside<'a>),
    /// Another is inside.
    Busy,
    /// The file is no longer the one of its name.
    Stale,
}

impl QueueFile {
    /// Opens the file of a key, made where there is none.
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

    /// Tries to enter.
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
            // New, or wiped by a crash of the machine: the clock goes on from where its numbers were.
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

    /// Everybody in the order in which they came, without entering.
    pub(super) fn peek(&self) -> Result<Vec<QueueLine>> {
        let (_, mut lines) = self.scan(&mut Vec::new())?;
        lines.retain(|line| line.mark != Mark::CutOff);
        Ok(lines)
    }

    /// Whether a line, which must be the caller's own and one that was promised a token, holds by now; and if so, whether
    /// others wait. Without entering, and so a `None` may also be that it is hard to say.
    ///
    /// Those before it leave by a write of their own, and nobody comes before it: who is not there now is gone for good.
    pub(super) fn is_first(&self, line: QueueLine) -> Option<bool> {
        let mut read = [0; CHUNK];
        let length = rustix::io::pread(&self.file, &mut read, 0).ok()?;
        if length == CHUNK || self.head(&read[..length]).is_err() {
            return None;
        }
        let (mut ours, mut others) = (false, false);
        // Whatever the head says, which another may be writing: a line beyond it is blank.
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

    /// Writes a line, which must be the caller's own, without entering.
    pub(super) fn rewrite(&self, line: QueueLine) -> Result<()> {
        self.write(FIRST + line.index * LINE, &line.text()[..OWN])
    }

    /// Blanks a line, which must be the caller's own, without entering.
    pub(super) fn leave(&self, index: usize) -> Result<()> {
        self.write(FIRST + index * LINE, &padded::<LINE>("")[..OWN])
    }

    /// What there is after that. Whoever came before the line was blank is found now, and whoever comes later finds it
    /// blank: nobody waits for one who has left.
    pub(super) fn after(&self, index: usize) -> Result<Left> {
        let mut read = Vec::new();
        let (_, lines) = self.scan(&mut read)?;
        let evicted = read.get(FIRST + index * LINE..).is_some_and(was_marked);
        Ok(Left { evicted, others: !lines.is_empty() })
    }

    /// The same for one who need not know whether there are others.
    pub(super) fn was_evicted(&self, index: usize) -> Result<bool> {
        let mut line = [0; LINE];
        let at = FIRST + index * LINE;
        let read =
            rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut line, at as u64));
        let length = read.map_err(|errno| self.failed("read", errno))?;
        Ok(was_marked(&line[..length]))
    }

    /// Whether the path still names the open file.
    pub(super) fn is_current(&self, now: u64) -> bool {
        let current = names(&self.path, self.id);
        if current {
            self.checked.store(now, Ordering::Relaxed);
        }
        current
    }

    /// Whether that was so a moment ago.
    pub(super) fn is_fresh(&self, now: u64) -> bool {
        now.saturating_sub(self.checked.load(Ordering::Relaxed)) < FRESH
    }

    /// Reads everything; no head where there is nothing yet. A line that makes no sense may be in the midst of being
    /// blanked by its owner, and is read again.
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
        let head = head.ok_or_else(|| self.damaged("its fencing number cannot be read"))?;
        if head.fence >= MAX_FENCE || head.lines > MAX_LINES {
            return Err(self.damaged("its numbers are none that were ever written"));
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
        failed(what, &self.path, errno).on(&self.key)
    }

    fn damaged(&self, how: &str) -> Error {
        let message = format!(
            "{} is damaged ({how}): remove it once nobody holds or waits for this key",
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
    let open = || match rustix::fs::open(path, flags | UNTIMED, Permissions::empty()) {
        // Only the owner of a file may read it without a trace.
        Err(Errno::PERM) => rustix::fs::open(path, flags, Permissions::empty()),
        opened => opened,
    };
    match open() {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    match rustix::fs::open(path, flags | UNTIMED | OFlags::CREATE | OFlags::EXCL, permissions) {
        Ok(file) => {
            // What the umask took away from a shared store is given back.
            rustix::fs::fchmod(&file, permissions)?;
            Ok(file)
        }
        Err(Errno::EXIST) => open(),
        Err(errno) => Err(errno),
    }
}

/// A read that comes after a write would write the time of the read.
#[cfg(target_os = "linux")]
pub(super) const UNTIMED: OFlags = OFlags::NOATIME;
#[cfg(not(target_os = "linux"))]
pub(super) const UNTIMED: OFlags = OFlags::empty();

fn title(key: &Key, space: KeySpace) -> [u8; TITLE] {
    let space = match space {
        KeySpace::Lock => "lock",
        KeySpace::Semaphore => "semaphore",
    };
    padded(&format!("tenure queue 1 {space} {key}"))
}

/// The key that a queue's file begins with.
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

/// Unlocks the file.
struct Entered<'a>(&'a QueueFile);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // Unlocked by word and not by closing: a forked copy of the process shares the open file.
        let _ = rustix::fs::flock(&self.0.file, FlockOperation::Unlock);
    }
}

/// A queue that nobody else changes as long as this lives.
pub(super) struct Inside<'a> {
    // The file is unlocked before the next thread is let in.
    _entered: Entered<'a>,
    /// What the file has, of what was read.
    read: MutexGuard<'a, Vec<u8>>,
    queue: &'a QueueFile,
    head: Head,
    lines: Vec<QueueLine>,
    cut_off: Vec<QueueLine>,
}

impl Inside<'_> {
    /// Everybody, in the order in which they came.
    pub(super) fn lines(&self) -> &[QueueLine] {
        &self.lines
    }

    /// Enters a newcomer at the end. The fencing number of one that is granted is on disk before this returns.
    pub(super) fn add(
        &mut self,
        seat: u64,
        mode: Mode,
        granted: bool,
        now: u64,
    ) -> Result<QueueLine> {
        if self.lines.len() >= MAX_LINES {
            let message = format!("{MAX_LINES} hold or wait for this key already: try again later");
            return Err(Error::new(ErrorKind::Unavailable, message).on(&self.queue.key));
        }
        let mut used: Vec<_> =
            self.lines.iter().chain(&self.cut_off).map(|line| line.index).collect();
        used.sort_unstable();
        let index = used.iter().zip(0..).find(|(used, at)| **used != *at);
        let index = index.map_or(used.len(), |(_, at)| at);
        let mut head = self.head;
        head.seq += 1;
        // Unused lines at the end are cut off.
        head.lines = used.last().map_or(0, |last| last + 1).max(index + 1);
        // Numbers grow from grant to grant: nobody is promised one before all who are granted earlier have theirs.
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

    /// Grants one that waited: with what it was promised, if it was.
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

    /// Marks a line, without touching what is its owner's.
    pub(super) fn mark(&mut self, line: QueueLine, mark: Mark) -> Result<()> {
        let line = QueueLine { mark, ..line };
        self.write(FIRST + line.index * LINE + OWN, &line.text()[OWN..])?;
        self.replace(line);
        Ok(())
    }

    /// Takes out a line whose owner is dead.
    pub(super) fn remove(&mut self, line: QueueLine) -> Result<()> {
        self.write(FIRST + line.index * LINE, &padded::<LINE>(""))?;
        self.lines.retain(|other| other.seq != line.seq);
        self.cut_off.retain(|other| other.seq != line.seq);
        Ok(())
    }

    /// Those who were cut off and have not left their lines.
    pub(super) fn cut_off(&self) -> &[QueueLine] {
        &self.cut_off
    }

    /// The head goes first: whoever is killed in between has wasted a number and repeats none.
    fn put(&mut self, head: Head, line: QueueLine) -> Result<()> {
        let at = FIRST + line.index * LINE;
        // Lines that nobody uses are changed by nobody else: those before ours are written as they are, in one go.
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

    /// Changes what was read.
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

/// The fencing number after `last`: the time in µs, so that numbers go on growing when everything else was wiped.
fn next_number(last: u64) -> u64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let wall = u64::try_from(wall.as_micros()).unwrap_or(0).min(MAX_FENCE - 1);
    wall.max(last + 1)
}
