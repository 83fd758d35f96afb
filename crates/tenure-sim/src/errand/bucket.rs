//! The client's side of a bucket. What to write is the core's word; here is only which messages that takes.

use std::time::Duration;

use tenure_core::Time;
use tenure_core::acquire::{LeaseStart, RequestFailure};
use tenure_core::object::takeover::{TakeoverEvidence, WriteStamp};
use tenure_core::object::{self, MAX_HANDOFF_LEASE, NextHolder, ObjectDecision, WaiterReads};

use super::{Errand, Handle, Outcome, Step, What};
use crate::message::{Record, Request, Sight};
use crate::store::grain;

impl Handle {
    pub(super) fn begin_at_bucket(&self, what: What, wall: i64) -> Request {
        match what {
            What::Renew => self.renewal(wall),
            What::Abandon => Request::Silence { claim: self.claim },
            What::Claim { .. } | What::Wait | What::Look | What::Release => Request::Read,
        }
    }

    pub(super) fn hear_bucket(
        &mut self,
        errand: &Errand,
        seen: Sight,
        now: Time,
        wall: i64,
    ) -> Step {
        let sight = sight(seen);
        let ours = sight.owned_by(&self.name());
        if ours {
            (self.version, self.token) = (seen.version, seen.record.fence);
        }
        match errand.what {
            What::Claim { queue } => self.claim_at_bucket(errand, seen, &sight, queue, now),
            What::Wait => self.wait_at_bucket(errand, seen, &sight, now),
            What::Look => {
                let waiter = ![0, self.claim].contains(&seen.bell);
                Step::Done(Outcome::Renewed { waiter })
            }
            What::Renew if ours => Step::Send(self.renewal(wall)),
            What::Release | What::Abandon if ours => Step::Send(self.hand_over(seen, &sight)),
            // What was written before the wait was cut short may land yet.
            What::Abandon if std::mem::take(&mut self.unsettled) => {
                Step::Done(Outcome::Failed(RequestFailure::Unknown))
            }
            What::Abandon => Step::Done(Outcome::GivenBack),
            What::Renew | What::Release => Step::Done(Outcome::Refused),
        }
    }

    fn claim_at_bucket(
        &mut self,
        errand: &Errand,
        seen: Sight,
        sight: &object::ObjectRead<()>,
        queue: bool,
        now: Time,
    ) -> Step {
        // Nothing was written in this wait before its bell is rung below.
        let first = self.seen.first_seen(seen.version, errand.sent, now);
        let watch = TakeoverEvidence { rules: self.rules, ..TakeoverEvidence::new(first, now) };
        match self.decide(sight, &watch) {
            ObjectDecision::AlreadyGranted => Step::Done(Outcome::Granted(LeaseStart::FromConfirm)),
            ObjectDecision::Write(record) => self.take(seen, &record),
            ObjectDecision::Held | ObjectDecision::WaiterAhead => {
                self.looks = WaiterReads::new(sight, errand.sent, self.rules);
                self.note_ring(errand, seen, now);
                if seen.bell == self.claim || queue && seen.bell != 0 {
                    Step::Done(Outcome::Queued)
                } else if queue {
                    self.ring(now)
                } else {
                    Step::Done(Outcome::Busy)
                }
            }
        }
    }

    fn wait_at_bucket(
        &mut self,
        errand: &Errand,
        seen: Sight,
        sight: &object::ObjectRead<()>,
        now: Time,
    ) -> Step {
        self.unsettled = false;
        self.note_ring(errand, seen, now);
        let first = self.seen.first_seen(seen.version, errand.sent, now);
        let watch = self.looks.evidence(first, now);
        match self.decide(sight, &watch) {
            ObjectDecision::AlreadyGranted => {
                let counts = self.looks.lease_start(sight, self.ttl, errand.sent, grain(self.ttl));
                Step::Done(Outcome::Granted(counts))
            }
            ObjectDecision::Write(record) => {
                self.looks.note_ungranted(sight, errand.sent);
                (self.looked, self.unsettled) = (errand.sent, true);
                self.take(seen, &record)
            }
            ObjectDecision::Held | ObjectDecision::WaiterAhead => {
                self.looks.note_ungranted(sight, errand.sent);
                let due = seen.bell == self.claim && now.since(self.rung) >= self.ttl / 3;
                if seen.bell == 0 || due { self.ring(now) } else { Step::Pause }
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
    fn note_ring(&mut self, errand: &Errand, seen: Sight, now: Time) {
        if let Some(modified) = seen.rung {
            let (sent, date) = (errand.sent, seen.now);
            self.looks.record_write(WriteStamp { sent, replied: now, modified, date });
        }
    }

    fn take(&mut self, seen: Sight, record: &object::LockObject<()>) -> Step {
        self.token = record.fence.unwrap_or_default();
        Step::Send(Request::Write { if_version: Some(seen.version), record: kept(record) })
    }

    fn ring(&mut self, now: Time) -> Step {
        self.rung = now;
        Step::Send(Request::Ring { claim: self.claim })
    }

    /// What gives our hold back, to who rings if somebody does.
    fn hand_over(&self, seen: Sight, sight: &object::ObjectRead<()>) -> Request {
        let rings = ![0, self.claim].contains(&seen.bell);
        let lease = self.ttl.min(MAX_HANDOFF_LEASE);
        let heir = rings.then(|| NextHolder { id: seen.bell.to_string(), lease });
        let released = sight
            .record
            .as_ref()
            .and_then(|record| record.release(&self.name(), self.token, heir.as_ref(), sight.now));
        match released {
            Some(next) => Request::Write { if_version: Some(seen.version), record: kept(&next) },
            None => Request::Read,
        }
    }

    fn name(&self) -> String {
        self.claim.to_string()
    }
}

fn sight(seen: Sight) -> object::ObjectRead<()> {
    let Sight { version, record, modified, now, .. } = seen;
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

fn kept(record: &object::LockObject<()>) -> Record {
    let held = !record.expires.is_zero();
    let claim = if held { record.owner.parse().unwrap_or(0) } else { 0 };
    let (fence, lease) = (record.fence.unwrap_or_default(), record.lease.unwrap_or_default());
    Record { claim, fence, lease, written: 0 }
}
