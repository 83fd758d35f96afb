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

use crate::FencingToken;

mod gate;
pub mod http;
mod refusal;
pub mod sql;

pub use gate::Gate;
pub use refusal::{NoToken, Stale};

/// Decimal text of a token, as it is sent to a resource.
fn encoded_token(token: FencingToken) -> Result<String, NoToken> {
    if token.is_none() { Err(NoToken) } else { Ok(token.to_string()) }
}
