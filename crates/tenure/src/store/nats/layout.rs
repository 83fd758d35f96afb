//! The two forms of bucket: ours, and that of nlock's participants.

use std::time::Duration;

use tenure_core::Key;
use tenure_core::table::KeySpace;

use super::api::{KeyWrite, Message};
use super::format::{self, KeyRecord};
use super::nlock;

/// How a bucket is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BucketLayout {
    /// The lease is in the record, and a silent holder is taken over by who has watched it.
    Native,
    /// The owner's id is the value, and the bucket's ttl removes it.
    Nlock {
        /// The bucket's ttl.
        ttl: Duration,
    },
}

impl BucketLayout {
    /// The key of a record below its bucket.
    pub(super) fn name(self, key: &Key, space: KeySpace) -> String {
        match self {
            Self::Native => format::name(key, space),
            Self::Nlock { .. } => nlock::name(key),
        }
    }

    /// The key that a name below the bucket stands for.
    pub(super) fn key(self, name: &str, space: KeySpace) -> Option<Key> {
        match self {
            Self::Native => {
                let rest = name.strip_prefix(format::prefix(space))?.strip_prefix('.')?;
                format::unescape(rest)
            }
            Self::Nlock { .. } => nlock::key(name),
        }
    }

    pub(super) fn write(self, record: &KeyRecord) -> KeyWrite {
        match self {
            Self::Native => KeyWrite { value: format::write(record), ..KeyWrite::default() },
            Self::Nlock { .. } => nlock::write(record),
        }
    }

    /// The record of a message; else what is wrong with it.
    pub(super) fn read(self, message: &Message) -> Result<KeyRecord, String> {
        let Some(value) = &message.value else { return Ok(KeyRecord::default()) };
        match self {
            Self::Native => format::read(value),
            Self::Nlock { ttl } => {
                nlock::read(value, message.about.as_deref(), message.sequence, ttl)
            }
        }
    }
}
