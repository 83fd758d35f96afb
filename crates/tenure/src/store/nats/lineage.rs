//! Which life of the stream we write to, and that its sequence never goes back.

use tenure_core::Time;
use tenure_core::record::StoreTime;

use super::bucket::StreamInfo;
use crate::{Error, ErrorKind, Result};

/// What is known of the stream behind the bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lineage {
    /// The stream's creation: the epoch of tokens.
    pub(super) epoch: u64,
    /// The largest sequence seen of it.
    pub(super) high: u64,
    /// The server's time.
    server: StoreTime,
}

impl Lineage {
    pub(super) fn new(info: &StreamInfo, now: Time) -> Result<Self> {
        let high = info.last_sequence();
        Ok(Self { epoch: info.epoch()?, high, server: StoreTime::new(info.time()?, now) })
    }

    pub(super) fn note(&mut self, sequence: u64) {
        self.high = self.high.max(sequence);
    }

    /// The server's time now, or what it is at least.
    pub(super) fn server_time(&self, now: Time) -> u64 {
        self.server.at(now)
    }

    /// Whether the server's time is to be asked for again.
    pub(super) fn is_old(&self, now: Time) -> bool {
        self.server.is_stale(now)
    }

    /// Takes note of what the stream says now. A stream that was made anew begins a new epoch.
    pub(super) fn refresh(&mut self, info: &StreamInfo, now: Time) -> Result<()> {
        let epoch = info.epoch()?;
        if epoch != self.epoch {
            (self.epoch, self.high) = (epoch, 0);
        }
        self.note(info.last_sequence());
        self.server = StoreTime::new(info.time()?, now);
        Ok(())
    }
}

/// The error for a stream that has forgotten what it acknowledged.
pub(super) fn went_back(known: u64, told: u64) -> Error {
    let message = format!(
        "the stream went back from sequence {known} to {told}: it lost writes that it had acknowledged, and its fencing \
         tokens would repeat; make the bucket anew"
    );
    Error::new(ErrorKind::Unavailable, message)
}
