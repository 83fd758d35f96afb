//! The records of one turn of the server, encoded for one write.

use std::time::Duration;

use super::format::{FRAME_END_MARK, FRAME_HEAD_LEN, Record, seal};

/// Records in frames. The buffer is reused from turn to turn.
#[derive(Debug, Default)]
pub(super) struct RecordBatch {
    bytes: Vec<u8>,
    /// Offset of each frame.
    starts: Vec<usize>,
    /// True once the last frame has its mark.
    closed: bool,
    /// Latest start of a lease so far: the server's clock is not behind it.
    as_of: u64,
    /// Largest fencing number granted.
    pub(super) highest: u64,
    /// Longest lease granted or renewed.
    pub(super) longest: Duration,
}

/// Length at which a frame is closed and the next one begins.
const FRAME_TARGET_BYTES: usize = 1 << 20;
/// Buffer size above which memory is freed after the turn.
const MAX_RETAINED_BYTES: usize = 1 << 22;

impl RecordBatch {
    #[inline]
    pub(super) fn push(&mut self, record: &Record<'_>) {
        if self.starts.last().is_none_or(|start| self.bytes.len() - start > FRAME_TARGET_BYTES) {
            self.begin();
        }
        record.encode(&mut self.bytes);
    }

    /// Accounts for a lease that ends at `ends`. It began at `ends - lease`, so the present time is not before that.
    #[inline]
    pub(super) fn note_lease(&mut self, lease: Duration, ends: u64) {
        let nanos = u64::try_from(lease.as_nanos()).unwrap_or(u64::MAX);
        self.as_of = self.as_of.max(ends.saturating_sub(nanos));
        self.longest = self.longest.max(lease);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Number of bytes to write, the last frame's mark included.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() + usize::from(!self.closed && !self.is_empty())
    }

    /// Completes the frames, and returns the bytes to write at `offset` of file `sequence`.
    pub(super) fn seal(&mut self, sequence: u64, offset: u64) -> &[u8] {
        if !self.closed && !self.is_empty() {
            self.bytes.push(FRAME_END_MARK);
        }
        self.closed = true;
        let mut end = self.bytes.len();
        for &start in self.starts.iter().rev() {
            let place = offset + start as u64;
            seal(&mut self.bytes[start..end], self.as_of, sequence, place);
            end = start;
        }
        &self.bytes
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(MAX_RETAINED_BYTES);
        self.starts.clear();
        self.closed = false;
        self.highest = 0;
        self.longest = Duration::ZERO;
    }

    #[inline(never)]
    fn begin(&mut self) {
        if !self.is_empty() {
            self.bytes.push(FRAME_END_MARK);
        }
        self.starts.push(self.bytes.len());
        self.bytes.resize(self.bytes.len() + FRAME_HEAD_LEN, 0);
    }
}
