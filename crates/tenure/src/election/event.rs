//! What an election tells, and the stream that tells it.

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

/// Something that an election tells: to its callbacks and to [`Election::events`](super::Election::events).
///
/// `Acquired` and (`Lost` or `Released`) alternate. Of the events of one step the change of state comes first, then the
/// cause, then what it means, and `Stopped` last.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// This participant leads.
    Acquired(Leadership),
    /// This participant gave its leadership up.
    Released,
    /// This participant's leadership ended against its will.
    Lost(Lost),
    /// A claim came to nothing, though the store answered.
    AcquireFailed(AcquireFailed),
    /// The state has changed.
    StateChange(StateChange),
    /// Something failed: a request to the store, a renewal, a callback. By itself it ends nothing.
    Error(Arc<Error>),
    /// The run is over; once per run.
    Stopped(StopReason),
    /// This reader was too slow: that many events are gone, the oldest first.
    Missed(u64),
}

/// A claim that came to nothing: another leads, or the grant came past its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcquireFailed {
    /// The failures in a row, this one included.
    pub attempt: u32,
    /// The pause before the next claim; `None` where there will be none.
    pub next_delay: Option<Duration>,
}

/// A change of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateChange {
    /// The state before.
    pub from: ElectionState,
    /// The state now.
    pub to: ElectionState,
}

/// Why a run ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StopReason {
    /// Somebody asked for it: a shutdown, the shutdown signal, or the end of the handle.
    Requested,
    /// Its term is over, or could not begin, and `auto_reacquire` is off.
    TermOver,
    /// The retry strategy wanted no further attempt.
    GaveUp,
    /// An error that waiting will not cure.
    Failed(Arc<Error>),
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

/// How many events wait for a slow reader before the oldest are dropped.
const EVENT_BUFFER_CAPACITY: usize = 256;

/// The events of an election, from the moment of [`Election::events`](super::Election::events) on.
///
/// The election never waits for a reader. One that falls more than 256 events behind loses the oldest and is told how
/// many by [`Event::Missed`]; [`Election::state`](super::Election::state) is always current.
#[derive(Debug)]
pub struct Events(broadcast::Receiver<Event>);

impl Events {
    pub(super) fn channel() -> broadcast::Sender<Event> {
        broadcast::Sender::new(EVENT_BUFFER_CAPACITY)
    }

    pub(super) fn of(sender: &broadcast::Sender<Event>) -> Self {
        Self(sender.subscribe())
    }

    /// The next event; `None` once the election is gone for good.
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

/// An error on its way through the machine of the core, which keeps errors without knowing them.
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

/// What an error of the store means for the election.
pub(super) fn failure(error: Arc<Error>) -> StoreFailure {
    let kind = match error.failure() {
        acquire::RequestFailure::Unknown => FailureKind::Unclear,
        acquire::RequestFailure::Transient => FailureKind::Broken,
        acquire::RequestFailure::Permanent => FailureKind::Permanent,
    };
    StoreFailure::new(kind, SharedError(error))
}

/// The error that went into the machine as a failure.
pub(super) fn error_of(failure: &StoreFailure) -> Arc<Error> {
    match failure.error.downcast_ref::<SharedError>() {
        Some(SharedError(error)) => Arc::clone(error),
        None => Arc::new(Error::new(ErrorKind::Unavailable, failure.to_string())),
    }
}

/// The error that another one caused, whoever else keeps that one.
pub(super) fn because(error: Error, source: &Arc<Error>) -> Error {
    error.because(SharedError(Arc::clone(source)))
}

/// What the loss of a hold means for the election.
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

/// The loss of a hold whose end only the election saw.
pub(super) fn loss_of(cause: &Cause) -> Loss {
    match cause {
        Cause::Deadline => Loss::Expired,
        Cause::NotHeld | Cause::HeldByAnother => Loss::Taken,
        Cause::TimedOut | Cause::Failed(_) => Loss::Disconnected,
    }
}
