//! The client's side of a store: which messages one command of a machine takes, and what their answers mean.

mod bucket;

use std::time::Duration;

use tenure_core::acquire::{LeaseStart, RequestFailure};
use tenure_core::object::{ObjectRead, WaiterReads};
use tenure_core::observe::Observation;
use tenure_core::record::{StoreTime, is_abandoned};
use tenure_core::{Rules, Time};

use crate::message::{Record, Reply, Request};
use crate::setup::StoreKind;

/// What a machine asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Claim { queue: bool },
    Wait,
    Renew,
    CheckHandoff,
    Release,
    Abandon,
}

/// One command under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub(crate) operation: Operation,
    /// The number of the message whose answer is awaited.
    pub(crate) number: u32,
    /// When that message was sent.
    pub(crate) sent: Time,
    /// The end of the limit that the machine gave.
    pub(crate) deadline: Time,
    /// When the wait for it ends: later than due where the request hangs.
    pub(crate) limit_at: Time,
    /// Something that may change the store was sent.
    pub(crate) wrote: bool,
    /// Nothing was sent, and nothing ever will be: the store turned the client away.
    pub(crate) permanent_failure: bool,
    /// Nothing is under way: the next look is sent then.
    pub(crate) next_read_at: Time,
    /// A wait that looks by itself.
    pub(crate) polls: bool,
}

/// What became of a command.
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
    /// Look again after a pause.
    Pause,
}

/// A record as the store shows it.
#[derive(Clone, Copy, Debug)]
struct ShownRecord {
    version: u64,
    record: Record,
    stamp: u64,
}

/// What a client knows of its claim at the store.
#[derive(Debug)]
pub(crate) struct ClaimState {
    pub(crate) claim: u64,
    pub(crate) token: u64,
    version: u64,
    ttl: Duration,
    rules: Rules,
    store: StoreKind,
    observation: Observation<u64>,
    /// The store's time, where its records bear timestamps.
    store_time: Option<StoreTime>,
    /// What our looks showed while we waited at a bucket.
    reads: WaiterReads,
    /// When the look was sent upon which we wrote.
    read_sent: Time,
    rung: Time,
    /// A write of a wait that was not heard of yet: nobody knows whether it will land.
    unsettled: bool,
}

impl InFlight {
    /// What it means that no answer came in time.
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
            ObjectRead::<()> { record: None, modified: Duration::ZERO, now: Duration::ZERO };
        let (seen, looks) =
            (Observation::new(rules), WaiterReads::new(&nothing, Time::ZERO, rules));
        let (looked, rung, unsettled) = (Time::ZERO, Time::ZERO, false);
        let (token, version) = (0, 0);
        let store_time = None;
        Self {
            claim,
            token,
            version,
            ttl,
            rules,
            store,
            observation: seen,
            store_time,
            reads: looks,
            read_sent: looked,
            rung,
            unsettled,
        }
    }

    /// The first message of a command. `wall` is the client's wall clock.
    pub(crate) fn begin(&self, what: Operation, wall: i64) -> Request {
        let by_record = self.store == StoreKind::Observation;
        match what {
            _ if self.store == StoreKind::Bucket => self.begin_at_bucket(what, wall),
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

    /// What the answer to a message of `errand` leads to.
    pub(crate) fn handle_reply(
        &mut self,
        errand: &InFlight,
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
            Reply::Renewed { handoff_requested: waiter } => {
                Outcome::Renewed { handoff_requested: waiter }
            }
            Reply::Refused => Outcome::Refused,
            Reply::Released => Outcome::Released,
            Reply::Closed => Outcome::Broken,
            Reply::BucketRead(sight) => return self.handle_bucket_reply(errand, sight, now, wall),
            Reply::Written { version } => {
                (self.version, self.unsettled) = (version, false);
                match errand.operation {
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
                    errand,
                    ShownRecord { version, record, stamp },
                    now,
                    wall,
                );
            }
        };
        ReplyEffect::Done(outcome)
    }

    /// A record was read, or was found in the way of a write.
    fn handle_record(
        &mut self,
        errand: &InFlight,
        shown: ShownRecord,
        now: Time,
        wall: i64,
    ) -> ReplyEffect {
        let ShownRecord { version, record, .. } = shown;
        if errand.operation == Operation::CheckHandoff {
            return ReplyEffect::Done(Outcome::HandoffChecked);
        }
        let ours = record.claim == self.claim;
        if ours {
            // An earlier write of ours landed unheard: carry on from its version.
            self.version = version;
            self.token = record.fence;
        }
        match errand.operation {
            Operation::Claim { .. } if ours => {
                ReplyEffect::Done(Outcome::Granted(LeaseStart::FromConfirm))
            }
            Operation::Claim { .. } if errand.wrote => ReplyEffect::Done(Outcome::Contended),
            Operation::Claim { .. } if self.may_take(shown, errand.sent, now, wall) => {
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
            // Both are asked: a look counts for the observation, whatever the timestamps say.
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
