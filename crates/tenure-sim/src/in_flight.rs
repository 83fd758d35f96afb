//! Client side of a store: the messages of an operation, and the meaning of their replies.

mod bucket;

use std::time::Duration;

use tenure_core::acquire::{LeaseStart, RequestFailure};
use tenure_core::object::{ObjectRead, WaiterReads};
use tenure_core::observe::Observation;
use tenure_core::record::{StoreTime, is_abandoned};
use tenure_core::{Rules, Time};

use crate::message::{Record, Reply, Request};
use crate::setup::StoreKind;

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
    HandoffChecked,
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

/// A record as the store returned it.
#[derive(Clone, Copy, Debug)]
struct ShownRecord {
    version: u64,
    record: Record,
    stamp: u64,
}

/// Client-side state of a claim.
#[derive(Debug)]
pub(crate) struct ClaimState {
    pub(crate) claim: u64,
    pub(crate) token: u64,
    version: u64,
    ttl: Duration,
    rules: Rules,
    store: StoreKind,
    observation: Observation<u64>,
    /// Estimate of the store's time, if its records have timestamps.
    store_time: Option<StoreTime>,
    /// Results of the reads during a wait at a bucket.
    reads: WaiterReads,
    /// Send time of the read that led to a write.
    read_sent: Time,
    rung: Time,
    /// True while a write of a wait has no reply: it may or may not take effect.
    unsettled: bool,
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
    pub(crate) fn new(claim: u64, ttl: Duration, rules: Rules, store: StoreKind) -> Self {
        let nothing =
            ObjectRead::<()> { record: None, modified: Duration::ZERO, date: Duration::ZERO };
        Self {
            claim,
            token: 0,
            version: 0,
            ttl,
            rules,
            store,
            observation: Observation::new(rules),
            store_time: None,
            reads: WaiterReads::new(&nothing, Time::ZERO, rules),
            read_sent: Time::ZERO,
            rung: Time::ZERO,
            unsettled: false,
        }
    }

    /// First message of an operation. `wall` is the client's wall clock.
    pub(crate) fn begin(&self, operation: Operation, wall: i64) -> Request {
        let by_record = self.store == StoreKind::Observation;
        match operation {
            _ if self.store == StoreKind::Bucket => self.begin_at_bucket(operation, wall),
            Operation::Claim { .. } | Operation::CheckHandoff if by_record => Request::Read,
            Operation::Renew if by_record => self.renew_request(wall),
            Operation::Release | Operation::Abandon if by_record => self.release_request(),
            Operation::Claim { queue } => Request::Claim { claim: self.claim, queue },
            Operation::Wait => Request::Wait { claim: self.claim },
            Operation::Renew | Operation::CheckHandoff => Request::Renew { token: self.token },
            Operation::Release => Request::Release { token: self.token },
            Operation::Abandon => Request::Abandon { claim: self.claim },
        }
    }

    /// Effect of the reply to a message of an operation.
    pub(crate) fn handle_reply(
        &mut self,
        in_flight: &InFlight,
        reply: Reply,
        now: Time,
        wall: i64,
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
            Reply::BucketRead(read) => return self.handle_bucket_reply(in_flight, read, now, wall),
            Reply::Written { version } => {
                (self.version, self.unsettled) = (version, false);
                match in_flight.operation {
                    Operation::Wait => Outcome::Granted(LeaseStart::Since(self.read_sent)),
                    Operation::Claim { .. } => Outcome::Granted(LeaseStart::FromRequest),
                    Operation::Renew => Outcome::Renewed { handoff_requested: false },
                    _ => Outcome::Released,
                }
            }
            Reply::Record { version, record, stamp, now: store } => {
                if self.store_time.is_none_or(|time| time.is_stale(now)) {
                    self.store_time = Some(StoreTime::new(store, now));
                }
                return self.handle_record(
                    in_flight,
                    ShownRecord { version, record, stamp },
                    now,
                    wall,
                );
            }
        };
        ReplyEffect::Done(outcome)
    }

    /// Effect of a record that was read, or that refused a conditional write.
    fn handle_record(
        &mut self,
        in_flight: &InFlight,
        shown: ShownRecord,
        now: Time,
        wall: i64,
    ) -> ReplyEffect {
        let ShownRecord { version, record, .. } = shown;
        if in_flight.operation == Operation::CheckHandoff {
            return ReplyEffect::Done(Outcome::HandoffChecked);
        }
        let ours = record.claim == self.claim;
        if ours {
            // An earlier write took effect although its reply was lost: continue from its version.
            self.version = version;
            self.token = record.fence;
        }
        match in_flight.operation {
            Operation::Claim { .. } if ours => {
                ReplyEffect::Done(Outcome::Granted(LeaseStart::FromConfirm))
            }
            Operation::Claim { .. } if in_flight.wrote => ReplyEffect::Done(Outcome::Contended),
            Operation::Claim { .. } if self.may_take(shown, in_flight.sent, now, wall) => {
                self.token = record.fence + 1;
                ReplyEffect::Send(Request::Write {
                    if_version: Some(version),
                    record: self.record(wall),
                })
            }
            Operation::Claim { .. } => ReplyEffect::Done(Outcome::Contended),
            Operation::Renew if ours => ReplyEffect::Send(self.renew_request(wall)),
            Operation::Release | Operation::Abandon if ours => {
                ReplyEffect::Send(self.release_request())
            }
            _ => ReplyEffect::Done(Outcome::Refused),
        }
    }

    fn may_take(&mut self, shown: ShownRecord, sent: Time, now: Time, wall: i64) -> bool {
        let ShownRecord { version, record, stamp } = shown;
        if record.claim == 0 {
            return true;
        }
        if self.rules.take_over_by_observation {
            let store = self.store_time.map_or(0, |time| time.at(now));
            let age = Duration::from_nanos(store.saturating_sub(stamp));
            // Both are evaluated: the observation must count every read, whatever the timestamps say.
            let observed = now >= self.observation.observe(version, self.ttl, sent, now);
            observed || is_abandoned(age, record.lease, self.rules)
        } else {
            wall - record.written > i64::try_from(self.ttl.as_nanos()).unwrap_or(i64::MAX)
        }
    }

    fn renew_request(&self, wall: i64) -> Request {
        let if_version = self.rules.renewal_names_version.then_some(self.version);
        Request::Write { if_version, record: self.record(wall) }
    }

    fn release_request(&self) -> Request {
        let record = Record { claim: 0, fence: self.token, ..Record::default() };
        Request::Write { if_version: Some(self.version), record }
    }

    fn record(&self, wall: i64) -> Record {
        Record { claim: self.claim, fence: self.token, written: wall, lease: self.ttl }
    }
}
