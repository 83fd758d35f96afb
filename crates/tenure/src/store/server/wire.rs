//! The protocol as this store uses it: leases, keys and owned replies.

use std::time::Duration;

use tenure_core::wire::Reply;
use tenure_core::{Key, LockToken};

/// Protocol that the server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// The plain protocol with tenure's extension.
    Extended,
    /// The plain protocol of dflockd, without the extension.
    Plain,
}

impl Protocol {
    /// Converts a lease from the wire.
    pub(super) fn lease_from_wire(self, lease: u64) -> Duration {
        match self {
            Self::Extended => Duration::from_millis(lease),
            Self::Plain => Duration::from_secs(lease),
        }
    }

    /// Converts a lease for the wire, rounded up: never shorter than requested.
    pub(super) fn lease_to_wire(self, ttl: Duration) -> u64 {
        let unit = match self {
            Self::Extended => Duration::from_millis(1),
            Self::Plain => Duration::from_secs(1),
        };
        u64::try_from(ttl.as_nanos().div_ceil(unit.as_nanos())).unwrap_or(u64::MAX)
    }
}

/// Reply of a server, parsed and owned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OwnedReply {
    Done,
    Granted { token: LockToken, lease: u64 },
    Acquired,
    Queued,
    Number(u64),
    Renewed { lease: u64, waiters: u64 },
    Timeout,
    Json(Box<[u8]>),
    Error(String),
}

impl OwnedReply {
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        Some(match Reply::parse(line)? {
            Reply::Done => Self::Done,
            Reply::Granted { token, lease } => Self::Granted { token, lease },
            Reply::Acquired { .. } => Self::Acquired,
            Reply::Queued => Self::Queued,
            Reply::Number(number) => Self::Number(number),
            Reply::Renewed { lease, waiters } => Self::Renewed { lease, waiters },
            Reply::Timeout => Self::Timeout,
            Reply::Json(json) => Self::Json(json.into()),
            Reply::Error(why) => Self::Error(String::from_utf8_lossy(why).into_owned()),
        })
    }
}

/// Reason for the lack of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoReply {
    /// The request was not sent.
    Unsent,
    /// The connection ended before the reply arrived.
    Disconnected,
    /// The time limit passed before the reply arrived.
    TimedOut,
}

/// Key as it is sent. The protocol allows no blanks in keys, and our keys contain no control characters. So a blank is
/// sent as [`WIRE_BLANK`], which sorts in the same place: below all other characters of our keys.
pub(super) fn wire_key(key: &Key) -> Vec<u8> {
    wire_text(key.as_str())
}

pub(super) fn wire_text(text: &str) -> Vec<u8> {
    text.bytes().map(|byte| if byte == b' ' { WIRE_BLANK } else { byte }).collect()
}

/// Byte that is sent for a blank.
pub(super) const WIRE_BLANK: u8 = 0x1f;
