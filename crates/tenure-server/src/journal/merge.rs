//! Snapshots: what is held, as one file instead of a history.

use std::collections::HashMap;
use std::fs::File;

use tenure_core::Time;

use super::disk::Disk;
use super::error::JournalError;
use super::format::{HEADER, Header, Kind, Record};
use super::read::{Chain, End, Whose, name};
use super::turn::Turn;

/// What became of a hold after it was granted.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Renewed(Time),
    Ended,
}

/// The holds that a history comes to, in the order of their grants.
///
/// It is read twice, first for how each hold went on and then for the holds themselves, so that memory grows with what
/// changed and not with what is held.
pub(super) fn settle(
    disk: &Disk,
    chain: &Chain,
    finished: bool,
    mut hold: impl FnMut(Record<'_>) -> Result<(), JournalError>,
) -> Result<End, JournalError> {
    let mut fates = HashMap::new();
    let end = chain.walk(disk, finished, |record| {
        match record {
            Record::Renewed { number, ends } => {
                let fate = fates.entry(number).or_insert(Fate::Renewed(ends));
                if let Fate::Renewed(last) = fate {
                    *last = ends;
                }
            }
            Record::Ended { number } => {
                fates.insert(number, Fate::Ended);
            }
            _ => {}
        }
        Ok(())
    })?;
    chain.walk(disk, finished, |record| {
        let Record::Granted { key, mode, token, ends, note } = record else { return Ok(()) };
        match fates.get(&token.number()) {
            Some(Fate::Ended) => Ok(()),
            Some(Fate::Renewed(ends)) => {
                hold(Record::Granted { key, mode, token, ends: *ends, note })
            }
            None => hold(Record::Granted { key, mode, token, ends, note }),
        }
    })?;
    Ok(end)
}

/// A snapshot that is being written; it has its name only when it is whole.
#[derive(Debug)]
pub(super) struct Snapshot<'a> {
    disk: &'a Disk,
    whose: Whose,
    sequence: u64,
    file: File,
    turn: Turn,
    end: u64,
}

impl<'a> Snapshot<'a> {
    pub(super) fn begin(disk: &'a Disk, whose: Whose, sequence: u64) -> Result<Self, JournalError> {
        let file = disk.create(&Self::unfinished(sequence), 0)?;
        let turn = Turn::default();
        Ok(Self { disk, whose, sequence, file, turn, end: HEADER as u64 })
    }

    pub(super) fn add(&mut self, hold: &Record<'_>) -> Result<(), JournalError> {
        self.turn.push(hold);
        if self.turn.len() > 1 << 20 { self.flush() } else { Ok(()) }
    }

    /// Gives it its name; `durable` where it must outlive the machine. How long it is.
    pub(super) fn finish(mut self, durable: bool) -> Result<u64, JournalError> {
        self.flush()?;
        let unfinished = Self::unfinished(self.sequence);
        let Self { disk, whose: Whose { instance, boot }, sequence, file, end, .. } = self;
        let header = Header { kind: Kind::Snapshot, instance, sequence, size: end, boot };
        disk.write(&file, &unfinished, &header.encode(), 0)?;
        if durable {
            disk.sync(&file, &unfinished)?;
        }
        disk.rename(&unfinished, &name(Kind::Snapshot, sequence))?;
        if durable {
            disk.sync_names()?;
        }
        Ok(end)
    }

    fn flush(&mut self) -> Result<(), JournalError> {
        let bytes = self.turn.seal(self.sequence, self.end);
        if !bytes.is_empty() {
            self.disk.write(&self.file, &Self::unfinished(self.sequence), bytes, self.end)?;
            self.end += bytes.len() as u64;
        }
        self.turn.clear();
        Ok(())
    }

    fn unfinished(sequence: u64) -> String {
        name(Kind::Snapshot, sequence) + ".tmp"
    }
}

/// Makes the snapshot that stands for a chain of finished segments, then removes them. How long it is.
pub(super) fn merge(disk: &Disk, chain: &Chain) -> Result<u64, JournalError> {
    let sequence = chain.base + chain.segments.len() as u64;
    let mut snapshot = Snapshot::begin(disk, chain.whose, sequence)?;
    settle(disk, chain, true, |hold| snapshot.add(&hold))?;
    let length = snapshot.finish(false)?;
    disk.remove(&name(Kind::Snapshot, chain.base))?;
    for &segment in &chain.segments {
        disk.remove(&name(Kind::Segment, segment))?;
    }
    Ok(length)
}
