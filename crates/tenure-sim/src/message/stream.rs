//! Messages of a stream, and the records in them.

use std::fmt;
use std::time::Duration;

use tenure_core::Time;
use tenure_core::record::{CasRecord, RecordHolder};
use tenure_core::table::Mode;

/// A message of a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamMessage {
    pub(crate) key: usize,
    pub(crate) sequence: u64,
    /// Value of the key; `None` for a marker that deletes it.
    pub(crate) record: Option<StreamRecord>,
    /// Time of the write, by the leading server's clock, in nanoseconds.
    pub(crate) stamp: u64,
    /// Time of the write, for the checker.
    pub(crate) changed: Time,
}

/// Record of a key, as it is written: exclusive holds only.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StreamRecord {
    pub(crate) epoch: u64,
    fence: u64,
    pub(crate) holder: Option<StreamHolder>,
}

/// Holder in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamHolder {
    pub(crate) claim: u64,
    grant_number: Option<u64>,
    renewal_count: u64,
    lease: Duration,
    /// Wall clock of the writer, in nanoseconds.
    wall: i64,
}

impl fmt::Debug for StreamMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of key {}: ", self.sequence, self.key)?;
        match self.record {
            Some(record) => record.fmt(f),
            None => f.write_str("deleted"),
        }
    }
}

impl fmt::Debug for StreamRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(holder) = self.holder else { return write!(f, "free, fence {}", self.fence) };
        let StreamHolder { claim, grant_number, renewal_count, .. } = holder;
        write!(f, "claim {claim}, grant {grant_number:?}, renewal {renewal_count}")
    }
}

impl StreamRecord {
    /// Record as the core knows it. The description of a holder is the wall clock of the last writer.
    pub(crate) fn to_core(self) -> CasRecord<i64> {
        let holders = self.holder.map(|holder| RecordHolder {
            claim: u128::from(holder.claim),
            mode: Mode::Exclusive,
            grant_number: holder.grant_number,
            renewal_count: holder.renewal_count,
            lease: Some(holder.lease),
            held_for: Duration::ZERO,
            by: holder.wall,
        });
        let Self { epoch, fence, .. } = self;
        CasRecord { epoch, fence, served: 0, holders: holders.into_iter().collect() }
    }

    /// Record of the core, written by a client with this wall clock.
    pub(crate) fn from_core(record: &CasRecord<i64>, wall: i64) -> Self {
        let holder = record.holders.first().map(|holder| StreamHolder {
            claim: u64::try_from(holder.claim).unwrap_or(0),
            grant_number: holder.grant_number,
            renewal_count: holder.renewal_count,
            lease: holder.lease.unwrap_or_default(),
            wall,
        });
        Self { epoch: record.epoch, fence: record.fence, holder }
    }
}
