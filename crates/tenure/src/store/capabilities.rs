//! Capabilities of a store.

use std::time::Duration;

/// Capabilities of a store. [`Capabilities::new`] makes those of the simplest store; set the fields of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "each capability is independent of the others")]
pub struct Capabilities {
    /// Order in which waiters are granted a key.
    pub queue: QueueKind,
    /// Event that ends the hold of a dead holder.
    pub liveness: Liveness,
    /// True if the store pushes changes, so that [`Store::changed`](super::Store::changed) resolves without polling, also for changes by
    /// other processes. A claim that is [contended](super::Answer::Contended) is then sent again on a change, and once per second as a
    /// backstop; without push, after pauses that grow to a second by default. Waiters in a queue are woken by
    /// [`Place::wait`](super::Place::wait) in either case.
    pub push: bool,
    /// Way in which a holder learns of a hand-off request.
    pub handoff: Handoff,
    /// True if several holders can share a lock ([`Mode::Shared`](super::Mode::Shared)).
    pub shared: bool,
    /// True if a key can have several slots ([`Mode::Slot`](super::Mode::Slot)).
    pub semaphore: bool,
    /// True if a hold can outlive the process that claimed it.
    pub detached: bool,
    /// True if keys can be listed ([`Store::list`](super::Store::list)).
    pub list: bool,
    /// True if holders and waiters are shown with their identities and tokens. If false, only their number is known.
    pub identities: bool,
    /// True if an operator can break a hold ([`Store::evict`](super::Store::evict)).
    pub evict: bool,
    /// True if every grant of a key has a larger fencing token than the grant before. If false, every hold has
    /// [`FencingToken::NONE`](crate::FencingToken::NONE).
    pub ordered_tokens: bool,
    /// Shortest ttl that the store accepts. [`Store::max_ttl`](super::Store::max_ttl) is the longest.
    pub min_ttl: Duration,
}

impl Capabilities {
    /// Capabilities of a store of locks without a queue, on which waiters poll. The shortest ttl is one second. Every
    /// other field is false or `None`.
    pub const fn new(liveness: Liveness) -> Self {
        Self {
            queue: QueueKind::None,
            liveness,
            push: false,
            handoff: Handoff::None,
            shared: false,
            semaphore: false,
            detached: false,
            list: false,
            identities: false,
            evict: false,
            ordered_tokens: false,
            min_ttl: Duration::from_secs(1),
        }
    }
}

/// Order in which a store grants a key to its waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueKind {
    /// First come, first served.
    Fifo,
    /// One place: its waiter is granted the key next, and all other claims compete for the place.
    Single,
    /// No queue: the first claim after a release is granted.
    None,
}

/// Event that ends the hold of a dead holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Liveness {
    /// The end of the lease.
    Lease,
    /// The end of the session: of the connection or process of the holder.
    Session,
    /// The end of the session or of the lease, whichever comes first.
    Both,
}

/// Way in which a holder learns of a hand-off request: a waiter has asked for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Handoff {
    /// A holder does not learn of the request.
    None,
    /// The store pushes the request ([`Hold::event`](super::Hold::event)).
    Pushed,
    /// The answer to a renewal says it ([`Renewed::handoff_requested`](super::Renewed::handoff_requested)), so the holder
    /// learns of it within a third of the ttl.
    OnRenewal,
    /// The holder polls ([`Hold::check_handoff`](super::Hold::check_handoff)).
    Polled {
        /// Polling interval.
        every: Duration,
    },
}
