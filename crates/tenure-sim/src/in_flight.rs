//! Client side of a store: the messages of an operation, and the meaning of their replies.

mod bucket;
mod stream;

use std::time::Duration;

use tenure_core::acquire::{LeaseStart, RequestFailure};
use tenure_core::object::{ObjectRead, WaiterReads};
use tenure_core::observe::Observation;
use tenure_core::{Rules, Time};

use self::stream::StreamClaim;
pub(crate) use self::stream::{StreamProcess, StreamTurn};
use crate::message::{Reply, Request};
use crate::setup::{Setup, StoreKind};

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

/// Client-side state of a claim.
#[derive(Debug)]
pub(crate) struct ClaimState {
    pub(crate) claim: u64,
    pub(crate) token: u64,
    /// Epoch of the token, at a stream.
    pub(crate) epoch: u64,
    version: u64,
    ttl: Duration,
    rules: Rules,
    store: StoreKind,
    observation: Observation<u64>,
    /// Object in a bucket, as it was last seen or written with this claim as its owner.
    owned: Option<ObjectRead<()>>,
    /// Results of the reads during a wait at a bucket.
    reads: WaiterReads,
    /// Send time of the read that led to a write.
    read_sent: Time,
    rung: Time,
    /// True while a write of a wait has no reply: it may or may not take effect.
    unsettled: bool,
    stream: StreamClaim,
    claims_name_version: bool,
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

impl ClaimState {
    pub(crate) fn new(claim: u64, setup: &Setup) -> Self {
        let Setup { ttl, rules, store, claims_name_version, .. } = *setup;
        let nothing =
            ObjectRead::<()> { record: None, modified: Duration::ZERO, date: Duration::ZERO };
        Self {
            claim,
            token: 0,
            epoch: 0,
            version: 0,
            ttl,
            rules,
            store,
            observation: Observation::new(rules),
            owned: None,
            reads: WaiterReads::new(&nothing, Time::ZERO, rules),
            read_sent: Time::ZERO,
            rung: Time::ZERO,
            unsettled: false,
            stream: StreamClaim::new(),
            claims_name_version,
        }
    }

    /// First step of an operation.
    pub(crate) fn begin(&mut self, operation: Operation, at: &mut StreamTurn<'_>) -> ReplyEffect {
        ReplyEffect::Send(match operation {
            _ if self.store == StoreKind::Stream => return self.begin_at_stream(operation, at),
            _ if self.store == StoreKind::Bucket => self.begin_at_bucket(operation),
            Operation::Claim { queue } => Request::Claim { claim: self.claim, queue },
            Operation::Wait => Request::Wait { claim: self.claim },
            Operation::Renew | Operation::CheckHandoff => Request::Renew { token: self.token },
            Operation::Release => Request::Release { token: self.token },
            Operation::Abandon => Request::Abandon { claim: self.claim },
        })
    }

    /// Effect of the reply to a message of an operation.
    pub(crate) fn handle_reply(
        &mut self,
        in_flight: &InFlight,
        reply: Reply,
        at: &mut StreamTurn<'_>,
    ) -> ReplyEffect {
        let outcome = match reply {
            Reply::Granted { token } => {
                self.token = token;
                Outcome::Granted(LeaseStart::FromRequest)
            }
            Reply::Queued => Outcome::Queued,
            Reply::Contended => Outcome::Contended,
            Reply::NotQueued => Outcome::PlaceLost,
            Reply::Renewed { handoff_requested } => Outcome::Renewed { handoff_requested },
            Reply::Refused => Outcome::Refused,
            Reply::Released => Outcome::Released,
            Reply::Closed => Outcome::Broken,
            Reply::BucketRead(read) => return self.handle_bucket_reply(in_flight, read, at.now),
            Reply::Written { version } => {
                (self.version, self.unsettled) = (version, false);
                match in_flight.operation {
                    Operation::Wait => Outcome::Granted(LeaseStart::Since(self.read_sent)),
                    Operation::Claim { .. } => Outcome::Granted(LeaseStart::FromRequest),
                    Operation::Renew => Outcome::Renewed { handoff_requested: false },
                    _ => Outcome::Released,
                }
            }
            Reply::StreamInfo(_)
            | Reply::StreamRecord(_)
            | Reply::Landed { .. }
            | Reply::Conflict => return self.handle_stream_reply(in_flight, reply, at),
        };
        ReplyEffect::Done(outcome)
    }

    /// Effect of a request that was not answered in time.
    pub(crate) fn unanswered(&mut self, in_flight: &InFlight) -> ReplyEffect {
        let next = match self.store {
            StoreKind::Stream if !in_flight.permanent_failure => self.stream_unanswered(),
            _ => None,
        };
        next.unwrap_or_else(|| ReplyEffect::Done(in_flight.unanswered()))
    }

    /// Share of the remaining time that the next request may take. A write leaves time to read its outcome.
    pub(crate) fn time_share(&self) -> f64 {
        if self.store == StoreKind::Stream && self.writes_to_stream() { 0.7 } else { 1.0 }
    }

    /// True if the stream acknowledged the write of the grant.
    pub(crate) fn acknowledged(&self) -> bool {
        self.stream.acknowledged == Some(self.token)
    }

    /// Set of holders that the last contended claim saw in a stream.
    pub(crate) fn contended_holders(&self) -> u128 {
        self.stream.contended
    }
}
