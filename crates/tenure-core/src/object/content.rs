//! The lock object as stored and as read.

use std::time::Duration;

/// Content of the lock object. `T` is the rest of its content, which every rewrite keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockObject<T> {
    /// Current or last holder.
    pub owner: String,
    /// End of the hold as the owner wrote it; zero if it was released.
    pub expires: Duration,
    /// Waiter that has the waiting place.
    pub waiter: Option<ObjectWaiter>,
    /// Fencing number of the grant; `None` if written by a participant of the plain format.
    pub fence: Option<u64>,
    /// Length of the hold, counted from the object's last change; `None` if written by a participant of the plain
    /// format.
    pub lease: Option<Duration>,
    /// Rest of the content.
    pub extra: T,
}

/// Waiter in the waiting place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectWaiter {
    /// Id of the waiter.
    pub id: String,
    /// End of the reservation.
    pub expires: Duration,
}

/// Result of one read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRead<T> {
    /// Content of the object; `None` if it does not exist.
    pub record: Option<LockObject<T>>,
    /// `Last-Modified`: time of the last change, by the clock that stamps objects.
    pub modified: Duration,
    /// `Date` of the same response, possibly from another machine's clock.
    pub date: Duration,
}

/// Resolution of a store's clock: the rounding error of each of two times that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockResolution(pub Duration);

impl ClockResolution {
    /// Whole seconds, as in HTTP headers.
    pub const SECOND: Self = Self(Duration::from_secs(1));

    /// Time to add to a lease before a take-over: two times are compared, each truncated by up to one unit.
    pub fn slack(self) -> Duration {
        self.0 * 2
    }

    /// Smallest lease that is supported: the slack must be small compared with the lease.
    pub fn min_ttl(self) -> Duration {
        self.0 * 10
    }
}
