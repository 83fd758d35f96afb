//! What an acquisition is told, and what it says.

use std::time::Duration;

use crate::Time;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AcquireInput {
    /// A claim or a wait was granted.
    Granted(LeaseStart),
    /// A claim found a place in the queue.
    Queued,
    /// Another holds it, and there is no place to wait in.
    Contended {
        /// The shortest pause that the store asks for.
        retry_after: Option<Duration>,
    },
    /// A wait ended, and the place is still ours.
    StillQueued,
    /// A wait ended because the place is gone.
    PlaceLost,
    /// The store saw the key change while we watched it.
    Changed,
    /// The store renewed the grant that was to be confirmed.
    Confirmed,
    /// The store says that the grant to be confirmed or released is not ours.
    Refused,
    /// The grant was released, or the place was given up.
    Released,
    /// The request under way failed.
    Failed(RequestFailure),
    /// The caller waits until then and no longer; never before, where the caller only enqueued.
    WaitUntil(Option<Time>),
    /// The caller went away.
    Cancel,
}

/// From when a granted lease counts (contract 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseStart {
    /// From before the request that was granted was sent.
    FromRequest,
    /// From before a renewal that has yet to confirm it.
    FromConfirm,
    /// From an instant of our own clock at which the store surely had not granted it yet: as good as before a request of
    /// ours, without a renewal to make it so. [`Looks`](crate::object::Looks) says which; never the store's own time.
    Since(Time),
    /// The store keeps the hold without a lease, as long as the session lives.
    NoLease,
}

/// What a failed request tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestFailure {
    /// It may have landed all the same.
    Unknown,
    /// It did not land; another try may.
    Transient,
    /// It did not land, and no further try will.
    Permanent,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AcquireCommand {
    /// Send the claim. Always the same one: what an earlier sending of it got is still ours.
    Claim {
        /// The longest that the request may take.
        limit: Duration,
        /// Whether to take a place in the queue where it is held.
        queue: bool,
    },
    /// Wait at our place in the queue.
    Wait {
        /// How long.
        limit: Duration,
    },
    /// Wait for the key to change, where the store can tell, or for the time-out.
    Watch,
    /// Renew the grant, so that its lease counts from a request of our own.
    Confirm {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Give the grant back.
    Release {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Give the place in the queue up, and a grant that raced it back.
    Abandon {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Tell the caller.
    Answer(Answer),
    /// The machine has ended; nothing follows. After [`Answer::Acquired`] the hold is the keeper's.
    Finish,
}

/// What the caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// Granted.
    Acquired {
        /// When the request that the lease counts from was sent.
        sent: Time,
        /// Until when the hold is valid.
        deadline: Time,
    },
    /// Another holds it, and the caller did not want to wait.
    Contended,
    /// The caller's time ran out; nothing is held.
    TimedOut,
    /// The retry strategy gave up; nothing is held.
    GaveUp,
    /// The last request failed and no other will help; nothing is held.
    Failed,
    /// Nothing clear was heard in time: the store may keep the lock for us until then.
    Unknown {
        /// When the store has let go at the latest.
        until: Time,
    },
}
