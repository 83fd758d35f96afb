//! The journal, open for writing.

use std::time::Duration;

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};

use super::batch::RecordBatch;
use super::disk::Disk;
use super::error::JournalError;
use super::facts::Facts;
use super::format::{FileKind, HEADER_LEN, Record, SEAL_LEN};
use super::inventory::remove_before;
use super::merge::{Snapshot, merge, replay_holds};
use super::read::{Chain, FileOwner, file_name};
use super::segment::Segment;
use super::storage::MergeTask;

/// The journal of a server, open for writing. The [module](super) documents its use and its guarantees.
#[derive(Debug)]
pub struct Journal {
    pub(super) disk: Disk,
    pub(super) max_lease: Duration,
    pub(super) segment_bytes: u64,
    pub(super) facts: Facts,
    /// Largest fencing number written.
    pub(super) highest: u64,
    /// Records of the present turn.
    pub(super) batch: RecordBatch,
    pub(super) segment: Segment,
    /// The next segment, created ahead so that a full disk is noticed while the present segment has room.
    pub(super) next: Option<Segment>,
    /// Sequence and size of the latest snapshot.
    pub(super) base: (u64, u64),
    /// Sizes of the sealed segments that the snapshot does not cover.
    pub(super) sealed: Vec<u64>,
    pub(super) merging: Option<Merging>,
    pub(super) background_error: Option<JournalError>,
    /// True after a failure: nothing is written any longer.
    pub(super) stopped: bool,
}

/// A snapshot in the making.
#[derive(Debug)]
pub(super) struct Merging {
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
pub(super) const FENCE_BLOCK_SIZE: u64 = 1 << 21;

impl Journal {
    /// Records a grant. Fencing numbers must grow, from [`OpenedJournal::next_number`](super::OpenedJournal::next_number) on. The `note` is restored with
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
        match self.disk.spawn_merge(&name, Box::new(move || merge(&disk, &chain))) {
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
        let mut snapshot = Snapshot::begin(&self.disk, self.file_owner(), start)?;
        let mut last_end = Time::from_nanos(self.facts.embargo_until);
        replay_holds(&self.disk, &chain, true, |hold| match hold {
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
        remove_before(&self.disk, start)
    }
}

/// Bound for a longest remaining lease of `span`: the next power of two seconds, but at most the longest lease.
pub(super) fn round_up_bound(span: Duration, max_lease: Duration) -> Duration {
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
