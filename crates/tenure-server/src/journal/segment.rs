//! A segment: the file that the records of each turn are appended to.

use super::batch::RecordBatch;
use super::disk::Disk;
use super::error::JournalError;
use super::format::{FileKind, HEADER_LEN, Header, Record, SEAL_LEN};
use super::read::{FileOwner, file_name};
use super::storage::StorageFile;

/// The open segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) sequence: u64,
    pub(super) size: u64,
    name: String,
    file: Box<dyn StorageFile>,
    end: u64,
}

impl Segment {
    /// Creates a segment of `size` bytes. It gets its final name after its header is written, so a reader never finds
    /// an incomplete header.
    pub(super) fn create(
        disk: &Disk,
        FileOwner { instance, boot }: FileOwner,
        sequence: u64,
        size: u64,
    ) -> Result<Self, JournalError> {
        let size = size.max((HEADER_LEN + SEAL_LEN) as u64);
        let name = file_name(FileKind::Segment, sequence);
        let unfinished = format!("{name}.tmp");
        let file = disk.create(&unfinished, size)?;
        let header = Header { kind: FileKind::Segment, instance, sequence, size, boot };
        disk.write(&*file, &unfinished, &header.encode(), 0)?;
        disk.rename(&unfinished, &name)?;
        Ok(Self { sequence, size, name, file, end: HEADER_LEN as u64 })
    }

    /// True if a batch of this length fits with room for the seal after it.
    pub(super) fn has_room(&self, length: usize) -> bool {
        self.end + (length + SEAL_LEN) as u64 <= self.size
    }

    pub(super) fn is_half_full(&self) -> bool {
        self.end > self.size / 2
    }

    pub(super) fn write(
        &mut self,
        disk: &Disk,
        batch: &mut RecordBatch,
    ) -> Result<(), JournalError> {
        let bytes = batch.seal(self.sequence, self.end);
        disk.write(&*self.file, &self.name, bytes, self.end)?;
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Writes the seal: the journal continues in the next segment.
    pub(super) fn seal(&mut self, disk: &Disk) -> Result<(), JournalError> {
        let mut batch = RecordBatch::default();
        batch.push(&Record::Sealed { next: self.sequence + 1 });
        self.write(disk, &mut batch)
    }
}
