//! The file of one key: the last fencing number given, and a line for each who holds or waits.
//!
//! It is its own mutex: whoever changes it has `flock` on it for some microseconds and never across an await. The lock is
//! only ever tried, so that a process which was stopped within it makes others report that, and not hang.
//!
//! ```text
//! tenure queue 1 lock reports/nightly                                (256 bytes, padded)
//! fence 01747000000000000000 seq 0000000000000002 lines 00000002     (128 bytes, padded)
//! 0000000000000001 8c1f… x 00000001 01747000000000000000 … h         (128 bytes: seq, seat, mode, slots, token, since, state)
//! 0000000000000002 53aa… x 00000001 00000000000000000000 … w
//! ```
//!
//! Lines are in no order: a free one is taken again, and `seq` says who came first. Every write is within one page, and
//! so a process killed at any moment leaves whole lines. What a crash of the machine leaves is ended by the seats, which
//! nobody has locked then.

use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::super::{Mode, Space};
use super::folder::{failed, file_id, names};
use crate::{Error, ErrorKind, Key, Result};

const TITLE: usize = 256;
const LINE: usize = 128;
const FIRST: usize = TITLE + LINE;
/// What is read at once: the title, the head and the first lines.
const CHUNK: usize = 4096;
/// The most who hold and wait for one key.
pub(super) const MAX_LINES: usize = 10_000;
/// Larger numbers can come from no clock: µs for 290,000 years.
const MAX_FENCE: u64 = 1 << 63;
/// Unused lines at the end are cut off from this many on.
const TRIM: usize = 16;

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) key: Key,
    path: PathBuf,
    file: OwnedFd,
    id: (u64, u64),
    title: [u8; TITLE],
    /// Keeps the threads of this process apart, which share the open file, and has what was read.
    read: Mutex<Vec<u8>>,
}

/// One who holds or waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line {
    index: usize,
    /// Who came first.
    pub(super) seq: u64,
    pub(super) seat: u64,
    pub(super) mode: Mode,
    /// Zero while it waits.
    pub(super) token: u64,
    /// Since when it holds or waits, on the machine's own clock.
    pub(super) since: u64,
    /// It is to let go.
    pub(super) evicted: bool,
}

/// The result of knocking at a queue.
pub(super) enum Knock<'a> {
    In(Inside<'a>),
    /// Another is inside.
    Busy,
    /// The file is no longer the one of its name.
    Stale,
}

impl Queue {
    /// Opens the file of a key, made where there is none.
    pub(super) fn open(
        key: &Key,
        space: Space,
        path: PathBuf,
        permissions: Permissions,
    ) -> std::result::Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = open_or_make(&path, flags, permissions)?;
        let id = file_id(&rustix::fs::fstat(&file)?);
        let title = title(key, space);
        let (key, read) = (key.clone(), Mutex::default());
        Ok(Self { key, path, file, id, title, read })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Tries to enter.
    pub(super) fn knock(&self) -> Result<Knock<'_>> {
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
        if !self.is_current() {
            return Ok(Knock::Stale);
        }
        self.fill(&mut read)?;
        if read.iter().all(|byte| *byte == 0) {
            // New, or wiped by a crash of the machine: the clock goes on from where its numbers were.
            let mut fresh = self.title.to_vec();
            fresh.extend_from_slice(&Head::default().text());
            self.write(0, &fresh)?;
            *read = fresh;
        }
        let (head, lines) = self.parse(&read)?;
        Ok(Knock::In(Inside { _entered: entered, _read: read, queue: self, head, lines }))
    }

    /// The lines, without entering. Another may be writing: what seems wrong is to be looked at again from inside.
    pub(super) fn peek(&self) -> Result<Vec<Line>> {
        let mut read = Vec::new();
        self.fill(&mut read)?;
        Ok(self.parse(&read)?.1)
    }

    /// Whether the path still names the open file.
    pub(super) fn is_current(&self) -> bool {
        names(&self.path, self.id)
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

    fn parse(&self, read: &[u8]) -> Result<(Head, Vec<Line>)> {
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
        let mut lines = Vec::new();
        for (index, text) in rest[LINE..].chunks(LINE).take(head.lines).enumerate() {
            if text.iter().all(|byte| matches!(byte, b' ' | b'\n' | 0)) {
                continue;
            }
            let line = Line::parse(index, text);
            lines.push(line.ok_or_else(|| self.damaged("a line of it cannot be read"))?);
        }
        lines.sort_unstable_by_key(|line| line.seq);
        Ok((head, lines))
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
        Error::new(ErrorKind::Invalid, message).on(&self.key)
    }
}

fn open_or_make(
    path: &Path,
    flags: OFlags,
    permissions: Permissions,
) -> std::result::Result<OwnedFd, Errno> {
    match rustix::fs::open(path, flags, Permissions::empty()) {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    match rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, permissions) {
        Ok(file) => {
            // What the umask took away from a shared store is given back.
            rustix::fs::fchmod(&file, permissions)?;
            Ok(file)
        }
        Err(Errno::EXIST) => rustix::fs::open(path, flags, Permissions::empty()),
        Err(errno) => Err(errno),
    }
}

fn title(key: &Key, space: Space) -> [u8; TITLE] {
    let space = match space {
        Space::Lock => "lock",
        Space::Semaphore => "semaphore",
    };
    padded(&format!("tenure queue 1 {space} {key}"))
}

/// The key that a queue's file begins with.
pub(super) fn key_in(path: &Path, space: Space) -> Option<Key> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Permissions::empty()).ok()?;
    let mut begin = [0; TITLE];
    rustix::io::pread(&file, &mut begin, 0).ok()?;
    let text = std::str::from_utf8(&begin).ok()?.trim_end();
    let key = text.strip_prefix("tenure queue 1 ")?.split_once(' ')?.1;
    let key = Key::new(key).ok()?;
    (title(&key, space) == begin).then_some(key)
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [b' '; N];
    bytes[N - 1] = b'\n';
    let length = text.len().min(N - 1);
    bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
    bytes
}

#[derive(Clone, Copy, Debug, Default)]
struct Head {
    /// The last number that was given.
    fence: u64,
    seq: u64,
    /// How many lines there are, used or not.
    lines: usize,
}

impl Head {
    fn text(self) -> [u8; LINE] {
        let Self { fence, seq, lines } = self;
        padded(&format!("fence {fence:020} seq {seq:016x} lines {lines:08x}"))
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
        let mut after = |name: &str| words.next().filter(|word| *word == name).and(words.next());
        let fence = after("fence")?.parse().ok()?;
        let seq = u64::from_str_radix(after("seq")?, 16).ok()?;
        let lines = usize::from_str_radix(after("lines")?, 16).ok()?;
        Some(Self { fence, seq, lines })
    }
}

impl Line {
    fn text(self) -> [u8; LINE] {
        let Self { seq, seat, mode, token, since, evicted, .. } = self;
        let (mode, limit) = match mode {
            Mode::Exclusive => ('x', 1),
            Mode::Shared => ('s', 0),
            Mode::Slot { limit } => ('n', limit),
        };
        let state = match (evicted, token) {
            (true, _) => 'e',
            (false, 0) => 'w',
            (false, _) => 'h',
        };
        let mut text = String::with_capacity(LINE);
        let written = write!(
            text,
            "{seq:016x} {seat:016x} {mode} {limit:08x} {token:020} {since:016x} {state}"
        );
        debug_assert!(written.is_ok(), "writing to a string cannot fail");
        padded(&text)
    }

    fn parse(index: usize, text: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
        let mut word = || words.next();
        let hex = |word: &str| u64::from_str_radix(word, 16).ok();
        let (seq, seat) = (hex(word()?)?, hex(word()?)?);
        let (mode, limit) = (word()?, u32::from_str_radix(word()?, 16).ok()?);
        let mode = match mode {
            "x" => Mode::Exclusive,
            "s" => Mode::Shared,
            "n" => Mode::Slot { limit },
            _ => return None,
        };
        let (token, since) = (word()?.parse().ok()?, hex(word()?)?);
        let evicted = match word()? {
            "e" => true,
            "h" | "w" => false,
            _ => return None,
        };
        Some(Self { index, seq, seat, mode, token, since, evicted })
    }
}

/// Unlocks the file.
struct Entered<'a>(&'a Queue);

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
    _read: MutexGuard<'a, Vec<u8>>,
    queue: &'a Queue,
    head: Head,
    lines: Vec<Line>,
}

impl Inside<'_> {
    /// Everybody, in the order in which they came.
    pub(super) fn lines(&self) -> &[Line] {
        &self.lines
    }

    pub(super) fn find(&self, seq: u64) -> Option<Line> {
        self.lines.iter().find(|line| line.seq == seq).copied()
    }

    /// Enters a newcomer at the end. The fencing number of one that is granted is on disk before this returns.
    pub(super) fn add(&mut self, seat: u64, mode: Mode, granted: bool, now: u64) -> Result<Line> {
        if self.lines.len() >= MAX_LINES {
            let message = format!("{MAX_LINES} hold or wait for this key already: try again later");
            return Err(Error::new(ErrorKind::Unavailable, message).on(&self.queue.key));
        }
        let mut used: Vec<_> = self.lines.iter().map(|line| line.index).collect();
        used.sort_unstable();
        let index = used.iter().zip(0..).find(|(used, at)| **used != *at);
        let index = index.map_or(used.len(), |(_, at)| at);
        let mut head = self.head;
        head.seq += 1;
        head.lines = head.lines.max(index + 1);
        let token = if granted { next_number(head.fence) } else { 0 };
        head.fence = head.fence.max(token);
        let line = Line { index, seq: head.seq, seat, mode, token, since: now, evicted: false };
        self.put(head, line)?;
        self.lines.push(line);
        Ok(line)
    }

    /// Grants one that waited.
    pub(super) fn grant(&mut self, line: Line, now: u64) -> Result<Line> {
        let mut head = self.head;
        head.fence = next_number(head.fence);
        let line = Line { token: head.fence, since: now, ..line };
        self.put(head, line)?;
        self.replace(line);
        Ok(line)
    }

    pub(super) fn evict(&mut self, line: Line) -> Result<()> {
        let line = Line { evicted: true, ..line };
        self.queue.write(FIRST + line.index * LINE, &line.text())?;
        self.replace(line);
        Ok(())
    }

    pub(super) fn remove(&mut self, seq: u64) -> Result<()> {
        let Some(line) = self.find(seq) else { return Ok(()) };
        self.queue.write(FIRST + line.index * LINE, &padded::<LINE>(""))?;
        self.lines.retain(|line| line.seq != seq);
        let used = self.lines.iter().map(|line| line.index + 1).max().unwrap_or(0);
        if self.head.lines > used + TRIM {
            let head = Head { lines: used, ..self.head };
            self.queue.write(TITLE, &head.text())?;
            self.head = head;
        }
        Ok(())
    }

    /// The head goes first: whoever is killed in between has wasted a number and repeats none.
    fn put(&mut self, head: Head, line: Line) -> Result<()> {
        if line.index == 0 {
            let mut both = [0; 2 * LINE];
            both[..LINE].copy_from_slice(&head.text());
            both[LINE..].copy_from_slice(&line.text());
            self.queue.write(TITLE, &both)?;
        } else {
            self.queue.write(TITLE, &head.text())?;
            self.queue.write(FIRST + line.index * LINE, &line.text())?;
        }
        self.head = head;
        Ok(())
    }

    fn replace(&mut self, line: Line) {
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
