//! Fencing: how a protected resource refuses late writes of a former holder.
//!
//! A lock cannot stop a process that is frozen between checking its guard and writing. The machine is suspended, the
//! garbage collector or the scheduler pauses the process, or a packet is delayed in the network. Meanwhile the lease
//! ends, and another process acquires the lock and does its work. Then the first process resumes and ends its write,
//! though it lost the lock long ago. Only the resource can detect this, and it needs a number to do so: the [fencing
//! token](crate::Guard::fencing_token), which grows with every grant of a key.
//!
//! # Rules for holder and resource
//!
//! 1. **The holder sends its token with every write.**
//! 2. **The resource remembers the newest token it has seen, and accepts a write only if its token is as new or
//!    newer.** Check and write must be one atomic step. If a newer holder can write in between, the late write still
//!    overwrites the newer one.
//! 3. **A new holder installs its token before it reads.** It then sees every accepted write of its predecessor,
//!    and every later write of the predecessor is refused. Without this rule the new holder may read, a late write may
//!    change what it has read, and it continues from data that no longer exist.
//!
//! This module does that for three kinds of resource: [`Gate`] for a resource within a process, [`sql`] for rows in
//! PostgreSQL, [`http`] for a service behind requests.
//!
//! ```
//! use tenure::fence::Gate;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
//! # let client = tenure::Client::connect("memory:").await?;
//! let gate = Gate::new();
//!
//! let first = client.lock("reports").acquire().await?;
//! gate.admit(first.fencing_token())?;
//!
//! // An operator breaks the lock, and another holder acquires it.
//! client.store().evict(first.key(), first.fencing_token(), "it hangs").await?;
//! let second = client.lock("reports").acquire().await?;
//! gate.admit(second.fencing_token())?;
//!
//! let stale = gate.admit(first.fencing_token()).unwrap_err();
//! assert_eq!(stale.newest, second.fencing_token());
//! # Ok(()) }
//! ```
//!
//! # Limits
//!
//! - Fencing distinguishes holders, not the tasks of one holder: those have the same token.
//! - It cannot undo effects outside the resource: mail that was sent, a document that was printed. A service that knows
//!   neither tokens nor preconditions cannot be fenced.
//! - It is for exclusive locks. Of several slots or shared holds it would refuse all but the newest.
//! - It compares tokens of one key in one store. Protect a resource by one key only. If that key moves to another
//!   store, clear the token that the resource remembers while the lock is free.
//! - It needs ordered tokens. A lock server without tenure's protocol extension does not say whether its tokens are
//!   ordered. There [`fencing_token`](crate::Guard::fencing_token) is
//!   [`FencingToken::NONE`](crate::FencingToken::NONE), which everything here refuses with [`NoToken`].
//! - It is not access control. **A token is public, not a secret**: it may be logged and shown, and any client that can
//!   reach the resource can invent one, even one so high that every later holder is refused. Authenticate callers
//!   as you would without a lock.

use std::fmt;

use crate::{Error, ErrorKind, FencingToken};

mod gate;
pub mod http;
pub mod sql;

pub use gate::Gate;

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

/// Decimal text of a token, as it is sent to a resource.
fn encoded_token(token: FencingToken) -> Result<String, NoToken> {
    if token.is_none() { Err(NoToken) } else { Ok(token.to_string()) }
}
