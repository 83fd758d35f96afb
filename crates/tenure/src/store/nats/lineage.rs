//! Identity of the stream behind a bucket, and the highest sequence seen of it.
//!
//! A bucket can be deleted and created again under the same name, and a stream can lose acknowledged writes. In both
//! cases sequences repeat, and with them fencing tokens. A new bucket gives its tokens another epoch. A stream that
//! lost writes is detected and refused.

use tenure_core::Time;
use tenure_core::record::StoreTime;

use super::bucket::StreamInfo;
use crate::{Error, ErrorKind, Result};

/// Known identity, sequence and time of the stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lineage {
    /// Creation time of the stream in nanoseconds: the epoch of fencing tokens.
    pub(super) epoch: u64,
    /// Highest sequence seen.
    pub(super) highest_sequence: u64,
    /// Last reading of the server's time.
    server_time: StoreTime,
}

impl Lineage {
    pub(super) fn new(info: &StreamInfo, now: Time) -> Result<Self> {
        let server_time = StoreTime::new(info.server_time()?, now);
        Ok(Self { epoch: info.epoch()?, highest_sequence: info.last_sequence(), server_time })
    }

    pub(super) fn note(&mut self, sequence: u64) {
        self.highest_sequence = self.highest_sequence.max(sequence);
    }

    /// Server time now, in nanoseconds, or a lower bound of it.
    pub(super) fn server_time(&self, now: Time) -> u64 {
        self.server_time.at(now)
    }

    /// True if the server's time should be read again.
    pub(super) fn is_server_time_old(&self, now: Time) -> bool {
        self.server_time.is_stale(now)
    }

    /// Updates from the stream's present info. A stream that was created again begins a new epoch.
    pub(super) fn refresh(&mut self, info: &StreamInfo, now: Time) -> Result<()> {
        let epoch = info.epoch()?;
        if epoch != self.epoch {
            (self.epoch, self.highest_sequence) = (epoch, 0);
        }
        self.note(info.last_sequence());
        self.server_time = StoreTime::new(info.server_time()?, now);
        Ok(())
    }
}

/// Error for a stream that has lost acknowledged writes.
pub(super) fn went_back_error(known: u64, found: u64) -> Error {
    let message = format!(
        "the stream went back from sequence {known} to {found}: it lost acknowledged writes, and its fencing tokens would \
         repeat; delete the bucket and create it again"
    );
    Error::new(ErrorKind::Unavailable, message)
}
