//! Replies, and messages that the server pushes to clients of our extension.

use super::field::{Fields, integer};
use super::request::ClaimId;
use super::write::{write_number, write_token};
use crate::LockToken;

/// Reply to a request: one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// `ok`.
    Done,
    /// `ok <token> <lease>`, in seconds, or in milliseconds for our own claims.
    Granted {
        /// Proof of the hold.
        token: LockToken,
        /// Length of the lease.
        lease: u64,
    },
    /// `acquired <token> <lease>`: granted, and still to be redeemed by `w`.
    Acquired {
        /// Proof of the hold.
        token: LockToken,
        /// Length of the lease.
        lease: u64,
    },
    /// `queued`.
    Queued,
    /// `ok <seconds>`: renewed; or another single number.
    Number(u64),
    /// `ok <milliseconds> <waiters>`: renewed by our own command.
    Renewed {
        /// Length of the lease.
        lease: u64,
        /// Number of waiters for the key.
        waiters: u64,
    },
    /// `timeout`.
    Timeout,
    /// `ok <json>`.
    Json(&'a [u8]),
    /// `error`, or `error_<why>`.
    Error(&'a [u8]),
}

impl<'a> Reply<'a> {
    /// Plain `error`.
    pub const ERROR: Reply<'static> = Reply::Error(b"");
    /// The limit of keys in use is reached.
    pub const MAX_LOCKS: Reply<'static> = Reply::Error(b"max_locks");
    /// The limit of waiters is reached.
    pub const MAX_WAITERS: Reply<'static> = Reply::Error(b"max_waiters");
    /// The grant expired before it was redeemed by `w`.
    pub const LEASE_EXPIRED: Reply<'static> = Reply::Error(b"lease_expired");
    /// A second `e` for the same key.
    pub const ALREADY_ENQUEUED: Reply<'static> = Reply::Error(b"already_enqueued");
    /// A `w` without an `e`.
    pub const NOT_ENQUEUED: Reply<'static> = Reply::Error(b"not_enqueued");
    /// The semaphore has another limit.
    pub const LIMIT_MISMATCH: Reply<'static> = Reply::Error(b"limit_mismatch");
    /// Authentication is required, or failed.
    pub const AUTH: Reply<'static> = Reply::Error(b"auth");
    /// The server is shutting down.
    pub const DRAINING: Reply<'static> = Reply::Error(b"draining");

    /// Writes the line.
    pub fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Done => out.extend_from_slice(b"ok"),
            Self::Granted { token, lease } => grant(out, b"ok ", token, lease),
            Self::Acquired { token, lease } => grant(out, b"acquired ", token, lease),
            Self::Queued => out.extend_from_slice(b"queued"),
            Self::Number(value) => {
                out.extend_from_slice(b"ok ");
                write_number(out, value);
            }
            Self::Renewed { lease, waiters } => {
                out.extend_from_slice(b"ok ");
                write_number(out, lease);
                out.push(b' ');
                write_number(out, waiters);
            }
            Self::Timeout => out.extend_from_slice(b"timeout"),
            Self::Json(json) => {
                out.extend_from_slice(b"ok ");
                out.extend_from_slice(json);
            }
            Self::Error(why) => {
                out.extend_from_slice(b"error");
                if !why.is_empty() {
                    out.push(b'_');
                    out.extend_from_slice(why);
                }
            }
        }
        out.push(b'\n');
    }

    /// Parses a line, without its line end. `None` if it is not a reply.
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = Fields::of(line);
        let word = fields.next()?;
        let rest = fields.clone().rest();
        if word == b"ok" && rest.first().is_some_and(|byte| matches!(byte, b'{' | b'[')) {
            return Some(Self::Json(rest));
        }
        let (first, second, third) = (fields.next(), fields.next(), fields.next());
        if third.is_some() {
            return None;
        }
        let number = |field: &[u8]| u64::try_from(integer(field)?).ok();
        match (word, first, second) {
            (b"ok", None, None) => Some(Self::Done),
            (b"ok", Some(first), Some(second)) => match LockToken::from_hex(first) {
                Some(token) => Some(Self::Granted { token, lease: number(second)? }),
                None => Some(Self::Renewed { lease: number(first)?, waiters: number(second)? }),
            },
            (b"ok", Some(first), None) => number(first).map(Self::Number),
            (b"acquired", Some(first), Some(second)) => {
                let token = LockToken::from_hex(first)?;
                Some(Self::Acquired { token, lease: number(second)? })
            }
            (b"queued", None, None) => Some(Self::Queued),
            (b"timeout", None, None) => Some(Self::Timeout),
            (b"error", None, None) => Some(Self::ERROR),
            (word, None, None) => word.strip_prefix(b"error_").map(Self::Error),
            _ => None,
        }
    }
}

/// Message that the server pushes to clients that sent `hello`: a line that begins with `!`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Push<'a> {
    /// A waiting claim was granted.
    Granted {
        /// Granted claim.
        id: ClaimId,
        /// Proof of the hold.
        token: LockToken,
        /// Length of the lease in milliseconds.
        lease: u64,
    },
    /// A waiting claim no longer exists.
    Gone {
        /// Former claim.
        id: ClaimId,
    },
    /// A waiter has asked for a lock that this connection holds.
    HandoffRequested {
        /// Fencing number of the hold.
        number: u64,
    },
    /// A hold ended without a release.
    Ended {
        /// Fencing number of the hold.
        number: u64,
        /// Reason: `expired`, or `evicted` and the operator's reason.
        why: &'a [u8],
    },
    /// A watched key has changed.
    Changed {
        /// Id of the watch.
        id: u64,
    },
}

impl<'a> Push<'a> {
    /// Writes the line.
    pub fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Granted { id: ClaimId(id), token, lease } => {
                out.extend_from_slice(format!("! granted {id:032x} ").as_bytes());
                write_token(out, token);
                out.push(b' ');
                write_number(out, lease);
            }
            Self::Gone { id: ClaimId(id) } => {
                out.extend_from_slice(format!("! gone {id:032x}").as_bytes());
            }
            Self::HandoffRequested { number } => {
                out.extend_from_slice(b"! wanted ");
                write_number(out, number);
            }
            Self::Ended { number, why } => {
                out.extend_from_slice(b"! ended ");
                write_number(out, number);
                out.push(b' ');
                out.extend_from_slice(why);
            }
            Self::Changed { id } => {
                out.extend_from_slice(b"! changed ");
                write_number(out, id);
            }
        }
        out.push(b'\n');
    }

    /// Parses a line, without its line end. `None` if it is not a known message.
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = Fields::of(line.strip_prefix(b"!")?);
        let word = fields.next()?;
        let first = str::from_utf8(fields.next()?).ok()?;
        match word {
            b"granted" => Some(Self::Granted {
                id: first.parse().ok()?,
                token: LockToken::from_hex(fields.next()?)?,
                lease: str::from_utf8(fields.next()?).ok()?.parse().ok()?,
            }),
            b"gone" => Some(Self::Gone { id: first.parse().ok()? }),
            b"wanted" => Some(Self::HandoffRequested { number: first.parse().ok()? }),
            b"ended" => Some(Self::Ended { number: first.parse().ok()?, why: fields.rest() }),
            b"changed" => Some(Self::Changed { id: first.parse().ok()? }),
            _ => None,
        }
    }
}

fn grant(out: &mut Vec<u8>, word: &[u8], token: LockToken, lease: u64) {
    out.extend_from_slice(word);
    write_token(out, token);
    out.push(b' ');
    write_number(out, lease);
}
