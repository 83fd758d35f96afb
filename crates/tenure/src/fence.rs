//! Fencing: how a protected resource refuses a holder that comes too late.
//!
//! A lock cannot stop a process that is frozen between looking at its guard and writing. The machine is suspended, the
//! garbage collector or the scheduler takes its time, a packet lingers in the network: meanwhile the lease ends,
//! another acquires the lock and does its work, and then the first one thaws and finishes its write, sure of a lock
//! that it lost long ago. Nobody but the resource can see that. It needs a number to see it by: the [fencing
//! token](crate::Guard::fencing_token), which grows with every grant of a key.
//!
//! # What holder and resource do
//!
//! 1. **The holder sends its token with every write.**
//! 2. **The resource remembers the newest token it has seen, and accepts a write only if its token is as new or
//!    newer.** Check and write must be one step. If a newer holder can get in between, a late write still lands on top
//!    of its own.
//! 3. **A new holder installs its token before it reads.** Whatever its predecessor wrote until then, it sees;
//!    whatever its predecessor tries afterwards is refused. Without this it may read, be overwritten by a late write,
//!    and then build on what is no longer there.
//!
//! Here is that for three kinds of resource: [`Gate`] for one within a process, [`sql`] for rows in PostgreSQL,
//! [`http`] for a service behind requests.
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
//! // An operator takes the lock away, and another holder comes.
//! client.store().evict(first.key(), first.fencing_token(), "it hangs").await?;
//! let second = client.lock("reports").acquire().await?;
//! gate.admit(second.fencing_token())?;
//!
//! let stale = gate.admit(first.fencing_token()).unwrap_err();
//! assert_eq!(stale.newest, second.fencing_token());
//! # Ok(()) }
//! ```
//!
//! # What it does not do
//!
//! - It tells holders apart, not the tasks of one holder: those have the same token.
//! - It cannot call back what left the resource: mail that was sent, a document that was printed. A service that knows
//!   neither tokens nor preconditions cannot be fenced.
//! - It is for locks that one holds at a time. Of many slots or shared holds it would refuse all but the newest.
//! - It compares tokens of one key in one store. Protect a resource by one key only; if that key moves to another
//!   store, clear what the resource remembers while nobody holds the lock.
//! - It needs tokens that are ordered. A lock server without tenure's extension of its protocol tells nothing of that:
//!   there [`fencing_token`](crate::Guard::fencing_token) is [`FencingToken::NONE`](crate::FencingToken::NONE), which
//!   everything here refuses, with what [`NoToken`] says.
//! - It keeps nobody out. **A token is public, not a secret**: it may be logged and shown, and whoever can reach the
//!   resource can make one up, even one so high that every holder is refused from then on. Check who calls as you would
//!   without a lock.

use std::fmt;

use crate::{Error, ErrorKind, FencingToken};

mod gate;
pub mod http;
pub mod sql;

pub use gate::Gate;

/// A write was refused: its token is older than one that the resource has seen, or is
/// [`FencingToken::NONE`](crate::FencingToken::NONE), which is older than every token.
///
/// The hold that the token belongs to is over, whatever its guard says. Stop the work; if it is still wanted, acquire
/// the lock anew and begin with reading. As a [`tenure::Error`](crate::Error) it is of the kind
/// [`Lost`](crate::ErrorKind::Lost).
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
            "token {offered} is older than {newest}, which was seen before: another holds or held the lock since, so \
             stop, and acquire it anew before writing"
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

/// A hold has no fencing token, so a write under it cannot be fenced.
///
/// Its lock server speaks the plain protocol, which does not tell whether the server's numbers are ordered. As a
/// [`tenure::Error`](crate::Error) it is of the kind [`Unsupported`](crate::ErrorKind::Unsupported).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoToken;

impl fmt::Display for NoToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the hold has no fencing token: its lock server does not tell whether its numbers are ordered. Use tenure \
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

/// A token as it is sent to a resource.
fn encoded_token(token: FencingToken) -> Result<String, NoToken> {
    if token.is_none() { Err(NoToken) } else { Ok(token.to_string()) }
}
