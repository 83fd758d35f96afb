//! The data directory: restores all holds after a killed process, and prevents double grants after a machine crash.
//!
//! The journal is synchronous and knows no sockets. In each turn, an iteration of its event loop, the server reports
//! the changes of its table to the [`Journal`], then calls [`commit`](Journal::commit), and only then sends replies:
//!
//! ```
//! use std::time::Duration;
//! use tenure_core::table::Mode;
//! use tenure_core::{LockToken, Time};
//! use tenure_server::journal::{Journal, JournalOptions, LastRun};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let temporary = tempfile::tempdir()?;
//! let mut options = JournalOptions::new(temporary.path().join("data"));
//! # options.segment_bytes = 1 << 16;
//! let boot = "7ecacd41-249d-4cc1-bbe7-8c7b6ce1fd74"; // in production: /proc/sys/kernel/random/boot_id
//! let (now, lease) = (Time::from_nanos(5_000_000_000), Duration::from_secs(30));
//!
//! let opened = Journal::open(&options, boot, now, 1_700_000_000_000_000)?;
//! assert_eq!(opened.last_run, LastRun::Fresh);
//! let mut journal = opened.journal;
//! let token = LockToken::new(opened.next_number, 0xfeed);
//! journal.granted(b"printer", Mode::Exclusive, token, lease, now + lease, b"");
//! journal.commit()?; // now the reply may be sent
//! drop(journal); // the process is killed
//!
//! let opened = Journal::open(&options, boot, now, 1_700_000_000_000_000)?;
//! assert_eq!(opened.last_run, LastRun::Killed);
//! assert_eq!((opened.holds[0].token, opened.holds[0].ends), (token, now + lease));
//! assert!(opened.next_number > token.number());
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! - **Killed process** (same boot): the restored holds are exactly those of the last commit that returned, or of a
//!   commit in progress, whose replies were never sent. Written data is in the kernel's page cache, which survives the
//!   process, so a commit does not sync.
//! - **Crashed machine** (another boot; or a clock behind the journal; or a disk that failed to store the page cache,
//!   which a sync at the start detects): no hold is restored, and nothing is granted for as long as the longest lease
//!   could still run. The end of the journal may be lost with the page cache. A hold that the journal does show may
//!   have been released or broken and granted to another client just before the crash, and that grant may be lost. If
//!   the older token could still renew, there would be two holders. So every token becomes invalid, and the server
//!   waits until no client can believe in its lease. This wait is the *embargo*.
//! - **Torn end** (same boot): a write was cut short by the kill. Its replies were never sent, so the holds before it
//!   are exact and are restored. The embargo applies nevertheless, as after a machine crash.
//! - **Clean stop**: the holds are restored, even after a reboot. Their remaining time then starts with the server,
//!   because the time that the machine was off is unknown.
//! - **Fencing numbers grow** in all of these cases, and an embargo survives further kills and crashes.
//!
//! Two limits are made durable before anything relies on them; both change seldom. The *ceiling*: no larger fencing
//! number was issued. It is raised in blocks of 2²¹. The *bound*: no running lease lasts longer. It is rounded up to a
//! power of two seconds, so a client that requests ever longer leases causes about seventeen syncs at most.
//!
//! Not guaranteed: a directory restored from a backup, or a virtual machine reset to an earlier state, is not detected.
//! Only the wall clock then keeps fencing numbers growing: they start at the wall clock if it is ahead. Every start
//! after a kill or a crash skips the rest of a block, which is 2.1 s of the wall clock at most, and gets ahead of the
//! wall clock by that much. A directory that is restored before the wall clock has caught up repeats numbers.
//!
//! # The files
//!
//! | file | content | missing | cut short, changed, foreign |
//! |---|---|---|---|
//! | `facts.a`, `facts.b` | two copies: version, instance, boot, clean or not, ceiling, bound, embargo | one: the other copy is used, and the missing one is written again; both, beside other files of a server: refused | one: as missing, and kept in `quarantine`; both, or of two servers: refused; of another version: refused |
//! | `snapshot-N` | every hold at the start of `journal-N` | refused; after a machine crash it is not needed | refused; after a machine crash not read, kept in `quarantine` |
//! | `journal-N` | the changes since, turn by turn | refused; after a machine crash or a clean stop it is not needed | refused, except for a torn end of the last one; after a machine crash not read, kept in `quarantine` |
//! | `*.tmp` | an unfinished file | - | removed |
//! | `pid` | process that uses the directory, for operators | - | read for an error message only |
//! | `quarantine/` | files that the last crash made untrustworthy | - | never read |
//!
//! The journal reads and writes them through a [`Storage`], which a simulator can replace: [`Journal::open_on`].
//!
//! An empty or missing directory is a fresh start: [`LastRun::Fresh`]. A directory with files of other programs only is
//! refused. So is a directory that another process has open: the lock is on the directory itself, because a lock file
//! could be deleted.
//!
//! [`JournalOptions::accept_loss`] gets past a refusal: it treats the directory as after a machine crash. If both
//! copies of the facts are lost, the embargo lasts [`JournalOptions::max_lease`], and fencing numbers continue 2²⁴
//! above the largest of the wall clock, [`JournalOptions::fence_floor`] and the numbers that can still be read.
//!
//! ## Format
//!
//! Little-endian. Every file begins with eight bytes of magic, its version, and the version inverted. Segments and
//! snapshots have a header of 128 bytes:
//! `magic:8 version:4 !version:4 instance:16 sequence:8 size:8 boot:64 zero:12 crc32:4`. The size is that of the whole
//! file: a segment is allocated in full and filled with zeros, so that a full disk is noticed early, and a truncation
//! is detected wherever it is. Frames follow, one per turn (or more, if a turn exceeds 1 MiB):
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
//! A frame is *torn* if it has no mark and only zeros follow. A frame with a mark and a wrong checksum, or without a
//! mark and with data after it, is *damaged*: no single flipped bit makes a frame look torn.
//!
//! ## Rotation
//!
//! A full segment is sealed with the sequence of the next segment, which was created when the first was half full. A
//! thread merges the old snapshot and the sealed segments into a new snapshot. It reads files only: the table is never
//! walked, and the server does not wait. The new snapshot gets its final name when it is complete, and only then are
//! the files that it replaces removed.

mod batch;
mod directory;
mod disk;
mod error;
mod facts;
mod format;
mod merge;
mod open;
mod read;
mod segment;
pub mod storage;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};

use self::batch::RecordBatch;
use self::directory::DataDirectory;
use self::disk::Disk;
use self::facts::Facts;
use self::format::{FileKind, HEADER_LEN, Record, SEAL_LEN};
use self::read::{Chain, FileOwner, file_name};
use self::segment::Segment;
use self::storage::{MergeTask, Storage};

pub use self::error::JournalError;
pub use self::open::{CrashCause, LastRun, OpenedJournal, RestoredHold};

/// Location and treatment of a data directory.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// The directory. It is created if it is missing; its parent must exist.
    pub dir: PathBuf,
    /// Longest lease that the server grants.
    pub max_lease: Duration,
    /// Size of a segment.
    pub segment_bytes: u64,
    /// Opens a directory in spite of missing and damaged files: all holds are lost, nothing is granted until the
    /// longest lease has passed, and fencing numbers continue to grow.
    pub accept_loss: bool,
    /// Fencing numbers start above this number.
    pub fence_floor: u64,
}

impl JournalOptions {
    /// Options with a longest lease of one day, segments of 64 MiB, and no loss accepted.
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

/// The journal of a server, open for writing. The [module](self) documents its use and its guarantees.
#[derive(Debug)]
pub struct Journal {
    disk: Disk,
    max_lease: Duration,
    segment_bytes: u64,
    facts: Facts,
    /// Largest fencing number written.
    highest: u64,
    /// Records of the present turn.
    batch: RecordBatch,
    segment: Segment,
    /// The next segment, created ahead so that a full disk is noticed while the present segment has room.
    next: Option<Segment>,
    /// Sequence and size of the latest snapshot.
    base: (u64, u64),
    /// Sizes of the sealed segments that the snapshot does not cover.
    sealed: Vec<u64>,
    merging: Option<Merging>,
    background_error: Option<JournalError>,
    /// True after a failure: nothing is written any longer.
    stopped: bool,
}

/// A snapshot in the making.
#[derive(Debug)]
struct Merging {
    /// Number of sealed segments that it covers.
    segments: usize,
    task: Box<dyn MergeTask>,
}

/// Number of fencing numbers reserved at once: 2.1 s of the wall clock, from which they start, or 21 s at 100,000
/// grants per second.
///
/// A start skips the rest of the last block, so numbers run ahead of the wall clock by up to one block per start. A
/// directory restored from a backup within that time would issue the same numbers again: a block must be short. It must
/// not be much shorter either, because a server under load syncs three times per block.
const FENCE_BLOCK_SIZE: u64 = 1 << 21;

impl Journal {
    /// Opens the directory and restores its content. `boot` is the boot id of the machine; `now` is counted in that
    /// boot.
    ///
    /// When this returns, the ceiling, the bound and the embargo are durable.
    ///
    /// # Errors
    ///
    /// [`JournalError`] by the table of the [module](self). The directory is then unchanged, except after
    /// [`JournalError::Io`], which may be retried.
    pub fn open(
        options: &JournalOptions,
        boot: &str,
        now: Time,
        wall_micros: u64,
    ) -> Result<OpenedJournal, JournalError> {
        let directory = DataDirectory::open(&options.dir)?;
        Self::open_on(Arc::new(directory), options, boot, now, wall_micros)
    }

    /// Opens a journal on another storage than a directory of the file system, for simulators and tests.
    /// [`JournalOptions::dir`] is not used: messages name [`Storage::dir`].
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open), except [`JournalError::InUse`].
    pub fn open_on(
        storage: Arc<dyn Storage>,
        options: &JournalOptions,
        boot: &str,
        now: Time,
        wall_micros: u64,
    ) -> Result<OpenedJournal, JournalError> {
        open::open(Disk::new(storage), options, boot, now, wall_micros)
    }

    /// Records a grant. Fencing numbers must grow, from [`OpenedJournal::next_number`] on. The `note` is restored with
    /// the hold.
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

    /// Records a renewal. The fencing number identifies the hold: no other hold ever had it.
    #[inline]
    pub fn renewed(&mut self, number: u64, lease: Duration, ends: Time) {
        self.batch.note_lease(lease, ends.as_nanos());
        self.batch.push(&Record::Renewed { number, ends });
    }

    /// Records the end of a hold: by release, expiry, break, or the end of its connection.
    #[inline]
    pub fn ended(&mut self, number: u64) {
        self.batch.push(&Record::Ended { number });
    }

    /// Writes the records since the last commit, in one system call; none if there are no records. Replies may be sent
    /// after it returns.
    ///
    /// # Errors
    ///
    /// [`JournalError`]: the replies of this turn must not be sent. The server must stop; every later commit fails.
    #[inline]
    pub fn commit(&mut self) -> Result<(), JournalError> {
        if self.batch.is_empty() && !self.stopped {
            return Ok(());
        }
        self.stop_on_error(Self::write_batch)
    }

    /// Lowers the bound: no current hold ends later than `last_end`. To be called from time to time; a bound that is
    /// too large only lengthens the embargo after a crash. Syncs if the bound at least halves.
    ///
    /// # Errors
    ///
    /// As for [`commit`](Self::commit).
    pub fn shrink_bound(&mut self, last_end: Time, now: Time) -> Result<(), JournalError> {
        // A running embargo counts like a lease: it protects leases of an earlier run that this journal does not know.
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

    /// Takes the last background failure: a snapshot or the next segment could not be created. It is retried. Until
    /// that succeeds, the directory grows, or the next full segment stops the server.
    pub fn take_background_error(&mut self) -> Option<JournalError> {
        self.background_error.take()
    }

    /// Stops cleanly: leaves one durable snapshot, and ceiling and bound as low as possible.
    ///
    /// # Errors
    ///
    /// [`JournalError`]: the directory is then in the state that a killed server leaves.
    pub fn close(mut self, now: Time) -> Result<(), JournalError> {
        self.commit()?;
        self.wait_for_snapshot();
        self.stop_on_error(|journal| journal.write_final_snapshot(now))
    }

    /// Waits for the merge in the background, if it runs.
    pub fn wait_for_snapshot(&mut self) {
        let Some(Merging { segments, task }) = self.merging.take() else { return };
        match task.join() {
            Ok(Ok(length)) => {
                self.base = (self.base.0 + segments as u64, length);
                self.sealed.drain(..segments);
            }
            Ok(Err(error)) => self.background_error = Some(error),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Runs `work`, and stops the journal for good if it fails.
    ///
    /// A failed write may have left a part of its frame. A later, shorter frame would overwrite only the start of that
    /// part, and the next start would take the rest for damage. So nothing is written after a failure.
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
        // Before the write: if the machine crashed after it, a fencing number above the durable ceiling would be issued
        // again, and a lease longer than the durable bound would outlast the embargo.
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
        // A failure is not fatal yet: the present segment still has room, and the next turn tries again.
        if self.next.is_none() && self.segment.is_half_full() {
            match self.create(self.segment_bytes) {
                Ok(next) => self.next = Some(next),
                Err(error) => self.background_error = Some(error),
            }
        }
        Ok(())
    }

    /// Makes the ceiling and the bound durable that the present batch needs.
    #[cold]
    fn raise_limits(&mut self) -> Result<(), JournalError> {
        if self.batch.highest > self.facts.ceiling {
            self.facts.ceiling = self.batch.highest.saturating_add(FENCE_BLOCK_SIZE);
        }
        self.facts.bound = self.facts.bound.max(round_up_bound(self.batch.longest, self.max_lease));
        self.facts.store(&self.disk)
    }

    /// Creates the segment after the present one.
    fn create(&self, size: u64) -> Result<Segment, JournalError> {
        Segment::create(&self.disk, self.file_owner(), self.segment.sequence + 1, size)
    }

    #[cold]
    fn rotate(&mut self, size: u64) -> Result<(), JournalError> {
        // The next segment exists before the seal names it. In the opposite order a kill in between would leave a seal
        // whose segment is missing, and the next start would refuse the directory. An empty segment after an unsealed
        // one is harmless.
        let next = match self.next.take() {
            Some(next) if next.size >= size => next,
            _ => self.create(size)?,
        };
        self.segment.seal(&self.disk)?;
        self.sealed.push(self.segment.size);
        self.segment = next;
        if self.merging.as_ref().is_some_and(|merging| merging.task.is_finished()) {
            self.wait_for_snapshot();
        }
        if self.merging.is_none() && self.sealed.iter().sum::<u64>() / 2 >= self.base.1 {
            self.merge();
        }
        Ok(())
    }

    /// Starts to write the next snapshot in the background. Sealed segments of twice the snapshot's size justify
    /// rewriting it.
    fn merge(&mut self) {
        let chain = self.chain();
        let segments = chain.segments.len();
        let disk = self.disk.clone();
        let name = file_name(FileKind::Snapshot, self.segment.sequence);
        match self.disk.spawn_merge(&name, Box::new(move || merge::merge(&disk, &chain))) {
            Ok(task) => self.merging = Some(Merging { segments, task }),
            Err(error) => self.background_error = Some(error),
        }
    }

    /// Latest snapshot and all segments before the present one.
    fn chain(&self) -> Chain {
        let base = self.base.0;
        let segments = (base..self.segment.sequence).collect();
        Chain { owner: self.file_owner(), base, segments }
    }

    fn file_owner(&self) -> FileOwner {
        FileOwner { instance: self.facts.instance, boot: self.facts.boot }
    }

    /// Replaces all segments by one durable snapshot, then marks the facts as clean.
    ///
    /// The facts are the commit point. Until they are stored, a kill leaves a chain that the next start reads as after
    /// any kill. Only after that are the files of the chain removed.
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

/// Bound for a longest remaining lease of `span`: the next power of two seconds, but at most the longest lease.
fn round_up_bound(span: Duration, max_lease: Duration) -> Duration {
    let seconds = span.as_secs() + u64::from(span.subsec_nanos() > 0);
    let power = if seconds == 0 { Some(0) } else { seconds.checked_next_power_of_two() };
    Duration::from_secs(power.unwrap_or(u64::MAX)).min(max_lease).max(span)
}

impl Drop for Journal {
    /// Waits for the merge in the background: the directory must stay locked while a thread writes to it.
    fn drop(&mut self) {
        if let Some(Merging { task, .. }) = self.merging.take() {
            let _ = task.join();
        }
    }
}
