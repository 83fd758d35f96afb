//! The client's side of a bucket. What to write is the core's word; here is only which messages that takes.

use std::time::Duration;

use tenure_core::Time;
use tenure_core::acquire::{LeaseStart, RequestFailure};
use tenure_core::object::takeover::{TakeoverEvidence, WriteStamp};
use tenure_core::object::{self, MAX_HANDOFF_LEASE, NextHolder, ObjectDecision, WaiterReads};

use super::{ClaimState, InFlight, Operation, Outcome, ReplyEffect};
use crate::message::{BucketRead, Record, Request};
use crate::store::grain;

impl ClaimState {
    pub(super) fn begin_at_bucket(&self, what: Operation, wall: i64) -> Request {
        match what {
            Operation::Renew => self.renew_request(wall),
            Operation::Abandon => Request::Silence { claim: self.claim },
            Operation::Claim { .. }
            | Operation::Wait
            | Operation::CheckHandoff
            | Operation::Release => Request::Read,
        }
    }

    pub(super) fn handle_bucket_reply(
        &mut self,
        errand: &InFlight,
        seen: BucketRead,
        now: Time,
        wall: i64,
    ) -> ReplyEffect {
        let sight = object_read(seen);
        let ours = sight.owned_by(&self.name());
        if ours {
            (self.version, self.token) = (seen.version, seen.record.fence);
        }
        match errand.operation {
            Operation::Claim { queue } => self.claim_at_bucket(errand, seen, &sight, queue, now),
            Operation::Wait => self.wait_at_bucket(errand, seen, &sight, now),
            Operation::CheckHandoff => {
                let waiter = ![0, self.claim].contains(&seen.bell);
                ReplyEffect::Done(Outcome::Renewed { handoff_requested: waiter })
            }
            Operation::Renew if ours => ReplyEffect::Send(self.renew_request(wall)),
            Operation::Release | Operation::Abandon if ours => {
                ReplyEffect::Send(self.release_bucket_request(seen, &sight))
            }
            // What was written before the wait was cut short may land yet.
            Operation::Abandon if std::mem::take(&mut self.unsettled) => {
                ReplyEffect::Done(Outcome::Failed(RequestFailure::Unknown))
            }
            Operation::Abandon => ReplyEffect::Done(Outcome::Released),
            Operation::Renew | Operation::Release => ReplyEffect::Done(Outcome::Refused),
        }
    }

    fn claim_at_bucket(
        &mut self,
        errand: &InFlight,
        seen: BucketRead,
        sight: &object::ObjectRead<()>,
        queue: bool,
        now: Time,
    ) -> ReplyEffect {
        // Nothing was written in this wait before its bell is rung below.
        let first = self.observation.first_seen(seen.version, errand.sent, now);
        let watch = TakeoverEvidence { rules: self.rules, ..TakeoverEvidence::new(first, now) };
        match self.decide(sight, &watch) {
            ObjectDecision::AlreadyGranted => {
                ReplyEffect::Done(Outcome::Granted(LeaseStart::FromConfirm))
            }
            ObjectDecision::Write(record) => self.take(seen, &record),
            ObjectDecision::Held | ObjectDecision::WaiterAhead => {
                self.reads = WaiterReads::new(sight, errand.sent, self.rules);
                self.note_ring(errand, seen, now);
                if seen.bell == self.claim || queue && seen.bell != 0 {
                    ReplyEffect::Done(Outcome::Queued)
                } else if queue {
                    self.ring(now)
                } else {
                    ReplyEffect::Done(Outcome::Contended)
                }
            }
        }
    }

    fn wait_at_bucket(
        &mut self,
        errand: &InFlight,
        seen: BucketRead,
        sight: &object::ObjectRead<()>,
        now: Time,
    ) -> ReplyEffect {
        self.unsettled = false;
        self.note_ring(errand, seen, now);
        let first = self.observation.first_seen(seen.version, errand.sent, now);
        let watch = self.reads.evidence(first, now);
        match self.decide(sight, &watch) {
            ObjectDecision::AlreadyGranted => {
                let counts = self.reads.lease_start(sight, self.ttl, errand.sent, grain(self.ttl));
                ReplyEffect::Done(Outcome::Granted(counts))
            }
            ObjectDecision::Write(record) => {
                self.reads.note_ungranted(sight, errand.sent);
                (self.read_sent, self.unsettled) = (errand.sent, true);
                self.take(seen, &record)
            }
            ObjectDecision::Held | ObjectDecision::WaiterAhead => {
                self.reads.note_ungranted(sight, errand.sent);
                let due = seen.bell == self.claim && now.since(self.rung) >= self.ttl / 3;
                if seen.bell == 0 || due { self.ring(now) } else { ReplyEffect::Pause }
            }
        }
    }

    fn decide(
        &self,
        sight: &object::ObjectRead<()>,
        watch: &TakeoverEvidence,
    ) -> ObjectDecision<()> {
        sight.claim(&self.name(), self.ttl, || (), grain(self.ttl), watch)
    }

    /// Notes how the store stamped a bell, if the answer is to a ring of ours.
    fn note_ring(&mut self, errand: &InFlight, seen: BucketRead, now: Time) {
        if let Some(modified) = seen.rung {
            let (sent, date) = (errand.sent, seen.now);
            self.reads.record_write(WriteStamp { sent, replied: now, modified, date });
        }
    }

    fn take(&mut self, seen: BucketRead, record: &object::LockObject<()>) -> ReplyEffect {
        self.token = record.fence.unwrap_or_default();
        ReplyEffect::Send(Request::Write {
            if_version: Some(seen.version),
            record: stored_record(record),
        })
    }

    fn ring(&mut self, now: Time) -> ReplyEffect {
        self.rung = now;
        ReplyEffect::Send(Request::Ring { claim: self.claim })
    }

    /// What gives our hold back, to who rings if somebody does.
    fn release_bucket_request(&self, seen: BucketRead, sight: &object::ObjectRead<()>) -> Request {
        let rings = ![0, self.claim].contains(&seen.bell);
        let lease = self.ttl.min(MAX_HANDOFF_LEASE);
        let heir = rings.then(|| NextHolder { id: seen.bell.to_string(), lease });
        let released = sight
            .record
            .as_ref()
            .and_then(|record| record.release(&self.name(), self.token, heir.as_ref(), sight.now));
        match released {
            Some(next) => {
                Request::Write { if_version: Some(seen.version), record: stored_record(&next) }
            }
            None => Request::Read,
        }
    }

    fn name(&self) -> String {
        self.claim.to_string()
    }
}

fn object_read(seen: BucketRead) -> object::ObjectRead<()> {
    let BucketRead { version, record, modified, now, .. } = seen;
    let held = record.claim != 0;
    let record = (version > 0).then(|| object::LockObject {
        owner: record.claim.to_string(),
        // Its own end says nothing where there is a lease, but for whether it was released.
        expires: if held { Duration::MAX } else { Duration::ZERO },
        waiter: None,
        fence: Some(record.fence),
        lease: held.then_some(record.lease),
        extra: (),
    });
    object::ObjectRead { record, modified, now }
}

fn stored_record(record: &object::LockObject<()>) -> Record {
    let held = !record.expires.is_zero();
    let claim = if held { record.owner.parse().unwrap_or(0) } else { 0 };
    let (fence, lease) = (record.fence.unwrap_or_default(), record.lease.unwrap_or_default());
    Record { claim, fence, lease, written: 0 }
}
