//! Client side of a stream: the order of requests of the NATS store. The core takes every decision on their replies.

use std::time::Duration;

use tenure_core::acquire::{LeaseStart, RequestFailure};
use tenure_core::record::{
    CasRecord, KnownRecord, RecordClaim, RecordDecision, RecordHolder, RecordSource, Renewal,
    SeenRecord, StreamState, WriteFate,
};
use tenure_core::table::Mode;

use super::claim::ClaimState;
use super::operation::{InFlight, Operation, Outcome, ReplyEffect};
use super::stream_state::{StreamStep, StreamTurn, seen};
use crate::message::{Reply, Request, StreamMessage, StreamRecord};

impl ClaimState {
    pub(super) fn begin_at_stream(
        &mut self,
        operation: Operation,
        at: &mut StreamTurn<'_>,
    ) -> ReplyEffect {
        (self.stream.writes, self.stream.undo) = (0, false);
        if at.process.lineage.is_none() {
            return self.read_state(StreamStep::Open, at);
        }
        match operation {
            Operation::Claim { .. } => self.start_claim(at),
            _ => self.start_change(operation, at),
        }
    }

    /// Effect of a reply to a message of an operation.
    pub(super) fn handle_stream_reply(
        &mut self,
        in_flight: &InFlight,
        reply: Reply,
        at: &mut StreamTurn<'_>,
    ) -> ReplyEffect {
        let operation = in_flight.operation;
        match (reply, self.stream.step) {
            (Reply::StreamInfo(state), step) => {
                at.process.refresh(state, self.stream.before_info, at.now);
                match step {
                    StreamStep::Open => self.begin_at_stream(operation, at),
                    StreamStep::ServerTime => self.read(StreamStep::Read, at.process.connection),
                    StreamStep::Refresh { unclear } => {
                        let message = self.stream.read.take();
                        self.note_read(operation, message, unclear, in_flight, at)
                    }
                    _ => self.grant(Some(state), at),
                }
            }
            (Reply::StreamRecord(message), step) => {
                let unclear = step == StreamStep::ReadBack { unclear: true };
                let epoch = message.and_then(|message| message.record).map_or(0, |r| r.epoch);
                let known = at.process.lineage.map_or(0, |lineage| lineage.epoch());
                if epoch != known && epoch != 0 {
                    self.stream.read = message;
                    return self.read_state(StreamStep::Refresh { unclear }, at);
                }
                self.note_read(operation, message, unclear, in_flight, at)
            }
            (Reply::Landed { sequence }, _) => self.landed(operation, sequence, in_flight, at),
            (Reply::Conflict, _) if self.stream.undo => {
                ReplyEffect::Done(Outcome::Failed(RequestFailure::Unknown))
            }
            (Reply::Conflict, _) => self.after_conflict(operation, at),
            _ => ReplyEffect::Done(Outcome::Failed(RequestFailure::Unknown)),
        }
    }

    /// Effect of a request without a reply: after a write, the record shows its outcome. `None` if the operation ends.
    pub(super) fn stream_unanswered(&mut self) -> Option<ReplyEffect> {
        if self.stream.undo || self.stream.step != StreamStep::Write {
            return None;
        }
        Some(self.read(StreamStep::ReadBack { unclear: true }, self.stream.sent_over))
    }

    /// True if the next message is a write, whose time limit leaves time to read its outcome.
    pub(super) fn writes_to_stream(&self) -> bool {
        self.stream.step == StreamStep::Write
    }

    fn start_claim(&mut self, at: &mut StreamTurn<'_>) -> ReplyEffect {
        let known = &at.process.keys[at.key];
        let fresh = known.may_be_overwritten(at.now, at.process.connection);
        if fresh && let RecordDecision::Write(next) = self.decide_at_stream(known, at) {
            let effect = self.write(known.sequence, next, at);
            (self.stream.writes, self.stream.optimistic) = (0, true);
            return effect;
        }
        self.read_for_claim(at)
    }

    fn read_for_claim(&mut self, at: &StreamTurn<'_>) -> ReplyEffect {
        if at.process.lineage.is_some_and(|lineage| lineage.is_server_time_old(at.now)) {
            return self.read_state(StreamStep::ServerTime, at);
        }
        self.read(StreamStep::Read, at.process.connection)
    }

    fn decide_at_stream<'a>(
        &self,
        known: &'a KnownRecord<i64>,
        at: &StreamTurn<'_>,
    ) -> RecordDecision<'a, i64> {
        let server_time = at.process.lineage.map(|lineage| lineage.server_time(at.now));
        let rules = self.rules;
        let over = |holder: &RecordHolder<i64>| {
            if rules.take_over_by_observation {
                known.may_be_taken_over(holder, at.now, server_time)
            } else {
                at.wall - holder.by > i64::try_from(self.ttl.as_nanos()).unwrap_or(i64::MAX)
            }
        };
        let request = RecordClaim {
            id: u128::from(self.claim),
            mode: Mode::Exclusive,
            lease: self.ttl,
            by: &at.wall,
        };
        known.record.claim(&request, known.sequence, over)
    }

    /// Continues with a record that was read from the leader.
    fn note_read(
        &mut self,
        operation: Operation,
        message: Option<StreamMessage>,
        unclear: bool,
        in_flight: &InFlight,
        at: &mut StreamTurn<'_>,
    ) -> ReplyEffect {
        let failure = if unclear { RequestFailure::Unknown } else { RequestFailure::Transient };
        let Some(lineage) = &mut at.process.lineage else {
            return ReplyEffect::Done(Outcome::Failed(failure));
        };
        let seen = seen(message, self.stream.sent_over);
        let (epoch, fence) = (seen.record.epoch, seen.record.fence);
        if lineage.check_record(epoch, fence, seen.sequence).is_err() {
            return ReplyEffect::Done(Outcome::Failed(failure));
        }
        lineage.note(seen.sequence);
        let known = &mut at.process.keys[at.key];
        known.note(seen, RecordSource::Leader, in_flight.sent, at.now);
        match operation {
            Operation::Claim { .. } => self.claim_from_read(unclear, at),
            _ => self.change_from_read(operation, unclear, at),
        }
    }

    fn claim_from_read(&mut self, unclear: bool, at: &mut StreamTurn<'_>) -> ReplyEffect {
        let known = &at.process.keys[at.key];
        let claim = u128::from(self.claim);
        if unclear {
            match known.record.fate_of_grant(claim, known.sequence, self.stream.over) {
                WriteFate::Landed => {}
                WriteFate::Refused => {
                    return self.after_conflict(Operation::Claim { queue: true }, at);
                }
                WriteFate::Unsettled => {
                    return ReplyEffect::Done(Outcome::Failed(RequestFailure::Unknown));
                }
            }
        }
        match self.decide_at_stream(known, at) {
            RecordDecision::AlreadyGranted(_) => {
                self.stream.hold = Some((known.sequence, known.record.clone()));
                self.stream.hold_connection = self.stream.sent_over;
                self.stream.lease_start = LeaseStart::FromConfirm;
                if let Some(lineage) = at.process.lineage {
                    self.stream.before = lineage.mark_of_earlier_write();
                }
                self.read_state(StreamStep::Epoch, at)
            }
            RecordDecision::Write(_) if known.connection != at.process.connection => {
                self.read(StreamStep::Read, at.process.connection)
            }
            RecordDecision::Write(next) => self.write(known.sequence, next, at),
            RecordDecision::Contended(_) | RecordDecision::LimitMismatch(_) => {
                self.stream.contended = known.holders_hash(at.now);
                ReplyEffect::Done(Outcome::Contended)
            }
        }
    }

    fn landed(
        &mut self,
        operation: Operation,
        sequence: u64,
        in_flight: &InFlight,
        at: &mut StreamTurn<'_>,
    ) -> ReplyEffect {
        let (record, connection) = (self.stream.written.clone(), self.stream.sent_over);
        if let Some(lineage) = &mut at.process.lineage {
            lineage.note(sequence);
        }
        let seen = SeenRecord { sequence, record: record.clone(), timestamp: None, connection };
        let known = &mut at.process.keys[at.key];
        known.note(seen, RecordSource::Notification, in_flight.sent, at.now);
        if self.stream.undo {
            self.stream.hold = None;
            return ReplyEffect::Done(Outcome::Failed(RequestFailure::Transient));
        }
        self.stream.hold = Some((sequence, record));
        self.stream.hold_connection = connection;
        match operation {
            Operation::Claim { .. } => {
                self.stream.lease_start = LeaseStart::FromRequest;
                self.stream.acknowledged = Some(sequence);
                let before = self.stream.before;
                let lineage = at.process.lineage.as_mut();
                let doubtful = lineage.is_none_or(|lineage| lineage.doubts(sequence, before));
                if self.stream.over == 0 || doubtful {
                    return self.read_state(StreamStep::Epoch, at);
                }
                self.grant(None, at)
            }
            Operation::Renew => ReplyEffect::Done(Outcome::Renewed { handoff_requested: false }),
            _ => ReplyEffect::Done(Outcome::Released),
        }
    }

    /// Gives a grant its token, or undoes it.
    fn grant(&mut self, state: Option<StreamState>, at: &mut StreamTurn<'_>) -> ReplyEffect {
        let unknown = ReplyEffect::Done(Outcome::Failed(RequestFailure::Unknown));
        let Some((sequence, record)) = self.stream.hold.clone() else { return unknown };
        let claim = u128::from(self.claim);
        let (Some(lineage), Some(holder)) = (&mut at.process.lineage, record.holder(claim)) else {
            return unknown;
        };
        let number = holder.number(sequence);
        if let Ok(epoch) = lineage.epoch_of(number, self.stream.before, state) {
            (self.epoch, self.token) = (epoch, number);
            return ReplyEffect::Done(Outcome::Granted(self.stream.lease_start));
        }
        let Some(released) = record.release(claim, sequence) else { return unknown };
        self.stream.undo = true;
        self.write(sequence, released, at)
    }

    fn after_conflict(&mut self, operation: Operation, at: &mut StreamTurn<'_>) -> ReplyEffect {
        if !matches!(operation, Operation::Claim { .. }) {
            return self.read(StreamStep::ReadBack { unclear: false }, at.process.connection);
        }
        if self.stream.optimistic {
            return self.read_for_claim(at);
        }
        if self.stream.writes < 2 {
            return self.read(StreamStep::Read, at.process.connection);
        }
        // Another client was quicker twice, and its record was not read: a change from any version counts.
        self.stream.contended = u128::MAX;
        ReplyEffect::Done(Outcome::Contended)
    }

    fn start_change(&mut self, operation: Operation, at: &mut StreamTurn<'_>) -> ReplyEffect {
        let claim = u128::from(self.claim);
        let known = &at.process.keys[at.key];
        let Some((sequence, _)) = &self.stream.hold else {
            return self.read(StreamStep::ReadBack { unclear: false }, at.process.connection);
        };
        let current = known.connection == self.stream.hold_connection;
        if current && known.sequence > *sequence && known.record.holder(claim).is_some() {
            self.stream.hold = Some((known.sequence, known.record.clone()));
        }
        self.write_change(operation, at)
    }

    fn change_from_read(
        &mut self,
        operation: Operation,
        unclear: bool,
        at: &mut StreamTurn<'_>,
    ) -> ReplyEffect {
        let known = &at.process.keys[at.key];
        let (sequence, record) = (known.sequence, known.record.clone());
        let claim = u128::from(self.claim);
        if unclear {
            let written = self.stream.written.holder(claim).map(|holder| holder.renewal_count);
            match record.fate_of_change(claim, written, sequence, self.stream.over) {
                WriteFate::Landed => {
                    self.stream.hold = Some((sequence, record));
                    self.stream.hold_connection = self.stream.sent_over;
                    return ReplyEffect::Done(match operation {
                        Operation::Renew => Outcome::Renewed { handoff_requested: false },
                        _ => Outcome::Released,
                    });
                }
                WriteFate::Unsettled => {
                    return ReplyEffect::Done(Outcome::Failed(RequestFailure::Unknown));
                }
                WriteFate::Refused => {}
            }
        }
        self.stream.hold = Some((sequence, record));
        self.stream.hold_connection = self.stream.sent_over;
        if self.stream.writes >= 2 {
            return ReplyEffect::Done(Outcome::Failed(RequestFailure::Transient));
        }
        self.write_change(operation, at)
    }

    fn write_change(&mut self, operation: Operation, at: &mut StreamTurn<'_>) -> ReplyEffect {
        let claim = u128::from(self.claim);
        let Some((sequence, record)) = &self.stream.hold else {
            return ReplyEffect::Done(Outcome::Refused);
        };
        // After a reconnect the sequence alone proves nothing: see `may_be_overwritten`.
        if self.stream.hold_connection != at.process.connection {
            return self.read(StreamStep::ReadBack { unclear: false }, at.process.connection);
        }
        let renewal = Renewal {
            number: Some(self.token),
            attempted: self.stream.attempted,
            lease: self.ttl,
            held_for: Duration::ZERO,
        };
        let next = match operation {
            Operation::Renew => record.renew(claim, *sequence, renewal),
            _ => record.release(claim, *sequence),
        };
        let Some(next) = next else { return ReplyEffect::Done(Outcome::Refused) };
        let sequence = *sequence;
        if let Some(holder) = next.holder(claim) {
            self.stream.attempted = holder.renewal_count;
        }
        self.write(sequence, next, at)
    }

    fn write(
        &mut self,
        over: u64,
        mut record: CasRecord<i64>,
        at: &mut StreamTurn<'_>,
    ) -> ReplyEffect {
        record.epoch = at.process.lineage.map_or(0, |lineage| lineage.epoch());
        let sent = StreamRecord::from_core(&record, at.wall);
        let renews = self.stream.hold.is_some() && record.holder(u128::from(self.claim)).is_some();
        let conditional =
            if renews { self.rules.renewal_names_version } else { self.claims_name_version };
        self.stream.step = StreamStep::Write;
        (self.stream.writes, self.stream.optimistic) = (self.stream.writes + 1, false);
        (self.stream.over, self.stream.written) = (over, record);
        self.stream.before = at.process.mark();
        self.stream.sent_over = at.process.connection;
        let over = conditional.then_some(over);
        ReplyEffect::Send(Request::StreamWrite { over, record: sent })
    }

    fn read(&mut self, step: StreamStep, connection: u64) -> ReplyEffect {
        (self.stream.step, self.stream.sent_over) = (step, connection);
        ReplyEffect::Send(Request::StreamRead)
    }

    fn read_state(&mut self, step: StreamStep, at: &StreamTurn<'_>) -> ReplyEffect {
        self.stream.step = step;
        self.stream.before_info = at.process.mark();
        ReplyEffect::Send(Request::StreamInfo)
    }
}
