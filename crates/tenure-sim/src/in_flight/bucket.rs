//! Client side of a bucket. The core decides what to write; this module only turns decisions into messages.

use std::time::Duration;

use tenure_core::Time;
use tenure_core::acquire::{LeaseStart, RequestFailure};
use tenure_core::object::takeover::{TakeoverEvidence, WriteStamp};
use tenure_core::object::{self, MAX_HANDOFF_LEASE, NextHolder, ObjectDecision, WaiterReads};

use super::claim::ClaimState;
use super::operation::{InFlight, Operation, Outcome, ReplyEffect};
use crate::message::{BucketRead, Record, Request};
use crate::store::grain;

impl ClaimState {
    pub(super) fn begin_at_bucket(&self, operation: Operation) -> Request {
        match operation {
            Operation::Renew => self.renew_bucket_request(),
            Operation::Abandon => Request::Silence { claim: self.claim },
            Operation::Claim { .. }
            | Operation::Wait
            | Operation::CheckHandoff
            | Operation::Release => Request::Read,
        }
    }

    pub(super) fn handle_bucket_reply(
        &mut self,
        in_flight: &InFlight,
        read: BucketRead,
        now: Time,
    ) -> ReplyEffect {
        let object = object_read(read);
        let ours = object.owned_by(&self.name());
        if ours {
            (self.version, self.token) = (read.version, read.record.fence);
            self.owned = Some(object.clone());
        }
        match in_flight.operation {
            Operation::Claim { queue } => {
                self.claim_at_bucket(in_flight, read, &object, queue, now)
            }
            Operation::Wait => self.wait_at_bucket(in_flight, read, &object, now),
            Operation::CheckHandoff => {
                let handoff_requested = ![0, self.claim].contains(&read.bell);
                ReplyEffect::Done(Outcome::Renewed { handoff_requested })
            }
            Operation::Renew if ours => ReplyEffect::Send(self.renew_bucket_request()),
            Operation::Release | Operation::Abandon if ours => {
                ReplyEffect::Send(self.release_bucket_request(read, &object))
            }
            // A write before the wait was interrupted may still take effect.
            Operation::Abandon if std::mem::take(&mut self.unsettled) => {
                ReplyEffect::Done(Outcome::Failed(RequestFailure::Unknown))
            }
            Operation::Abandon => ReplyEffect::Done(Outcome::Released),
            Operation::Renew | Operation::Release => ReplyEffect::Done(Outcome::Refused),
        }
    }

    fn claim_at_bucket(
        &mut self,
        in_flight: &InFlight,
        read: BucketRead,
        object: &object::ObjectRead<()>,
        queue: bool,
        now: Time,
    ) -> ReplyEffect {
        // This wait has written nothing yet; its bell is rung below.
        let first = self.observation.first_seen(read.version, in_flight.sent, now);
        let evidence = TakeoverEvidence { rules: self.rules, ..TakeoverEvidence::new(first, now) };
        match self.decide(object, &evidence) {
            ObjectDecision::AlreadyGranted => {
                ReplyEffect::Done(Outcome::Granted(LeaseStart::FromConfirm))
            }
            ObjectDecision::Write(record) => self.take(read, &record),
            ObjectDecision::Held | ObjectDecision::WaiterAhead => {
                self.reads = WaiterReads::new(object, in_flight.sent, self.rules);
                self.note_ring(in_flight, read, now);
                if read.bell == self.claim || queue && read.bell != 0 {
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
        in_flight: &InFlight,
        read: BucketRead,
        object: &object::ObjectRead<()>,
        now: Time,
    ) -> ReplyEffect {
        self.unsettled = false;
        self.note_ring(in_flight, read, now);
        let first = self.observation.first_seen(read.version, in_flight.sent, now);
        let evidence = self.reads.evidence(first, now);
        match self.decide(object, &evidence) {
            ObjectDecision::AlreadyGranted => {
                let lease_start =
                    self.reads.lease_start(object, self.ttl, in_flight.sent, grain(self.ttl));
                ReplyEffect::Done(Outcome::Granted(lease_start))
            }
            ObjectDecision::Write(record) => {
                self.reads.note_ungranted(object, in_flight.sent);
                (self.read_sent, self.unsettled) = (in_flight.sent, true);
                self.take(read, &record)
            }
            ObjectDecision::Held | ObjectDecision::WaiterAhead => {
                self.reads.note_ungranted(object, in_flight.sent);
                let due = read.bell == self.claim && now.since(self.rung) >= self.ttl / 3;
                if read.bell == 0 || due { self.ring(now) } else { ReplyEffect::Pause }
            }
        }
    }

    fn decide(
        &self,
        object: &object::ObjectRead<()>,
        evidence: &TakeoverEvidence,
    ) -> ObjectDecision<()> {
        object.claim(&self.name(), self.ttl, || (), grain(self.ttl), evidence)
    }

    /// Records the store's timestamp of the bell, if the reply is to a ring of this claim.
    fn note_ring(&mut self, in_flight: &InFlight, read: BucketRead, now: Time) {
        if let Some(modified) = read.rung {
            let (sent, date) = (in_flight.sent, read.now);
            self.reads.record_write(WriteStamp { sent, replied: now, modified, date });
        }
    }

    fn take(&mut self, read: BucketRead, record: &object::LockObject<()>) -> ReplyEffect {
        self.token = record.fence.unwrap_or_default();
        let (modified, date) = (read.modified, read.now);
        self.owned = Some(object::ObjectRead { record: Some(record.clone()), modified, date });
        ReplyEffect::Send(Request::Write {
            if_version: self.claims_name_version.then_some(read.version),
            record: stored_record(record),
        })
    }

    fn ring(&mut self, now: Time) -> ReplyEffect {
        self.rung = now;
        ReplyEffect::Send(Request::Ring { claim: self.claim })
    }

    /// Request that renews the hold, from the record that was last read or written.
    fn renew_bucket_request(&self) -> Request {
        let if_version = self.rules.renewal_names_version.then_some(self.version);
        let renewed = self.owned.as_ref().and_then(|read| {
            let record = read.record.as_ref()?;
            record.renew(&self.name(), self.token, self.ttl, read.date)
        });
        match renewed {
            Some(record) => Request::Write { if_version, record: stored_record(&record) },
            None => Request::Read,
        }
    }

    /// Request that releases the hold, or hands it to the waiter that rings.
    fn release_bucket_request(&self, read: BucketRead, object: &object::ObjectRead<()>) -> Request {
        let rings = ![0, self.claim].contains(&read.bell);
        let lease = self.ttl.min(MAX_HANDOFF_LEASE);
        let next_holder = rings.then(|| NextHolder { id: read.bell.to_string(), lease });
        let released = object.record.as_ref().and_then(|record| {
            record.release(&self.name(), self.token, next_holder.as_ref(), object.date)
        });
        match released {
            Some(next) => {
                Request::Write { if_version: Some(read.version), record: stored_record(&next) }
            }
            None => Request::Read,
        }
    }

    fn name(&self) -> String {
        self.claim.to_string()
    }
}

fn object_read(read: BucketRead) -> object::ObjectRead<()> {
    let BucketRead { version, record, modified, now, .. } = read;
    let held = record.claim != 0;
    let record = (version > 0).then(|| object::LockObject {
        owner: record.claim.to_string(),
        // With a lease, the record's own expiry only shows that it was released.
        expires: if held { Duration::MAX } else { Duration::ZERO },
        waiter: None,
        fence: Some(record.fence),
        lease: held.then_some(record.lease),
        extra: (),
    });
    object::ObjectRead { record, modified, date: now }
}

fn stored_record(record: &object::LockObject<()>) -> Record {
    let held = !record.expires.is_zero();
    let claim = if held { record.owner.parse().unwrap_or(0) } else { 0 };
    let (fence, lease) = (record.fence.unwrap_or_default(), record.lease.unwrap_or_default());
    Record { claim, fence, lease }
}
