//! Snapshots: the holds of a chain of segments, merged into one file.

use std::collections::HashMap;

use tenure_core::Time;

use super::batch::RecordBatch;
use super::disk::Disk;
use super::error::JournalError;
use super::format::{FileKind, HEADER_LEN, Header, Record};
use super::read::{Chain, ChainEnd, FileOwner, file_name};
use super::storage::StorageFile;

/// Last change of a hold after its grant.
#[derive(Clone, Copy, Debug)]
enum HoldOutcome {
    Renewed(Time),
    Ended,
}

/// Visits the holds that remain at the end of a chain, in the order of their grants.
///
/// The chain is read twice: first for the renewals and ends, then for the grants. So the memory used grows with the
/// number of changes, not with the number of holds.
pub(super) fn replay_holds(
    disk: &Disk,
    chain: &Chain,
    finished: bool,
    mut hold: impl FnMut(Record<'_>) -> Result<(), JournalError>,
) -> Result<ChainEnd, JournalError> {
    let mut outcomes = HashMap::new();
    let end = chain.walk(disk, finished, |record| {
        match record {
            Record::Renewed { number, ends } => {
                let outcome = outcomes.entry(number).or_insert(HoldOutcome::Renewed(ends));
                if let HoldOutcome::Renewed(last) = outcome {
                    *last = ends;
                }
            }
            Record::Ended { number } => {
                outcomes.insert(number, HoldOutcome::Ended);
            }
            _ => {}
        }
        Ok(())
    })?;
    chain.walk(disk, finished, |record| {
        let Record::Granted { key, mode, token, ends, note } = record else { return Ok(()) };
        match outcomes.get(&token.number()) {
            Some(HoldOutcome::Ended) => Ok(()),
            Some(HoldOutcome::Renewed(ends)) => {
                hold(Record::Granted { key, mode, token, ends: *ends, note })
            }
            None => hold(Record::Granted { key, mode, token, ends, note }),
        }
    })?;
    Ok(end)
}

/// A snapshot that is being written. It gets its final name when it is complete.
#[derive(Debug)]
pub(super) struct Snapshot<'a> {
    disk: &'a Disk,
    owner: FileOwner,
    sequence: u64,
    file: Box<dyn StorageFile>,
    batch: RecordBatch,
    end: u64,
}

impl<'a> Snapshot<'a> {
    pub(super) fn begin(
        disk: &'a Disk,
        owner: FileOwner,
        sequence: u64,
    ) -> Result<Self, JournalError> {
        let file = disk.create(&Self::unfinished(sequence), 0)?;
        let batch = RecordBatch::default();
        Ok(Self { disk, owner, sequence, file, batch, end: HEADER_LEN as u64 })
    }

    pub(super) fn add(&mut self, hold: &Record<'_>) -> Result<(), JournalError> {
        self.batch.push(hold);
        if self.batch.len() > 1 << 20 { self.flush() } else { Ok(()) }
    }

    /// Completes the snapshot and returns its size. With `durable` it survives a machine crash.
    pub(super) fn finish(mut self, durable: bool) -> Result<u64, JournalError> {
        self.flush()?;
        let unfinished = Self::unfinished(self.sequence);
        let Self { disk, owner: FileOwner { instance, boot }, sequence, file, end, .. } = self;
        let header = Header { kind: FileKind::Snapshot, instance, sequence, size: end, boot };
        disk.write(&*file, &unfinished, &header.encode(), 0)?;
        // The content is synced before the rename. Otherwise a crash could leave the final name with missing content.
        if durable {
            disk.sync(&*file, &unfinished)?;
        }
        disk.rename(&unfinished, &file_name(FileKind::Snapshot, sequence))?;
        if durable {
            disk.sync_names()?;
        }
        Ok(end)
    }

    fn flush(&mut self) -> Result<(), JournalError> {
        let bytes = self.batch.seal(self.sequence, self.end);
        if !bytes.is_empty() {
            self.disk.write(&*self.file, &Self::unfinished(self.sequence), bytes, self.end)?;
            self.end += bytes.len() as u64;
        }
        self.batch.clear();
        Ok(())
    }

    fn unfinished(sequence: u64) -> String {
        file_name(FileKind::Snapshot, sequence) + ".tmp"
    }
}

/// Writes the snapshot of a chain of sealed segments, removes the files that it replaces, and returns its size.
pub(super) fn merge(disk: &Disk, chain: &Chain) -> Result<u64, JournalError> {
    let sequence = chain.base + chain.segments.len() as u64;
    let mut snapshot = Snapshot::begin(disk, chain.owner, sequence)?;
    replay_holds(disk, chain, true, |hold| snapshot.add(&hold))?;
    let length = snapshot.finish(false)?;
    // From here on recovery uses the new snapshot, the one with the largest sequence. If the removal is interrupted,
    // the remaining files have smaller sequences and are ignored; the next start removes them.
    disk.remove(&file_name(FileKind::Snapshot, chain.base))?;
    for &segment in &chain.segments {
        disk.remove(&file_name(FileKind::Segment, segment))?;
    }
    Ok(length)
}
