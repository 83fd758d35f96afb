//! Client side of a store: the messages of an operation, and the meaning of their replies.

mod bucket;
mod claim;
mod operation;
mod stream;
mod stream_state;

use tenure_core::acquire::LeaseStart;

pub(crate) use self::claim::ClaimState;
pub(crate) use self::operation::{InFlight, Operation, Outcome, ReplyEffect};
pub(crate) use self::stream_state::{StreamProcess, StreamTurn};
use crate::message::{Reply, Request};
use crate::setup::StoreKind;

impl ClaimState {
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
