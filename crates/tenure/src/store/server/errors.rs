//! Errors for missing replies and refusals of a server.

use super::wire::{NoReply, OwnedReply};
use crate::{Error, ErrorKind};

const NEEDS_SECRET: &str = "the server refused the auth token: give the right one in $TENURE_AUTH_TOKEN, ?auth_token_file=FILE or the URL";

/// Error of a request that changes something and got no reply.
pub(super) fn unknown_outcome(no_reply: NoReply) -> Error {
    match no_reply {
        NoReply::Unsent => unavailable(no_reply),
        NoReply::Disconnected => Error::new(
            ErrorKind::Unknown,
            "the connection ended before the server replied: the request may have been executed",
        ),
        NoReply::TimedOut => Error::new(
            ErrorKind::Unknown,
            "the server did not reply in time: the request may have been executed",
        ),
    }
}

/// Error of a request that changes nothing and got no reply.
pub(super) fn unavailable(no_reply: NoReply) -> Error {
    let message = match no_reply {
        NoReply::Unsent => "the request could not be sent in time: is the server up?",
        NoReply::Disconnected => "the connection to the server ended",
        NoReply::TimedOut => "the server did not reply in time",
    };
    Error::new(ErrorKind::Unavailable, message)
}

/// Translates the server's word for a refusal.
pub(super) fn refusal_error(why: &str) -> Error {
    let (kind, message) = match why {
        "limit_mismatch" => {
            (ErrorKind::Invalid, "the semaphore is in use with another number of slots")
        }
        "claimed_elsewhere" => (
            ErrorKind::Unavailable,
            "the server has not noticed yet that an earlier connection ended",
        ),
        "max_locks" => (ErrorKind::Unavailable, "the server's limit of keys in use is reached"),
        "max_waiters" => {
            (ErrorKind::Unavailable, "the server's limit of waiters for this key is reached")
        }
        "max_claims" => {
            (ErrorKind::Unavailable, "the server's limit of claims of this process is reached")
        }
        "draining" => (ErrorKind::Unavailable, "the server is stopping"),
        "lease_expired" => (ErrorKind::Unavailable, "the lease ended before the grant arrived"),
        "auth" => (ErrorKind::Denied, NEEDS_SECRET),
        _ => (ErrorKind::Unavailable, "the server refused the claim without a reason"),
    };
    Error::new(kind, message)
}

/// Error of a reply that does not match its request.
pub(super) fn unexpected_reply(reply: &OwnedReply) -> Error {
    match reply {
        OwnedReply::Error(why) if !why.is_empty() => refusal_error(why),
        _ => Error::new(
            ErrorKind::Unavailable,
            "the server sent a reply that does not match the request",
        ),
    }
}

pub(super) fn unreadable_reply() -> Error {
    Error::new(ErrorKind::Unavailable, "the server sent a reply that cannot be parsed")
}
