//! Reading of segments and snapshots; distinguishes a torn end from a damaged file.

use std::io::{BufReader, Read as _};
use std::path::PathBuf;

use super::disk::{Disk, FileReader};
use super::error::JournalError;
use super::format::{
    BootId, FRAME_END_MARK, FRAME_HEAD_LEN, Fields, FileKind, FormatError, FrameHead, HEADER_LEN,
    Header, Record,
};

/// Name of a segment or snapshot.
pub(super) fn file_name(kind: FileKind, sequence: u64) -> String {
    match kind {
        FileKind::Snapshot => format!("snapshot-{sequence:016x}"),
        _ => format!("journal-{sequence:016x}"),
    }
}

/// Server and boot that files must belong to.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileOwner {
    pub(super) instance: u128,
    pub(super) boot: BootId,
}

/// Reader of the frames of a file, in order.
#[derive(Debug)]
pub(super) struct Reader {
    input: BufReader<FileReader>,
    path: PathBuf,
    sequence: u64,
    size: u64,
    offset: u64,
    frame: Vec<u8>,
    /// Latest time in the frames so far: the last frame was not written earlier.
    pub(super) as_of: u64,
    /// True if the last frame was cut short. The frames before it are complete.
    pub(super) torn: bool,
}

impl Reader {
    /// Opens a file and checks that its header matches `owner`, the name and the size.
    pub(super) fn open(
        disk: &Disk,
        kind: FileKind,
        sequence: u64,
        owner: FileOwner,
    ) -> Result<Self, JournalError> {
        let (reader, head) = Self::begin(disk, kind, sequence)?;
        let header = match Header::decode(kind, &head) {
            Ok(header) => header,
            Err(FormatError::Version(found)) => {
                return Err(JournalError::Version { path: reader.path, found });
            }
            Err(FormatError::Damaged(what)) => return Err(reader.invalid(what)),
        };
        if header.instance != owner.instance || header.boot != owner.boot {
            let what = "belongs to another server, or to another run of the machine";
            return Err(reader.invalid(what));
        }
        if header.sequence != sequence {
            return Err(reader.invalid("is another file under this name"));
        }
        if header.size != reader.size {
            return Err(reader.invalid("is cut short, or was added to"));
        }
        Ok(reader)
    }

    /// Opens a file without checking its header, to read as much as possible of a damaged directory.
    pub(super) fn salvage(
        disk: &Disk,
        kind: FileKind,
        sequence: u64,
    ) -> Result<Self, JournalError> {
        Ok(Self::begin(disk, kind, sequence)?.0)
    }

    fn begin(
        disk: &Disk,
        kind: FileKind,
        sequence: u64,
    ) -> Result<(Self, [u8; HEADER_LEN]), JournalError> {
        let name = file_name(kind, sequence);
        let path = disk.path(&name);
        let file = match disk.open(&name) {
            Err(error) if error.is_not_found() => return Err(JournalError::Missing { path }),
            other => other?,
        };
        let size = file.size().map_err(JournalError::io("read", &path))?;
        let input = BufReader::with_capacity(1 << 18, FileReader::new(file));
        let offset = HEADER_LEN as u64;
        let frame = Vec::new();
        let mut reader = Self { input, path, sequence, size, offset, frame, as_of: 0, torn: false };
        if size < offset {
            return Err(reader.invalid("is cut short"));
        }
        let mut head = [0; HEADER_LEN];
        reader.read(&mut head)?;
        Ok((reader, head))
    }

    /// Records of the next frame; `None` at the end of the file, complete or [`torn`](Self::torn).
    ///
    /// A kill can only cut a write short: some bytes at the start of the frame are there, and all after them are zero,
    /// because the segment was allocated with zeros and nothing is written behind an unfinished frame. Everything else
    /// is damage and is refused. If damage passed for a torn end, the frames behind it would be dropped silently, and
    /// with them releases and grants whose replies were sent.
    pub(super) fn frame(&mut self) -> Result<Option<Fields<'_>>, JournalError> {
        let left = self.size.saturating_sub(self.offset);
        if left < FRAME_HEAD_LEN as u64 {
            return if self.rest_is_zero()? { Ok(None) } else { Err(self.damaged()) };
        }
        let mut head = [0; FRAME_HEAD_LEN];
        self.read(&mut head)?;
        let Some(FrameHead { length, as_of, sum }) =
            FrameHead::decode(&head, self.sequence, self.offset)
        else {
            // No valid head: the file's unused rest, if the head is all zeros; a torn head, if some bytes are there. In
            // both cases only zeros may follow. If anything follows, the head was changed after it was written.
            self.torn = head != [0; FRAME_HEAD_LEN];
            return if self.rest_is_zero()? { Ok(None) } else { Err(self.damaged()) };
        };
        let whole = FRAME_HEAD_LEN as u64 + u64::from(length) + 1;
        // A frame is never written beyond the end of its segment, and the head has a checksum: the file was truncated.
        if whole > left {
            return Err(self.damaged());
        }
        let mut frame = std::mem::take(&mut self.frame);
        frame.resize(length as usize + 1, 0);
        self.read(&mut frame)?;
        self.frame = frame;
        let (mark, records) = self.frame.split_last().expect("a frame ends with a mark");
        if *mark == FRAME_END_MARK && crc32fast::hash(records) == sum {
            self.offset += whole;
            self.as_of = self.as_of.max(as_of);
            return Ok(Some(Fields(&self.frame[..length as usize])));
        }
        // The mark is the last byte of a write. A frame with a mark was written completely, so a wrong checksum means
        // damage. Without a mark the write was cut short, and nothing can have been written after it.
        if *mark == 0 && self.rest_is_zero()? {
            self.torn = true;
            return Ok(None);
        }
        Err(self.damaged())
    }

    pub(super) fn damaged(&self) -> JournalError {
        let what = "is damaged: a part of it does not match its checksum";
        JournalError::Damaged { path: self.path.clone(), what }
    }

    pub(super) fn invalid(&self, what: &'static str) -> JournalError {
        JournalError::Damaged { path: self.path.clone(), what }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), JournalError> {
        self.input.read_exact(bytes).map_err(JournalError::io("read", &self.path))
    }

    fn rest_is_zero(&mut self) -> Result<bool, JournalError> {
        let mut piece = [0; 1 << 14];
        loop {
            let read = self.input.read(&mut piece).map_err(JournalError::io("read", &self.path))?;
            if read == 0 {
                return Ok(true);
            }
            if piece[..read].iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
    }
}

/// A snapshot and the segments that follow it, in order.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    pub(super) owner: FileOwner,
    /// The sequence of the snapshot and of the first segment.
    pub(super) base: u64,
    pub(super) segments: Vec<u64>,
}

/// End of a chain.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ChainEnd {
    /// True if the last frame was cut short.
    pub(super) torn: bool,
    /// Latest time in the frames: the last frame was not written earlier.
    pub(super) as_of: u64,
}

impl Chain {
    /// Visits all records of the snapshot and the segments, in order.
    ///
    /// A chain to be merged is `finished`: every segment is sealed. Otherwise the journal ends in a segment without a
    /// seal. Empty segments may follow that one: they were created ahead, or by a start that was killed.
    pub(super) fn walk(
        &self,
        disk: &Disk,
        finished: bool,
        mut visit: impl FnMut(Record<'_>) -> Result<(), JournalError>,
    ) -> Result<ChainEnd, JournalError> {
        self.read_snapshot(disk, &mut visit)?;
        let mut end = ChainEnd::default();
        let mut expected = self.base;
        // True after the segment without a seal, in which the journal ends.
        let mut over = false;
        for &sequence in &self.segments {
            if !over && sequence != expected {
                let path = disk.path(&file_name(FileKind::Segment, expected));
                return Err(JournalError::Missing { path });
            }
            expected = sequence + 1;
            let mut reader = Reader::open(disk, FileKind::Segment, sequence, self.owner)?;
            let sealed = read_segment(&mut reader, sequence, over, &mut visit)?;
            end.torn |= reader.torn;
            end.as_of = end.as_of.max(reader.as_of);
            over |= !sealed;
        }
        // Not finished, and all segments sealed: the segment that the last seal names is missing, and with it the
        // latest records. Finished, and a segment without a seal: the chain is not what the caller wrote.
        if over == finished {
            let path = disk.path(&file_name(FileKind::Segment, expected));
            return Err(JournalError::Missing { path });
        }
        Ok(end)
    }

    /// Syncs the files of the chain. False if the disk failed to store them.
    ///
    /// Lost pages may read as zeros, like a journal that ended earlier. The kernel reports the failure only once, so
    /// the caller must not just refuse to start: the next attempt would find no failure. It must record the crash
    /// durably.
    pub(super) fn is_on_disk(&self, disk: &Disk) -> Result<bool, JournalError> {
        let segments = self.segments.iter().map(|at| file_name(FileKind::Segment, *at));
        for name in segments.chain([file_name(FileKind::Snapshot, self.base)]) {
            if disk.sync(&*disk.open(&name)?, &name).is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Visits the records of the snapshot. A snapshot cannot be torn: it got its name when it was complete.
    pub(super) fn read_snapshot(
        &self,
        disk: &Disk,
        visit: &mut impl FnMut(Record<'_>) -> Result<(), JournalError>,
    ) -> Result<(), JournalError> {
        let mut reader = Reader::open(disk, FileKind::Snapshot, self.base, self.owner)?;
        while let Some(mut records) = reader.frame()? {
            while let Some(record) = records.record() {
                visit(record)?;
            }
            if !records.0.is_empty() {
                return Err(reader.damaged());
            }
        }
        if reader.torn { Err(reader.damaged()) } else { Ok(()) }
    }
}

/// Visits the records of one segment. True if it is sealed. A segment after the end of the journal (`over`) must be
/// empty.
fn read_segment(
    reader: &mut Reader,
    sequence: u64,
    over: bool,
    visit: &mut impl FnMut(Record<'_>) -> Result<(), JournalError>,
) -> Result<bool, JournalError> {
    let mut sealed = false;
    while let Some(mut records) = reader.frame()? {
        if over || sealed {
            return Err(reader.invalid("goes on after the end of the journal"));
        }
        while let Some(record) = records.record() {
            match record {
                Record::Sealed { next } => sealed = next == sequence + 1,
                other => visit(other)?,
            }
        }
        if !records.0.is_empty() {
            return Err(reader.damaged());
        }
    }
    if reader.torn && (over || sealed) {
        return Err(reader.invalid("goes on after the end of the journal"));
    }
    Ok(sealed)
}
