//! Operations that a state machine requests, and their outcomes.

use tenure_core::Time;
use tenure_core::acquire::{LeaseStart, RequestFailure};

use crate::message::Request;

/// Operation that a state machine requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Claim { queue: bool },
    Wait,
    Renew,
    CheckHandoff,
    Release,
    Abandon,
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub(crate) operation: Operation,
    /// Number of the message whose reply is expected.
    pub(crate) number: u32,
    /// Time at which that message was sent.
    pub(crate) sent: Time,
    /// Deadline that the state machine set.
    pub(crate) deadline: Time,
    /// Time at which the client stops waiting: after the deadline if the request hangs.
    pub(crate) limit_at: Time,
    /// True if a message was sent that may change the store.
    pub(crate) wrote: bool,
    /// True if the store rejected the client: nothing was sent, and a retry is useless.
    pub(crate) permanent_failure: bool,
    /// Time of the next read of a polling wait, while no message is in flight.
    pub(crate) next_read_at: Time,
    /// True for a wait that polls.
    pub(crate) polls: bool,
}

/// Outcome of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    Granted(LeaseStart),
    Queued,
    Contended,
    StillQueued,
    PlaceLost,
    Renewed { handoff_requested: bool },
    Refused,
    Released,
    Failed(RequestFailure),
    Broken,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ReplyEffect {
    Send(Request),
    Done(Outcome),
    /// Read again after a pause.
    Pause,
}

impl InFlight {
    /// Outcome if no reply arrives in time.
    pub(crate) fn unanswered(&self) -> Outcome {
        match self.operation {
            _ if self.permanent_failure => Outcome::Failed(RequestFailure::Permanent),
            Operation::Wait if self.wrote && !self.polls => Outcome::StillQueued,
            _ if self.wrote => Outcome::Failed(RequestFailure::Unknown),
            _ => Outcome::Failed(RequestFailure::Transient),
        }
    }
}
