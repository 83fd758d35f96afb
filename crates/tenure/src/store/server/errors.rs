//! What silence and refusals of a server mean for the caller.

use super::dial::NEEDS_SECRET;
use super::link::{Said, Silence};
use crate::{Error, ErrorKind};

/// The error for a request that changes something and has no answer.
pub(super) fn silent(silence: Silence) -> Error {
    match silence {
        Silence::Unsent => unread(silence),
        Silence::Cut => Error::new(
            ErrorKind::Unknown,
            "the connection ended before the server answered: it may have done it",
        ),
        Silence::Late => {
            Error::new(ErrorKind::Unknown, "the server did not answer in time: it may have done it")
        }
    }
}

/// The error for a request that changes nothing and has no answer.
pub(super) fn unread(silence: Silence) -> Error {
    let message = match silence {
        Silence::Unsent => "the server could not be asked in time: is it up?",
        Silence::Cut => "the connection to the server ended",
        Silence::Late => "the server did not answer in time",
    };
    Error::new(ErrorKind::Unavailable, message)
}

/// What the server's word for a refusal means.
pub(super) fn refused(why: &str) -> Error {
    let (kind, message) = match why {
        "limit_mismatch" => {
            (ErrorKind::Invalid, "the semaphore is in use with another number of slots")
        }
        "claimed_elsewhere" => (
            ErrorKind::Unavailable,
            "the server has yet to notice that an earlier connection ended",
        ),
        "max_locks" => (ErrorKind::Unavailable, "the server has as many keys in use as it may"),
        "max_waiters" => (ErrorKind::Unavailable, "as many wait for the key as may"),
        "max_claims" => (ErrorKind::Unavailable, "this process has as many claims as it may"),
        "draining" => (ErrorKind::Unavailable, "the server is stopping"),
        "lease_expired" => (ErrorKind::Unavailable, "the grant was over before we heard of it"),
        "auth" => (ErrorKind::Denied, NEEDS_SECRET),
        _ => (ErrorKind::Unavailable, "the server refused the claim without saying why"),
    };
    Error::new(kind, message)
}

/// The error for a reply that does not go with its request.
pub(super) fn strange(said: &Said) -> Error {
    match said {
        Said::Error(why) if !why.is_empty() => refused(why),
        _ => Error::new(ErrorKind::Unavailable, "the server gave an answer that makes no sense"),
    }
}

pub(super) fn garbled() -> Error {
    Error::new(ErrorKind::Unavailable, "the server told what cannot be understood")
}
