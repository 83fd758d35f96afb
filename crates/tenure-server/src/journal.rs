//! The data directory: what lets the server forget nothing when it is killed, and promise nothing it cannot keep when
//! the machine is.
//!
//! Synchronous, and without any knowledge of sockets. The server tells the [`Journal`] what its table did in a turn,
//! then [`commit`](Journal::commit)s, and only then answers:
//!
//! ```
//! use std::time::Duration;
//! use tenure_core::table::Mode;
//! use tenure_core::{LockToken, Time};
//! use tenure_server::journal::{Journal, Options, Story};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let temporary = tempfile::tempdir()?;
//! let mut options = Options::new(temporary.path().join("data"));
//! # options.segment_bytes = 1 << 16;
//! let boot = "7ecacd41-249d-4cc1-bbe7-8c7b6ce1fd74"; // in earnest: /proc/sys/kernel/random/boot_id
//! let (now, lease) = (Time::from_nanos(5_000_000_000), Duration::from_secs(30));
//!
//! let opened = Journal::open(&options, boot, now, 1_700_000_000_000_000)?;
//! assert_eq!(opened.story, Story::Fresh);
//! let mut journal = opened.journal;
//! let token = LockToken::new(opened.next_number, 0xfeed);
//! journal.granted(b"printer", Mode::Exclusive, token, lease, now + lease, b"");
//! journal.commit()?; // now the answer may go out
//! drop(journal); // killed
//!
//! let opened = Journal::open(&options, boot, now, 1_700_000_000_000_000)?;
//! assert_eq!(opened.story, Story::Killed);
//! assert_eq!((opened.holds[0].token, opened.holds[0].ends), (token, now + lease));
//! assert!(opened.next_number > token.number());
//! # Ok(())
//! # }
//! ```
//!
//! # What is promised
//!
//! - **Killed process** (the boot is the same): the holds are exactly those of the last commit that returned, or of one
//!   that was under way and that nobody has heard of. What was written is in the kernel's memory, which outlives the
//!   process, so nothing is synced for this.
//! - **Crashed machine** (another boot, a clock behind the journal, or a disk that did not take what the kernel had,
//!   which a sync at the start finds out): no hold is restored, and nothing may be granted
//!   for as long as the longest lease could still run. The end of the journal was in memory only. A hold that the
//!   journal does show may have been released, broken or left and granted to another just before the crash, and that
//!   grant may be among what was lost: if the older token could renew, there would be two holders. So no token is good
//!   any more, and whoever still believes in a lease is waited out.
//! - **Torn end** (same boot): a write was cut short by the kill. Its answers never went out, so the holds before it are
//!   exact and are restored; nothing may be granted for the longest lease all the same, as if the machine had crashed.
//! - **Clean stop**: the holds are restored, over a restart of the machine too. Their remaining time then begins at the
//!   start of the server, because nobody knows how long the machine was off.
//! - **The fencing number grows** in all of these, and the quiet time is kept over further kills and crashes.
//!
//! Two facts are made durable before anything relies on them, both seldom: the *ceiling*, below which fencing numbers
//! are handed out in blocks of 2²¹, and the *bound*, a span that no running lease exceeds. It is rounded up to a power
//! of two seconds, so that a client can cause some seventeen syncs by asking for ever longer leases, and no more.
//!
//! Not promised: a whole directory put back from a backup, or a virtual machine set back to an earlier state, is not
//! noticed. The wall clock, from which fencing numbers start where it is ahead, is then all that keeps them growing. Every
//! start after a kill or a crash skips what is left of a block, 2.1 s of the wall clock, and so gets ahead of it by that
//! much at most. A directory that is put back before the wall clock has caught up repeats numbers.
//!
//! # The files
//!
//! | file | what it holds | missing | cut short, changed, foreign |
//! |---|---|---|---|
//! | `facts.a`, `facts.b` | the same twice: version, instance, boot, clean or not, ceiling, bound, quiet time | one: the other stands for it, and it is written again; both beside other files of ours: refused | one: as missing, and it is kept in `quarantine`; both, or of two servers: refused; of another version: refused |
//! | `snapshot-N` | every hold when `journal-N` began | refused; after a machine crash it is not needed | refused; after a machine crash not read, kept in `quarantine` |
//! | `journal-N` | what happened since, turn by turn | refused; after a machine crash or a clean stop it is not needed | refused, but for a torn end of the last one; after a machine crash not read, kept in `quarantine` |
//! | `*.tmp` | a file that is not finished | - | removed |
//! | `pid` | who has the directory, for people | - | never read but for a message |
//! | `quarantine/` | what the last accident made worthless | - | never read |
//!
//! An empty or missing directory is a fresh start, and [`Story::Fresh`] says so. One with other files and none of ours is
//! refused, as is one that another process has open: the lock is on the directory itself, where nobody can delete it.
//!
//! The way out of a refusal is [`Options::accept_loss`]: it treats the directory like that of a crashed machine. Where
//! both copies of the facts are lost, [`Options::max_lease`] is waited out, and the fencing numbers go on after the
//! largest one of the wall clock, of [`Options::fence_floor`], and of what can still be read plus 2²⁴.
//!
//! ## Format
//!
//! Little-endian. Every file begins with eight bytes of magic, its version, and that inverted. Segments and snapshots
//! have a header of 128 bytes: `magic:8 version:4 !version:4 instance:16 sequence:8 size:8 boot:64 zero:12 crc32:4`. The
//! size is that of the whole file: a segment is allocated in full and filled with zeros, so that a full disk is met
//! early, and that a cut is seen wherever it is. Frames follow, one a turn (or more, where it is over 1 MiB):
//!
//! ```text
//! length:4 as-of:8 crc32-of-records:4 crc32-of-sequence-offset-and-the-preceding:4 records:length mark:1 (0xa5)
//!
//! granted  kind:1 (1 exclusive, 2 shared, 3 slot) key-length:4 note-length:4 limit:4 number:8 secret:8 ends:8 key note
//! renewed  kind:1 (4) number:8 ends:8
//! ended    kind:1 (5) number:8
//! sealed   kind:1 (6) next-sequence:8
//! ```
//!
//! A frame was *torn* if its mark is not there and nothing but zeros follows. If its mark is there and a checksum is
//! wrong, or something follows, it was *changed*: no single flipped bit can pass for a torn end.
//!
//! ## Rotation
//!
//! A full segment is sealed with the number of the next, which was made when the first was half full. A thread merges
//! the old snapshot and the sealed segments into a new snapshot, reading files only: the table is never walked, the
//! server never waits, and there is no half of a snapshot in the server's hands when it stops. The new snapshot gets its
//! name when it is whole, and only then are the files it stands for removed.

mod batch;
mod disk;
mod error;
mod facts;
mod format;
mod merge;
mod open;
mod read;
mod segment;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};

use self::batch::RecordBatch;
use self::disk::Disk;
use self::facts::Facts;
use self::format::{FileKind, HEADER_LEN, Record, SEAL_LEN};
use self::read::{Chain, FileOwner, file_name};
use self::segment::Segment;

pub use self::error::JournalError;
pub use self::open::{CrashCause, LastRun, OpenedJournal, RestoredHold};

/// Where the data is, and how it is treated.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// The directory. It is made where it is missing; its parent must be there.
    pub dir: PathBuf,
    /// The longest lease that the server grants.
    pub max_lease: Duration,
    /// How long a segment is.
    pub segment_bytes: u64,
    /// Get past missing and damaged files: every hold is forgotten, the longest lease is waited out, the fencing numbers
    /// go on.
    pub accept_loss: bool,
    /// Fencing numbers begin above this one at least.
    pub fence_floor: u64,
}

impl JournalOptions {
    /// A day for the longest lease, segments of 64 MiB, no loss accepted.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            max_lease: Duration::from_secs(24 * 60 * 60),
            segment_bytes: 64 << 20,
            accept_loss: false,
            fence_floor: 0,
        }
    }
}

/// The journal of a server, open for writing. The [module](self) tells how it is used.
#[derive(Debug)]
pub struct Journal {
    disk: Arc<Disk>,
    max_lease: Duration,
    segment_bytes: u64,
    facts: Facts,
    /// No larger fencing number was written.
    highest: u64,
    batch: RecordBatch,
    segment: Segment,
    /// The next segment, made ahead so that a full disk is met while there is room.
    next: Option<Segment>,
    /// The sequence of the snapshot, and how long it is.
    base: (u64, u64),
    /// How long the sealed segments are, from that of `base` on.
    sealed: Vec<u64>,
    merging: Option<Merging>,
    background_error: Option<JournalError>,
    stopped: bool,
}

#[derive(Debug)]
struct Merging {
    /// How many of the sealed segments go into it.
    segments: usize,
    thread: JoinHandle<Result<u64, JournalError>>,
}

/// How many fencing numbers are reserved at once: 2.1 s of the wall clock, from which they start, and 21 s of 100,000
/// grants per second.
///
/// A start skips what is left of the last block. So numbers run ahead of the wall clock by up to a block per start, and a
/// directory that is put back meanwhile would give the same ones out again: a block must be short. It must not be much
/// shorter either, because a server under load syncs three times per block.
const FENCE_BLOCK_SIZE: u64 = 1 << 21;

impl Journal {
    /// Opens the directory and says what it held. `boot` names the run of the machine that `now` is counted in.
    ///
    /// When this returns, the ceiling, the bound and the quiet time are durable.
    ///
    /// # Errors
    ///
    /// [`JournalError`] as the table of the [module](self) says; nothing was changed then but by
    /// [`JournalError::Io`], after which it can be tried again.
    pub fn open(
        options: &JournalOptions,
        boot: &str,
        now: Time,
        wall_micros: u64,
    ) -> Result<OpenedJournal, JournalError> {
        open::open(Disk::open(&options.dir)?, options, boot, now, wall_micros)
    }

    /// A hold began. The number of its token must not be below [`Opened::next_number`], and each must be larger than the
    /// one before. The `note` comes back with the hold.
    #[inline]
    pub fn granted(
        &mut self,
        key: &[u8],
        mode: Mode,
        token: LockToken,
        lease: Duration,
        ends: Time,
        note: &[u8],
    ) {
        debug_assert!(token.number() > self.highest, "fencing numbers grow");
        self.batch.note_lease(lease, ends.as_nanos());
        self.batch.highest = self.batch.highest.max(token.number());
        self.batch.push(&Record::Granted { key, mode, token, ends, note });
    }

    /// A hold goes on: the number, which no other hold has or had, tells which.
    #[inline]
    pub fn renewed(&mut self, number: u64, lease: Duration, ends: Time) {
        self.batch.note_lease(lease, ends.as_nanos());
        self.batch.push(&Record::Renewed { number, ends });
    }

    /// A hold is over: released, expired, broken, or left behind.
    #[inline]
    pub fn ended(&mut self, number: u64) {
        self.batch.push(&Record::Ended { number });
    }

    /// Writes down what happened since the last commit, in one call; nothing happened, nothing is written. After it the
    /// answers may go out.
    ///
    /// # Errors
    ///
    /// [`JournalError`]: what is under way must not be answered. The server is to stop; every later commit fails.
    #[inline]
    pub fn commit(&mut self) -> Result<(), JournalError> {
        if self.batch.is_empty() && !self.stopped {
            return Ok(());
        }
        self.stop_on_error(Self::write_batch)
    }

    /// Lets the bound shrink: no hold that runs now ends later than `last_end`. To be called now and then, since a
    /// bound that is too large only makes the wait after a crash longer. Syncs where the bound at least halves.
    ///
    /// # Errors
    ///
    /// As for [`commit`](Self::commit).
    pub fn shrink_bound(&mut self, last_end: Time, now: Time) -> Result<(), JournalError> {
        let last = last_end.max(Time::from_nanos(self.facts.embargo_until));
        let bound = round_up_bound(last.since(now).max(self.batch.longest), self.max_lease);
        if bound > self.facts.bound / 2 {
            return Ok(());
        }
        self.stop_on_error(|journal| {
            journal.facts.bound = bound;
            journal.facts.store(&journal.disk)
        })
    }

    /// What has gone wrong beside the commits, once: a snapshot or the next segment could not be made. It is tried
    /// again; until it succeeds the directory grows, or the next full segment stops the server.
    pub fn take_background_error(&mut self) -> Option<JournalError> {
        self.background_error.take()
    }

    /// The clean stop: leaves one durable snapshot, and the limits as low as they can be.
    ///
    /// # Errors
    ///
    /// [`JournalError`]: the directory is then as a killed server leaves it.
    pub fn close(mut self, now: Time) -> Result<(), JournalError> {
        self.commit()?;
        self.wait_for_snapshot();
        self.stop_on_error(|journal| journal.write_final_snapshot(now))
    }

    /// Waits for the thread that makes snapshots, where one runs.
    pub fn wait_for_snapshot(&mut self) {
        let Some(Merging { segments, thread }) = self.merging.take() else { return };
        match thread.join() {
            Ok(Ok(length)) => {
                self.base = (self.base.0 + segments as u64, length);
                self.sealed.drain(..segments);
            }
            Ok(Err(error)) => self.background_error = Some(error),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// After a failure nothing may go on: what a half-done write left is for the next start to judge.
    fn stop_on_error(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(), JournalError>,
    ) -> Result<(), JournalError> {
        if self.stopped {
            return Err(JournalError::Stopped);
        }
        let outcome = work(self);
        self.stopped = outcome.is_err();
        outcome
    }

    fn write_batch(&mut self) -> Result<(), JournalError> {
        if self.batch.highest > self.facts.ceiling || self.batch.longest > self.facts.bound {
            self.raise_limits()?;
        }
        let length = self.batch.len();
        if !self.segment.has_room(length) {
            self.rotate(self.segment_bytes.max((HEADER_LEN + length + SEAL_LEN) as u64))?;
        }
        self.segment.write(&self.disk, &mut self.batch)?;
        self.highest = self.highest.max(self.batch.highest);
        self.batch.clear();
        if self.next.is_none() && self.segment.is_half_full() {
            match self.create(self.segment_bytes) {
                Ok(next) => self.next = Some(next),
                Err(error) => self.background_error = Some(error),
            }
        }
        Ok(())
    }

    /// Makes durable what the turn needs before it may be written, let alone answered.
    #[cold]
    fn raise_limits(&mut self) -> Result<(), JournalError> {
        if self.batch.highest > self.facts.ceiling {
            self.facts.ceiling = self.batch.highest.saturating_add(FENCE_BLOCK_SIZE);
        }
        self.facts.bound = self.facts.bound.max(round_up_bound(self.batch.longest, self.max_lease));
        self.facts.store(&self.disk)
    }

    /// The segment after this one.
    fn create(&self, size: u64) -> Result<Segment, JournalError> {
        Segment::create(&self.disk, self.file_owner(), self.segment.sequence + 1, size)
    }

    #[cold]
    fn rotate(&mut self, size: u64) -> Result<(), JournalError> {
        let next = match self.next.take() {
            Some(next) if next.size >= size => next,
            _ => self.create(size)?,
        };
        self.segment.seal(&self.disk)?;
        self.sealed.push(self.segment.size);
        self.segment = next;
        if self.merging.as_ref().is_some_and(|merging| merging.thread.is_finished()) {
            self.wait_for_snapshot();
        }
        if self.merging.is_none() && self.sealed.iter().sum::<u64>() / 2 >= self.base.1 {
            self.merge();
        }
        Ok(())
    }

    /// Lets a thread make the next snapshot. A history twice as long as the snapshot pays for writing it anew.
    fn merge(&mut self) {
        let chain = self.chain();
        let segments = chain.segments.len();
        let disk = Arc::clone(&self.disk);
        let thread = std::thread::Builder::new().name("tenure-snapshot".into());
        match thread.spawn(move || merge::merge(&disk, &chain)) {
            Ok(thread) => self.merging = Some(Merging { segments, thread }),
            Err(error) => {
                let path = self.disk.path(&file_name(FileKind::Snapshot, self.segment.sequence));
                self.background_error =
                    Some(JournalError::io("start a thread to write", &path)(error));
            }
        }
    }

    /// Everything before the present segment.
    fn chain(&self) -> Chain {
        let base = self.base.0;
        let segments = (base..self.segment.sequence).collect();
        Chain { owner: self.file_owner(), base, segments }
    }

    fn file_owner(&self) -> FileOwner {
        FileOwner { instance: self.facts.instance, boot: self.facts.boot }
    }

    fn write_final_snapshot(&mut self, now: Time) -> Result<(), JournalError> {
        self.next = None;
        self.sealed.push(self.segment.size);
        let last = self.create((HEADER_LEN + SEAL_LEN) as u64)?;
        self.segment.seal(&self.disk)?;
        self.segment = last;
        let (chain, start) = (self.chain(), self.segment.sequence);
        let mut snapshot = merge::Snapshot::begin(&self.disk, self.file_owner(), start)?;
        let mut last_end = Time::from_nanos(self.facts.embargo_until);
        merge::replay_holds(&self.disk, &chain, true, |hold| match hold {
            Record::Granted { ends, .. } if ends > now => {
                last_end = last_end.max(ends);
                snapshot.add(&hold)
            }
            _ => Ok(()),
        })?;
        snapshot.finish(true)?;
        self.facts.clean = true;
        self.facts.start = start;
        self.facts.ceiling = self.highest;
        self.facts.bound = last_end.since(now);
        self.facts.as_of = now.as_nanos();
        self.facts.store(&self.disk)?;
        self.disk.remove(&file_name(FileKind::Segment, start))?;
        open::remove_before(&self.disk, start)
    }
}

/// A bound for leases of this length: the next power of two seconds, or the longest lease there is.
fn round_up_bound(span: Duration, max_lease: Duration) -> Duration {
    let seconds = span.as_secs() + u64::from(span.subsec_nanos() > 0);
    let power = if seconds == 0 { Some(0) } else { seconds.checked_next_power_of_two() };
    Duration::from_secs(power.unwrap_or(u64::MAX)).min(max_lease).max(span)
}

impl Drop for Journal {
    /// The directory stays locked until nothing is at work in it.
    fn drop(&mut self) {
        if let Some(Merging { thread, .. }) = self.merging.take() {
            let _ = thread.join();
        }
    }
}
