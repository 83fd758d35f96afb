//! Inputs and commands of the acquisition machine.

use std::time::Duration;

use crate::Time;

/// Event that the driver reports to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AcquireInput {
    /// The store granted a claim or a wait.
    Granted(LeaseStart),
    /// A claim took a place in the queue, or found its earlier place.
    Queued,
    /// Another client holds the key, and the claim has no place in a queue.
    Contended {
        /// Shortest pause that the store asks for.
        retry_after: Option<Duration>,
    },
    /// A wait ended, and the place is still in the queue.
    StillQueued,
    /// A wait ended because the place is gone.
    PlaceLost,
    /// The store reported a change of the watched key.
    Changed,
    /// The store renewed the grant that was to be confirmed.
    Confirmed,
    /// The store replied that the grant to be confirmed or released is not ours.
    Refused,
    /// The grant was released, or the place was abandoned.
    Released,
    /// The request in flight failed.
    Failed(RequestFailure),
    /// The caller's new time limit; `None` removes the limit.
    WaitUntil(Option<Time>),
    /// The caller was cancelled.
    Cancel,
}

/// Instant from which a granted lease counts. It must not lie after the start of the lease at the store.
///
/// The holder relies on its hold for the ttl less a margin, counted from this instant. If it were later than the start
/// of the lease at the store, the store could grant the lock to another claim while the holder still relies on it.
///
/// | grant | value |
/// |---|---|
/// | by a claim | `FromRequest`: the lease began after the claim was sent |
/// | by a repeated claim, whose lease began with an earlier attempt | `FromRequest` or `FromConfirm`: the acquire loop confirms it in either case |
/// | at the end of a wait | `FromConfirm`: the store granted at an unknown instant of the wait |
/// | at the end of a wait, if the client knows an instant before the grant | `Since` |
/// | of a hold without a lease | `NoLease` |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LeaseStart {
    /// The instant before the granted request was sent.
    FromRequest,
    /// The instant before the renewal that confirms the grant is sent. That renewal has not been made yet.
    FromConfirm,
    /// An instant on our own clock at which the store had certainly not granted the lock yet.
    ///
    /// That is as safe as the instant before a request of ours: the store's lease began later, so it also ends later
    /// than our deadline. No renewal is needed to establish it. It is never the store's own time, which our clock
    /// cannot be compared with; [`WaiterReads`](crate::object::WaiterReads) shows how the instant is derived.
    Since(Time),
    /// The store keeps the hold without a lease, for as long as the session lives.
    NoLease,
}

/// Effect of a failed request on the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestFailure {
    /// The request may have taken effect.
    Unknown,
    /// The request had no effect; a retry may succeed.
    Transient,
    /// The request had no effect, and no retry will succeed.
    Permanent,
}

/// Command to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AcquireCommand {
    /// Send the claim. It is always the same claim, so a grant or place from an earlier attempt is found again.
    Claim {
        /// Time limit of the request.
        limit: Duration,
        /// Take a place in the queue if the lock is held.
        queue: bool,
    },
    /// Wait at the claim's place in the queue.
    Wait {
        /// Time limit of the wait.
        limit: Duration,
    },
    /// Wait until the key changes, if the store pushes changes, or until the machine's time-out.
    Watch,
    /// Renew the grant, so that its lease counts from a request of our own.
    Confirm {
        /// Time limit of the request.
        limit: Duration,
    },
    /// Release the grant.
    Release {
        /// Time limit of the request.
        limit: Duration,
    },
    /// Leave the queue. A grant that was made in the meantime is released.
    Abandon {
        /// Time limit of the request.
        limit: Duration,
    },
    /// Return this answer to the caller.
    Answer(AcquireAnswer),
    /// The machine has ended; no command follows. After [`AcquireAnswer::Acquired`] the keeper is responsible for the hold.
    Finish,
}

/// Result that the caller receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AcquireAnswer {
    /// Granted.
    Acquired {
        /// Instant from which the lease counts, as [`LeaseStart`] defines it.
        sent: Time,
        /// End of the hold's validity.
        deadline: Time,
    },
    /// Another client holds the lock, and the caller does not wait.
    Contended,
    /// The caller's time limit passed; nothing is held.
    TimedOut,
    /// The retry strategy gave up; nothing is held.
    GaveUp,
    /// The last request failed and no retry will help; nothing is held.
    Failed,
    /// No clear reply came in time: the store may hold the lock for this claim.
    Unknown {
        /// Instant at which the store's lease has expired at the latest.
        until: Time,
    },
}
