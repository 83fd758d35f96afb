//! Encoding of segments and snapshots: a header, then frames of records.

use tenure_core::table::Mode;
use tenure_core::{LockToken, Time};

/// Format version of all files.
pub(super) const FORMAT_VERSION: u32 = 1;
/// Length of a file header.
pub(super) const HEADER_LEN: usize = 128;
/// Length of a frame head, which precedes the records.
pub(super) const FRAME_HEAD_LEN: usize = 20;
/// Last byte of a frame. Not zero, so that a frame that was cut short differs from one that was changed later.
pub(super) const FRAME_END_MARK: u8 = 0xa5;
/// Space that a segment reserves for its seal, the frame that names the next segment.
pub(super) const SEAL_LEN: usize = FRAME_HEAD_LEN + 9 + 1;

/// Boot id of the machine, padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BootId(pub(super) [u8; 64]);

impl BootId {
    /// `None` if the id is empty or too long.
    pub(super) fn new(name: &str) -> Option<Self> {
        let name = name.trim().as_bytes();
        let mut padded = [0; 64];
        if name.is_empty() || name.len() >= padded.len() {
            return None;
        }
        padded[..name.len()].copy_from_slice(name);
        Some(Self(padded))
    }
}

/// Kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    Facts,
    Segment,
    Snapshot,
}

impl FileKind {
    const fn magic(self) -> [u8; 8] {
        *match self {
            Self::Facts => b"tenure f",
            Self::Segment => b"tenure j",
            Self::Snapshot => b"tenure s",
        }
    }

    /// Writes the first bytes of every file: magic, version, and the version inverted.
    pub(super) fn begin(self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.magic());
        bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes.extend_from_slice(&(!FORMAT_VERSION).to_le_bytes());
    }

    /// Checks magic, version and checksum, and returns the fields after the version.
    pub(super) fn check(self, bytes: &[u8]) -> Result<Fields<'_>, FormatError> {
        let mut fields = Fields(bytes);
        if fields.take(8).is_none_or(|magic| magic != self.magic()) {
            return Err(FormatError::Damaged("is not what its name says"));
        }
        let (Some(version), Some(again)) = (fields.u32(), fields.u32()) else {
            return Err(FormatError::Damaged("is cut short"));
        };
        // Before the checksum, which another version may compute differently. The inverted copy makes a flipped bit in
        // the version read as damage, not as another version.
        if version == !again && version != FORMAT_VERSION {
            return Err(FormatError::Version(version));
        }
        let (body, sum) = bytes.split_at(bytes.len().saturating_sub(4));
        if version != !again || sum != crc32fast::hash(body).to_le_bytes() {
            return Err(FormatError::Damaged(
                "is damaged: its beginning does not match its checksum",
            ));
        }
        Ok(fields)
    }
}

/// Defect of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FormatError {
    Version(u32),
    Damaged(&'static str),
}

/// Header of a segment or snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: FileKind,
    pub(super) instance: u128,
    pub(super) sequence: u64,
    /// Size of the whole file.
    pub(super) size: u64,
    pub(super) boot: BootId,
}

impl Header {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_LEN);
        self.kind.begin(&mut bytes);
        bytes.extend_from_slice(&self.instance.to_le_bytes());
        bytes.extend_from_slice(&self.sequence.to_le_bytes());
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(&self.boot.0);
        bytes.resize(HEADER_LEN - 4, 0);
        let sum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(kind: FileKind, bytes: &[u8; HEADER_LEN]) -> Result<Self, FormatError> {
        let mut fields = kind.check(bytes)?;
        let mut read = || {
            let instance = fields.u128()?;
            let (sequence, size) = (fields.u64()?, fields.u64()?);
            let boot = BootId(fields.take(64)?.try_into().ok()?);
            Some(Self { kind, instance, sequence, size, boot })
        };
        read().ok_or(FormatError::Damaged("is cut short"))
    }
}

/// Fills in the head of a frame. `frame` is the whole frame, from its head to its mark.
pub(super) fn seal(frame: &mut [u8], as_of: u64, sequence: u64, offset: u64) {
    let (head, rest) = frame.split_at_mut(FRAME_HEAD_LEN);
    let records = &rest[..rest.len() - 1];
    let length = u32::try_from(records.len()).expect("a frame is closed long before that");
    head[..4].copy_from_slice(&length.to_le_bytes());
    head[4..12].copy_from_slice(&as_of.to_le_bytes());
    head[12..16].copy_from_slice(&crc32fast::hash(records).to_le_bytes());
    let sum = head_sum(head, sequence, offset);
    head[16..].copy_from_slice(&sum.to_le_bytes());
}

/// Head of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameHead {
    pub(super) length: u32,
    pub(super) as_of: u64,
    pub(super) sum: u32,
}

impl FrameHead {
    /// `None` if the head was not written for this offset of this file, or is incomplete.
    pub(super) fn decode(head: &[u8; FRAME_HEAD_LEN], sequence: u64, offset: u64) -> Option<Self> {
        let mut fields = Fields(head);
        let (length, as_of, sum) = (fields.u32()?, fields.u64()?, fields.u32()?);
        let whole = fields.u32()? == head_sum(head, sequence, offset);
        (whole && length > 0).then_some(Self { length, as_of, sum })
    }
}

/// Checksum of a frame head. It covers file and offset, so an old frame at another place is not taken for a valid one.
fn head_sum(head: &[u8], sequence: u64, offset: u64) -> u32 {
    let mut place = [0; 32];
    place[..8].copy_from_slice(&sequence.to_le_bytes());
    place[8..16].copy_from_slice(&offset.to_le_bytes());
    place[16..].copy_from_slice(&head[..16]);
    crc32fast::hash(&place)
}

/// A change of the table, or the seal of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    Granted { key: &'a [u8], mode: Mode, token: LockToken, ends: Time, note: &'a [u8] },
    Renewed { number: u64, ends: Time },
    Ended { number: u64 },
    Sealed { next: u64 },
}

const EXCLUSIVE: u8 = 1;
const SHARED: u8 = 2;
const SLOT: u8 = 3;
const RENEWED: u8 = 4;
const ENDED: u8 = 5;
const SEALED: u8 = 6;

impl Record<'_> {
    #[inline]
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        match *self {
            Self::Granted { key, mode, token, ends, note } => {
                let (kind, limit) = match mode {
                    Mode::Exclusive => (EXCLUSIVE, 0),
                    Mode::Shared => (SHARED, 0),
                    Mode::Slot { limit } => (SLOT, limit),
                };
                let mut head = [0; 37];
                head[0] = kind;
                head[1..5].copy_from_slice(&length(key).to_le_bytes());
                head[5..9].copy_from_slice(&length(note).to_le_bytes());
                head[9..13].copy_from_slice(&limit.to_le_bytes());
                head[13..21].copy_from_slice(&token.number().to_le_bytes());
                head[21..29].copy_from_slice(&token.secret().to_le_bytes());
                head[29..].copy_from_slice(&ends.as_nanos().to_le_bytes());
                bytes.reserve(head.len() + key.len() + note.len());
                bytes.extend_from_slice(&head);
                bytes.extend_from_slice(key);
                bytes.extend_from_slice(note);
            }
            Self::Renewed { number, ends } => {
                let mut record = [RENEWED; 17];
                record[1..9].copy_from_slice(&number.to_le_bytes());
                record[9..].copy_from_slice(&ends.as_nanos().to_le_bytes());
                bytes.extend_from_slice(&record);
            }
            Self::Ended { number } => bytes.extend_from_slice(&short_record(ENDED, number)),
            Self::Sealed { next } => bytes.extend_from_slice(&short_record(SEALED, next)),
        }
    }
}

fn short_record(kind: u8, value: u64) -> [u8; 9] {
    let mut record = [kind; 9];
    record[1..].copy_from_slice(&value.to_le_bytes());
    record
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("keys and notes have at most a few kilobytes")
}

/// Decoder of fixed-width values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    pub(super) fn u128(&mut self) -> Option<u128> {
        Some(u128::from_le_bytes(self.take(16)?.try_into().ok()?))
    }

    fn time(&mut self) -> Option<Time> {
        self.u64().map(Time::from_nanos)
    }

    /// Next record; `None` at the end, and at an invalid record.
    pub(super) fn record(&mut self) -> Option<Record<'a>> {
        let kind = *self.take(1)?.first()?;
        Some(match kind {
            EXCLUSIVE | SHARED | SLOT => {
                let (key, note, limit) = (self.u32()?, self.u32()?, self.u32()?);
                let token = LockToken::new(self.u64()?, self.u64()?);
                let ends = self.time()?;
                let key = self.take(usize::try_from(key).ok()?)?;
                let note = self.take(usize::try_from(note).ok()?)?;
                let mode = match kind {
                    EXCLUSIVE => Mode::Exclusive,
                    SHARED => Mode::Shared,
                    _ => Mode::Slot { limit },
                };
                Record::Granted { key, mode, token, ends, note }
            }
            RENEWED => Record::Renewed { number: self.u64()?, ends: self.time()? },
            ENDED => Record::Ended { number: self.u64()? },
            SEALED => Record::Sealed { next: self.u64()? },
            _ => return None,
        })
    }
}
