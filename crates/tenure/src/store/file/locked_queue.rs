//! A queue under its lock: the only way to add a line, to grant one, or to remove that of another process. Decides which
//! claims have to leave before another has its turn.

use std::time::{SystemTime, UNIX_EPOCH};

use super::format::{
    HEAD_AT, Head, LINE_BYTES, MAX_FENCE, MAX_LINES, Mark, OWNER_BYTES, QueueLine, line_at, padded,
};
use super::layout::Folder;
use super::liveness;
use super::queue_file::{QueueFile, QueueFileLock};
use crate::store::Mode;
use crate::{Error, ErrorKind, Result};

/// Page size: every single write is within one page.
const PAGE_BYTES: usize = 4096;

/// Exclusive access to a queue: no other process adds, grants or removes lines while this lives.
pub(super) struct LockedQueue<'a> {
    lock: QueueFileLock<'a>,
    file: &'a QueueFile,
    head: Head,
    lines: Vec<QueueLine>,
    cut_off: Vec<QueueLine>,
}

/// Result of an attempt to lock a queue.
pub(super) enum LockAttempt<'a> {
    Locked(LockedQueue<'a>),
    /// Another process or thread has it locked.
    Busy,
    /// The path no longer names this file.
    Stale,
}

impl<'a> LockedQueue<'a> {
    /// Tries to lock the queue, without waiting, and reads it.
    pub(super) fn try_lock(file: &'a QueueFile, now: u64) -> Result<LockAttempt<'a>> {
        let Some(mut lock) = file.try_lock()? else { return Ok(LockAttempt::Busy) };
        if !file.is_there(now) {
            return Ok(LockAttempt::Stale);
        }
        let (head, mut lines) = file.scan(&mut lock.content)?;
        if head.is_none() {
            // New, or wiped by a crash of the machine. Numbers start from the wall clock, which is past the earlier
            // ones.
            *lock.content = file.write_head(Head::default())?;
        }
        let head = head.unwrap_or_default();
        let cut_off = lines.extract_if(.., |line| line.mark == Mark::CutOff).collect();
        Ok(LockAttempt::Locked(LockedQueue { lock, file, head, lines, cut_off }))
    }
}

impl LockedQueue<'_> {
    /// Holders and waiters, in order of arrival.
    pub(super) fn lines(&self) -> &[QueueLine] {
        &self.lines
    }

    /// Owners of the claims that have to leave before a claim of this mode has its turn; empty if it has come. Only
    /// those that must be watched are returned, and dead ones are removed.
    ///
    /// `watch` is called with each owner before that owner is checked.
    pub(super) fn blockers(
        &mut self,
        folder: &Folder,
        seq: u64,
        mode: Mode,
        mut watch: impl FnMut(u64),
    ) -> Result<Vec<u64>> {
        loop {
            let lines = &self.lines;
            let ahead = &lines[..lines.partition_point(|line| line.seq < seq)];
            let last = ahead.len().saturating_sub(1);
            let candidates: Vec<QueueLine> = match mode {
                // As long as the claim directly before us is there, it is not our turn, whatever the others do.
                Mode::Exclusive => ahead[last..].to_vec(),
                Mode::Shared => {
                    let exclusive = |line: &&QueueLine| line.mode == Mode::Exclusive;
                    ahead.iter().rev().find(exclusive).copied().into_iter().collect()
                }
                Mode::Slot { limit } => {
                    let limit = usize::try_from(limit.max(1)).unwrap_or(usize::MAX);
                    match ahead.len() {
                        fewer if fewer < limit => Vec::new(),
                        full if full == limit => ahead.to_vec(),
                        // The claim directly before us waits too, and wakes us when it no longer does.
                        _ => ahead[last..].to_vec(),
                    }
                }
            };
            let before = self.lines.len();
            for line in &candidates {
                watch(line.owner);
                if !liveness::is_alive(folder, line.owner) {
                    self.remove(*line)?;
                }
            }
            if self.lines.len() == before {
                return Ok(candidates.iter().map(|line| line.owner).collect());
            }
        }
    }

    /// Adds a claim at the end. If it is granted, its fencing number is in the file before this returns.
    pub(super) fn add(
        &mut self,
        owner: u64,
        mode: Mode,
        granted: bool,
        now: u64,
    ) -> Result<QueueLine> {
        if self.lines.len() >= MAX_LINES {
            let message =
                format!("this key has {MAX_LINES} holders and waiters already: try again later");
            return Err(Error::new(ErrorKind::Unavailable, message).on(&self.file.key));
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
        let line = QueueLine { index, seq, owner, mode, token, promised, since, mark };
        self.put(head, line)?;
        self.lines.push(line);
        Ok(line)
    }

    /// Grants a waiter, with the number that it was promised if there is one.
    pub(super) fn grant(&mut self, line: QueueLine, now: u64) -> Result<QueueLine> {
        if line.promised != 0 {
            let line = QueueLine { token: line.promised, since: now, ..line };
            self.write(line_at(line.index), &line.text())?;
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
        self.write(line_at(line.index) + OWNER_BYTES, &line.text()[OWNER_BYTES..])?;
        self.replace(line);
        Ok(())
    }

    /// Removes the line of a dead owner.
    pub(super) fn remove(&mut self, line: QueueLine) -> Result<()> {
        self.write(line_at(line.index), &padded::<LINE_BYTES>(""))?;
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
        let at = line_at(line.index);
        // If the lines between head and ours are unused, no other process changes them: all is written at once.
        let used = self.lines.iter().chain(&self.cut_off).any(|other| other.index < line.index);
        if used || at + LINE_BYTES > PAGE_BYTES || self.lock.content.len() < at {
            self.write(HEAD_AT, &head.text())?;
            self.write(at, &line.text())?;
        } else {
            self.note(HEAD_AT, &head.text());
            self.note(at, &line.text());
            self.file.write(HEAD_AT, &self.lock.content[HEAD_AT..at + LINE_BYTES])?;
        }
        self.head = head;
        Ok(())
    }

    fn write(&mut self, at: usize, bytes: &[u8]) -> Result<()> {
        self.note(at, bytes);
        self.file.write(at, bytes)
    }

    /// Updates the cached content.
    fn note(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        if self.lock.content.len() < end {
            self.lock.content.resize(end, b' ');
        }
        self.lock.content[at..end].copy_from_slice(bytes);
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
