//! Requests to a store, and its answers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::Key;
use tenure_core::keeper::Loss;
use tenure_core::table::Mode;

use super::identity::Identity;
use super::view::Version;

/// Request for a hold.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "each option is independent of the others")]
pub struct Claim {
    /// Identity of this claim, the same for every attempt. Unique over all keys and processes, and not a secret.
    pub id: u128,
    /// Key to hold.
    pub key: Key,
    /// Mode of the hold.
    pub mode: Mode,
    /// Requested lease: time that the hold lasts unless renewed.
    pub ttl: Duration,
    /// Identity of the claimant.
    pub by: Arc<Identity>,
    /// Take a place in the queue if the key cannot be granted at once. If false, the answer is
    /// [`Contended`](super::Answer::Contended) instead, but a place that an earlier attempt of this claim took is still
    /// returned. Either way, the claim does not overtake the waiters of a first-come-first-served queue: while they
    /// wait, it is not granted, even if the key has no holder. On PostgreSQL's advisory locks this applies to waiters in
    /// the server's queue: the claim may overtake those that stand by for a place there.
    pub queue: bool,
    /// Fail with [`ErrorKind::Contention`](crate::ErrorKind::Contention) if another claim has the only place in the queue. Set only for stores with
    /// [`QueueKind::Single`](super::QueueKind::Single).
    pub fail_if_contended: bool,
    /// Use a first-come-first-served queue, on a store that has such a queue only on request. Other stores ignore this.
    pub fair: bool,
    /// The hold must be able to outlive the process. Needs
    /// [`Capabilities::detached`](super::Capabilities::detached).
    pub detached: bool,
}

impl Claim {
    /// Creates a claim that takes a place in the queue, if the store has one, and every other option unset.
    pub fn new(id: u128, key: Key, mode: Mode, ttl: Duration, by: Arc<Identity>) -> Self {
        let queue = true;
        Self {
            id,
            key,
            mode,
            ttl,
            by,
            queue,
            fail_if_contended: false,
            fair: false,
            detached: false,
        }
    }
}

/// Reason why a claim was not granted: another holder has the key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Contended {
    /// One of the holders, if the store knows it.
    pub holder: Option<Identity>,
    /// Version of the key at the time of the answer: [`Store::changed`](super::Store::changed) resolves when the key has another version.
    pub version: Version,
    /// Minimum pause before the next claim.
    pub retry_after: Option<Duration>,
    /// Explanation for the caller, if the name of the holder does not explain the answer.
    pub note: Option<String>,
}

impl Contended {
    /// Creates the answer that `holder` has the key, which has this version.
    pub fn new(holder: Option<Identity>, version: Version) -> Self {
        Self { holder, version, retry_after: None, note: None }
    }
}

/// Renewal that the store confirmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Renewed {
    /// True if the answer to the renewal shows that a waiter has asked for the lock. No extra request is made for this.
    pub handoff_requested: bool,
}

impl Renewed {
    /// Creates the answer to a renewal.
    pub const fn new(handoff_requested: bool) -> Self {
        Self { handoff_requested }
    }
}

/// Event that a store pushes to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldEvent {
    /// The hold ended.
    Lost(Loss),
    /// A waiter has asked for the lock.
    HandoffRequested,
}

/// Secret with which any process can renew and release a hold. Opaque text: `Debug` hides it, and
/// [`expose`](Self::expose) returns it.
#[derive(Clone, PartialEq, Eq)]
pub struct Handle(String);

impl Handle {
    /// Creates a handle from text that [`expose`](Self::expose) returned.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the secret itself: any process that has it can renew and release the hold.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle(…)")
    }
}
