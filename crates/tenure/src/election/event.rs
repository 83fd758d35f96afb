//! Events of an election, and the stream of them.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::acquire;
use tenure_core::election::{Cause, ElectionState, FailureKind, StoreFailure};
use tokio::sync::broadcast;

use super::Leadership;
use crate::guard::Lost;
use crate::{Error, ErrorKind, Loss};

/// An event of an election, as passed to its callbacks and to [`Election::events`](super::Election::events).
///
/// `Acquired` and (`Lost` or `Released`) alternate. Of the events of one step, the change of state comes first, then
/// the cause, then the consequence, and `Stopped` last.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// This participant became the leader.
    Acquired(Leadership),
    /// This participant gave up its leadership.
    Released,
    /// This participant lost its leadership.
    Lost(Lost),
    /// A claim failed, though the store answered.
    AcquireFailed(AcquireFailed),
    /// The state has changed.
    StateChange(StateChange),
    /// A request to the store, a renewal or a callback failed. Such an error does not by itself end a term.
    Error(Arc<Error>),
    /// The run has ended; sent once per run.
    Stopped(StopReason),
    /// This subscriber was too slow and has missed this many events, the oldest first.
    Missed(u64),
}

/// A failed claim: another participant leads, or the grant arrived past its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AcquireFailed {
    /// Number of failures in a row, including this one.
    pub attempt: u32,
    /// Delay before the next claim; `None` if there will be no further claim.
    pub next_delay: Option<Duration>,
}

/// A change of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StateChange {
    /// State before the change.
    pub from: ElectionState,
    /// State after the change.
    pub to: ElectionState,
}

/// Reason for the end of a run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StopReason {
    /// A stop was requested: by `shutdown`, by the shutdown signal, or by dropping the handle.
    Requested,
    /// The term has ended, or could not begin, and `auto_reacquire` is off.
    TermOver,
    /// The retry strategy allowed no further attempt.
    GaveUp,
    /// A permanent error, which a retry cannot fix.
    Failed(Arc<Error>),
}

impl StopReason {
    pub(super) fn of(reason: &tenure_core::election::StopReason) -> Self {
        match reason {
            tenure_core::election::StopReason::Requested => Self::Requested,
            tenure_core::election::StopReason::TermOver => Self::TermOver,
            tenure_core::election::StopReason::GaveUp => Self::GaveUp,
            tenure_core::election::StopReason::Failed(failure) => Self::Failed(error_of(failure)),
        }
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested => f.write_str("a stop was requested"),
            Self::TermOver => f.write_str("its term is over and auto_reacquire is off"),
            Self::GaveUp => f.write_str("the retry strategy gave up"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

/// Number of events that are buffered for a slow subscriber before the oldest are dropped.
const EVENT_BUFFER_CAPACITY: usize = 256;

/// Stream of the events of an election, beginning with the call of [`Election::events`](super::Election::events).
///
/// The election never waits for a subscriber. A subscriber that is more than 256 events behind loses the oldest ones
/// and receives their number as [`Event::Missed`]. [`Election::state`](super::Election::state) is always current.
#[derive(Debug)]
pub struct Events(broadcast::Receiver<Event>);

impl Events {
    pub(super) fn channel() -> broadcast::Sender<Event> {
        broadcast::Sender::new(EVENT_BUFFER_CAPACITY)
    }

    pub(super) fn of(sender: &broadcast::Sender<Event>) -> Self {
        Self(sender.subscribe())
    }

    /// Waits for the next event; `None` once the election was dropped and its last run has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<Event> {
        match self.0.recv().await {
            Ok(event) => Some(event),
            Err(broadcast::error::RecvError::Lagged(missed)) => Some(Event::Missed(missed)),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

/// An error that passes through the state machine of the core, which stores errors without knowing their type.
#[derive(Clone, Debug)]
struct SharedError(Arc<Error>);

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for SharedError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

/// Translates an error of the store for the state machine.
pub(super) fn failure(error: Arc<Error>) -> StoreFailure {
    let kind = match error.failure() {
        acquire::RequestFailure::Unknown => FailureKind::Unclear,
        acquire::RequestFailure::Transient => FailureKind::Broken,
        acquire::RequestFailure::Permanent => FailureKind::Permanent,
    };
    StoreFailure::new(kind, SharedError(error))
}

/// The error that was passed to the state machine as a failure.
pub(super) fn error_of(failure: &StoreFailure) -> Arc<Error> {
    match failure.error.downcast_ref::<SharedError>() {
        Some(SharedError(error)) => Arc::clone(error),
        None => Arc::new(Error::new(ErrorKind::Unavailable, failure.to_string())),
    }
}

/// Adds `source` as the cause of `error`; `source` may have other owners.
pub(super) fn because(error: Error, source: &Arc<Error>) -> Error {
    error.because(SharedError(Arc::clone(source)))
}

/// Translates the loss of a hold for the state machine.
pub(super) fn cause_of(lost: &Lost) -> Cause {
    match lost.reason {
        Loss::Expired => Cause::Deadline,
        Loss::Taken | Loss::Evicted => Cause::NotHeld,
        _ => {
            let error = Arc::new(Error::from(lost.clone()));
            Cause::Failed(StoreFailure::new(FailureKind::Broken, SharedError(error)))
        }
    }
}

/// Reason for a loss that only the state machine has seen.
pub(super) fn loss_of(cause: &Cause) -> Loss {
    match cause {
        Cause::Deadline => Loss::Expired,
        Cause::NotHeld | Cause::HeldByAnother => Loss::Taken,
        Cause::TimedOut | Cause::Failed(_) => Loss::Disconnected,
    }
}
