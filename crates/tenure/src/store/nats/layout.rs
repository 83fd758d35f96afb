//! The two layouts of a bucket: tenure's own, and that of nlock.

use std::time::Duration;

use tenure_core::Key;
use tenure_core::table::KeySpace;

use super::api::{KeyWrite, Message};
use super::format::{self, KeyRecord};
use super::nlock;

/// Layout of a bucket. The URL option and the messages call it `form`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BucketLayout {
    /// The record contains the lease. A holder that stops renewing is taken over by a client that has observed it.
    Native,
    /// The value is the owner's id. The bucket's ttl removes it.
    Nlock {
        /// The bucket's ttl.
        ttl: Duration,
    },
}

impl BucketLayout {
    /// Name of a key's record in the bucket.
    pub(super) fn name(self, key: &Key, space: KeySpace) -> String {
        match self {
            Self::Native => format::name(key, space),
            Self::Nlock { .. } => nlock::name(key),
        }
    }

    /// Key of a name in the bucket; `None` if the name is not that of a record in this key space.
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

    /// Parses the record of a message. The error says what is wrong with the value.
    pub(super) fn read(self, message: &Message) -> Result<KeyRecord, String> {
        let Some(value) = &message.value else { return Ok(KeyRecord::default()) };
        match self {
            Self::Native => format::read(value),
            Self::Nlock { ttl } => {
                nlock::read(value, message.record_header.as_deref(), message.sequence, ttl)
            }
        }
    }
}
