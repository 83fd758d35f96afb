//! Refusals of a protected resource.

use std::fmt;

use crate::{Error, ErrorKind, FencingToken};

/// Refusal of a write: its token is older than one that the resource has seen, or is
/// [`FencingToken::NONE`](crate::FencingToken::NONE), which is older than every token.
///
/// The hold that the token belongs to has ended, even if its guard still reports it as held. Stop the work. If the work
/// is still needed, acquire the lock again and begin with reading. Converted to a [`tenure::Error`](crate::Error), its
/// kind is [`Lost`](crate::ErrorKind::Lost).
///
/// ```
/// use tenure::fence::Stale;
/// use tenure::{ErrorKind, FencingToken};
///
/// let stale = Stale { offered: FencingToken::new(0, 41), newest: FencingToken::new(0, 42) };
/// assert!(stale.to_string().starts_with("token 41 is older than 42"));
/// assert_eq!(tenure::Error::from(stale).kind(), ErrorKind::Lost);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// The token that came with the write.
    pub offered: FencingToken,
    /// The newest token that the resource has seen.
    pub newest: FencingToken,
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offered, newest } = self;
        if offered.is_none() {
            return NoToken.fmt(f);
        }
        write!(
            f,
            "token {offered} is older than {newest}, which the resource has seen: the lock was granted again since, so \
             stop, and acquire it again before writing"
        )
    }
}

impl std::error::Error for Stale {}

impl From<Stale> for Error {
    fn from(stale: Stale) -> Self {
        if stale.offered.is_none() {
            return NoToken.into();
        }
        let message = format!("the protected resource refused the token {}", stale.offered);
        Self::new(ErrorKind::Lost, message).because(stale)
    }
}

/// Refusal of a hold without a fencing token: a write under it cannot be fenced.
///
/// The lock server speaks the plain protocol, which does not say whether its tokens are ordered. Converted to a
/// [`tenure::Error`](crate::Error), its kind is [`Unsupported`](crate::ErrorKind::Unsupported).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoToken;

impl fmt::Display for NoToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the hold has no fencing token: its lock server does not say whether its tokens are ordered. Use tenure \
             serve, or declare dflockd 2.1 or newer by ?fencing=ordered in the URL of the store",
        )
    }
}

impl std::error::Error for NoToken {}

impl From<NoToken> for Error {
    fn from(no_token: NoToken) -> Self {
        Self::new(ErrorKind::Unsupported, no_token.to_string())
    }
}
