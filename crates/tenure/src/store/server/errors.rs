//! What silence and refusals of a server mean for the caller.

use super::connection::{NoReply, OwnedReply};
use super::dial::NEEDS_SECRET;
use crate::{Error, ErrorKind};

/// The error for a request that changes something and has no answer.
pub(super) fn unknown_outcome(silence: NoReply) -> Error {
    match silence {
        NoReply::Unsent => unavailable(silence),
        NoReply::Disconnected => Error::new(
            ErrorKind::Unknown,
            "the connection ended before the server answered: it may have done it",
        ),
        NoReply::TimedOut => {
            Error::new(ErrorKind::Unknown, "the server did not answer in time: it may have done it")
        }
    }
}

/// The error for a request that changes nothing and has no answer.
pub(super) fn unavailable(silence: NoReply) -> Error {
    let message = match silence {
        NoReply::Unsent => "the server could not be asked in time: is it up?",
        NoReply::Disconnected => "the connection to the server ended",
        NoReply::TimedOut => "the server did not answer in time",
    };
    Error::new(ErrorKind::Unavailable, message)
}

/// What the server's word for a refusal means.
pub(super) fn refusal_error(why: &str) -> Error {
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
pub(super) fn unexpected_reply(said: &OwnedReply) -> Error {
    match said {
        OwnedReply::Error(why) if !why.is_empty() => refusal_error(why),
        _ => Error::new(ErrorKind::Unavailable, "the server gave an answer that makes no sense"),
    }
}

pub(super) fn unreadable_reply() -> Error {
    Error::new(ErrorKind::Unavailable, "the server told what cannot be understood")
}
