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
pub(crate) enum What {
    Claim { queue: bool },
    Wait,
    Renew,
    Look,
    Release,
    Abandon,
}

/// One command under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Errand {
    pub(crate) what: What,
    /// The number of the message whose answer is awaited.
    pub(crate) number: u32,
    /// When that message was sent.
    pub(crate) sent: Time,
    /// The end of the limit that the machine gave.
    pub(crate) due: Time,
    /// When the wait for it ends: later than due where the request hangs.
    pub(crate) limit_at: Time,
    /// Something that may change the store was sent.
    pub(crate) wrote: bool,
    /// Nothing was sent, and nothing ever will be: the store turned the client away.
    pub(crate) hopeless: bool,
    /// Nothing is under way: the next look is sent then.
    pub(crate) again: Time,
    /// A wait that looks by itself.
    pub(crate) looks: bool,
}

/// What became of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    Granted(LeaseStart),
    Queued,
    Busy,
    Still,
    Gone,
    Renewed { waiter: bool },
    Looked,
    Refused,
    GivenBack,
    Failed(RequestFailure),
    Broken,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Send(Request),
    Done(Outcome),
    /// Look again after a pause.
    Pause,
}

/// A record as the store shows it.
#[derive(Clone, Copy, Debug)]
struct Shown {
    version: u64,
    record: Record,
    stamp: u64,
}

/// What a client knows of its claim at the store.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) claim: u64,
    pub(crate) token: u64,
    version: u64,
    ttl: Duration,
    rules: Rules,
    store: StoreKind,
    seen: Observation<u64>,
    /// The store's time, where its records bear timestamps.
    store_time: Option<StoreTime>,
    /// What our looks showed while we waited at a bucket.
    looks: WaiterReads,
    /// When the look was sent upon which we wrote.
    looked: Time,
    rung: Time,
    /// A write of a wait that was not heard of yet: nobody knows whether it will land.
    unsettled: bool,
}

impl Errand {
    /// What it means that no answer came in time.
    pub(crate) fn unanswered(&self) -> Outcome {
        match self.what {
            _ if self.hopeless => Outcome::Failed(RequestFailure::Permanent),
            What::Wait if self.wrote && !self.looks => Outcome::Still,
            _ if self.wrote => Outcome::Failed(RequestFailure::Unknown),
            _ => Outcome::Failed(RequestFailure::Transient),
        }
    }
}

impl Handle {
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
            seen,
            store_time,
            looks,
            looked,
            rung,
            unsettled,
        }
    }

    /// The first message of a command. `wall` is the client's wall clock.
    pub(crate) fn begin(&self, what: What, wall: i64) -> Request {
        let by_record = self.store == StoreKind::Observation;
        match what {
            _ if self.store == StoreKind::Bucket => self.begin_at_bucket(what, wall),
            What::Claim { .. } | What::Look if by_record => Request::Read,
            What::Renew if by_record => self.renewal(wall),
            What::Release | What::Abandon if by_record => self.giving_back(),
            What::Claim { queue } => Request::Claim { claim: self.claim, queue },
            What::Wait => Request::Wait { claim: self.claim },
            What::Renew | What::Look => Request::Renew { token: self.token },
            What::Release => Request::Release { token: self.token },
            What::Abandon => Request::Abandon { claim: self.claim },
        }
    }

    /// What the answer to a message of `errand` leads to.
    pub(crate) fn hear(&mut self, errand: &Errand, reply: Reply, now: Time, wall: i64) -> Step {
        let outcome = match reply {
            Reply::Granted { token } => {
                self.token = token;
                Outcome::Granted(LeaseStart::FromRequest)
            }
            Reply::Queued => Outcome::Queued,
            Reply::Busy => Outcome::Busy,
            Reply::Gone => Outcome::Gone,
            Reply::Renewed { waiter } => Outcome::Renewed { waiter },
            Reply::Refused => Outcome::Refused,
            Reply::GivenBack => Outcome::GivenBack,
            Reply::Closed => Outcome::Broken,
            Reply::Sight(sight) => return self.hear_bucket(errand, sight, now, wall),
            Reply::Written { version } => {
                (self.version, self.unsettled) = (version, false);
                match errand.what {
                    What::Wait => Outcome::Granted(LeaseStart::Since(self.looked)),
                    What::Claim { .. } => Outcome::Granted(LeaseStart::FromRequest),
                    What::Renew => Outcome::Renewed { waiter: false },
                    _ => Outcome::GivenBack,
                }
            }
            Reply::Record { version, record, stamp, now: store } => {
                if self.store_time.is_none_or(|time| time.is_stale(now)) {
                    self.store_time = Some(StoreTime::new(store, now));
                }
                return self.read(errand, Shown { version, record, stamp }, now, wall);
            }
        };
        Step::Done(outcome)
    }

    /// A record was read, or was found in the way of a write.
    fn read(&mut self, errand: &Errand, shown: Shown, now: Time, wall: i64) -> Step {
        let Shown { version, record, .. } = shown;
        if errand.what == What::Look {
            return Step::Done(Outcome::Looked);
        }
        let ours = record.claim == self.claim;
        if ours {
            // An earlier write of ours landed unheard: carry on from its version.
            self.version = version;
            self.token = record.fence;
        }
        match errand.what {
            What::Claim { .. } if ours => Step::Done(Outcome::Granted(LeaseStart::FromConfirm)),
            What::Claim { .. } if errand.wrote => Step::Done(Outcome::Busy),
            What::Claim { .. } if self.may_take(shown, errand.sent, now, wall) => {
                self.token = record.fence + 1;
                Step::Send(Request::Write { if_version: Some(version), record: self.record(wall) })
            }
            What::Claim { .. } => Step::Done(Outcome::Busy),
            What::Renew if ours => Step::Send(self.renewal(wall)),
            What::Release | What::Abandon if ours => Step::Send(self.giving_back()),
            _ => Step::Done(Outcome::Refused),
        }
    }

    fn may_take(&mut self, shown: Shown, sent: Time, now: Time, wall: i64) -> bool {
        let Shown { version, record, stamp } = shown;
        if record.claim == 0 {
            return true;
        }
        if self.rules.take_over_by_observation {
            let store = self.store_time.map_or(0, |time| time.at(now));
            let age = Duration::from_nanos(store.saturating_sub(stamp));
            // Both are asked: a look counts for the observation, whatever the timestamps say.
            let observed = now >= self.seen.observe(version, self.ttl, sent, now);
            observed || is_abandoned(age, record.lease, self.rules)
        } else {
            wall - record.written > i64::try_from(self.ttl.as_nanos()).unwrap_or(i64::MAX)
        }
    }

    fn renewal(&self, wall: i64) -> Request {
        let if_version = self.rules.renewal_names_version.then_some(self.version);
        Request::Write { if_version, record: self.record(wall) }
    }

    fn giving_back(&self) -> Request {
        let record = Record { claim: 0, fence: self.token, ..Record::default() };
        Request::Write { if_version: Some(self.version), record }
    }

    fn record(&self, wall: i64) -> Record {
        Record { claim: self.claim, fence: self.token, written: wall, lease: self.ttl }
    }
}
