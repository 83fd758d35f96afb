//! Acquisition: claim, then wait in the queue or back off, until granted, timed out or abandoned.
//!
//! One machine serves every store. At most one request is in flight. Four requests may change the store:
//! [`AcquireCommand::Claim`], [`AcquireCommand::Confirm`], [`AcquireCommand::Release`] and [`AcquireCommand::Abandon`].
//! Until such a request is answered, the machine may answer the caller, but it issues no other request. An
//! [`AcquireCommand::Wait`] or [`AcquireCommand::Watch`] ends early if another command follows.
//!
//! The caller is answered once. If the caller was cancelled, or no clear reply came in time, the store may still keep a
//! hold or a place for this claim. The machine then continues until the hold or the place is released, or must have
//! expired.

mod message;

use std::collections::VecDeque;
use std::error::Error;
use std::time::Duration;

pub use self::message::{AcquireAnswer, AcquireCommand, AcquireInput, LeaseStart, RequestFailure};
use crate::lease::Lease;
use crate::retry::{Retry, RetryContext};
use crate::{Machine, Random, Time};

type ErrorRef<'a> = &'a (dyn Error + 'static);

/// Settings of one acquisition.
#[derive(Debug)]
pub struct AcquireOptions {
    /// Requested lease.
    pub lease: Lease,
    /// Claim once, and take no place in a queue.
    pub try_once: bool,
    /// Instant at which the caller stops waiting; `None` for never.
    pub until: Option<Time>,
    /// Pause between claims on a store without a queue.
    pub retry: Box<dyn Retry>,
    /// Interval of claims on a store that pushes changes, in case a notification is lost; `None` if the store does not
    /// push.
    pub fallback_interval: Option<Duration>,
    /// Seed of the jitter.
    pub seed: u64,
}

/// Longest wait in one request. If the store lost our place, we notice it after at most this time.
const WAIT_SLICE: Duration = Duration::from_secs(30);
/// Time past the caller's limit for which a clear reply is awaited before the answer is [`AcquireAnswer::Unknown`].
const ANSWER_GRACE: Duration = Duration::from_secs(1);

/// State machine that acquires one hold.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is true or false in every phase")]
pub struct Acquire {
    lease: Lease,
    try_once: bool,
    until: Time,
    retry: Box<dyn Retry>,
    fallback_interval: Option<Duration>,
    random: Random,
    phase: Phase,
    started: Time,
    attempt: u32,
    /// True if the last attempt ended with an error, false if it found the key contended.
    failing: bool,
    /// Time at which the last claim without a clear reply was sent. It may have taken effect at the store.
    unanswered_since: Option<Time>,
    /// The unanswered claim may have taken a place in the queue. That place can be granted at any time, so a hold stays
    /// possible however much time has passed.
    may_be_queued: bool,
    /// The store may have granted an earlier attempt of this claim: that attempt got no clear reply, took a place in a
    /// queue, or was granted and not confirmed. The store recognises the claim and may answer a repeat with that grant,
    /// whose lease began before the repeat was sent. So the next grant has to be confirmed.
    may_be_granted: bool,
    /// The wait failed, and no retry will help. Once the place is abandoned, the answer is [`AcquireAnswer::Failed`].
    permanent_failure: bool,
    answered: bool,
    commands: VecDeque<AcquireCommand>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Claiming {
        sent: Time,
    },
    Waiting,
    Watching {
        until: Time,
    },
    Confirming {
        sent: Time,
        granted_at: Time,
    },
    /// Between two attempts to confirm.
    Unconfirmed {
        retry_at: Time,
        granted_at: Time,
    },
    Releasing,
    Abandoning,
    /// Pause before the claim is sent again, because it is unknown whether a claim or a release took effect.
    Settling {
        retry_at: Time,
    },
    Finished,
}

impl Acquire {
    /// Creates the machine. Its first command is a claim.
    pub fn new(options: AcquireOptions, now: Time) -> Self {
        let AcquireOptions { lease, try_once, until, retry, fallback_interval: backstop, seed } =
            options;
        let mut acquire = Self {
            lease,
            try_once,
            // A single attempt takes one request, so it needs no limit from the caller.
            until: if try_once { now + lease.request_limit() } else { until.unwrap_or(Time::MAX) },
            retry,
            fallback_interval: backstop,
            random: Random::new(seed),
            phase: Phase::Finished,
            started: now,
            attempt: 0,
            failing: false,
            unanswered_since: None,
            may_be_queued: false,
            may_be_granted: false,
            permanent_failure: false,
            answered: false,
            commands: VecDeque::new(),
        };
        acquire.claim(now);
        acquire
    }

    /// Handles a failed request. The retry strategy receives the error.
    pub fn handle_failure(&mut self, failure: RequestFailure, error: ErrorRef<'_>, now: Time) {
        self.apply(AcquireInput::Failed(failure), Some(error), now);
    }

    /// True if the last attempt ended with an error, false if it found the key contended.
    pub fn is_failing(&self) -> bool {
        self.failing
    }
}

impl Machine for Acquire {
    type Input = AcquireInput;
    type Command = AcquireCommand;

    fn handle(&mut self, input: AcquireInput, now: Time) {
        self.apply(input, None, now);
    }

    fn handle_timeout(&mut self, now: Time) {
        match self.phase {
            Phase::Waiting if now >= self.until => self.abandon(),
            Phase::Watching { .. } if now >= self.until => self.give_up(now),
            Phase::Watching { until } if now >= until => self.claim(now),
            Phase::Unconfirmed { retry_at, granted_at } if now >= retry_at => {
                self.confirm(granted_at, now);
            }
            Phase::Settling { retry_at } if now >= retry_at => self.claim(now),
            _ => {}
        }
        if !self.answered && now >= self.answer_by() {
            let sent = self.note_unanswered(now);
            // The machine repeats the claim until this attempt has settled. The last repeat is sent just before that
            // instant at the latest. The repeat may be granted too, so its own time to settle is added.
            let last_repeat = self.lease.settled_at(sent);
            self.answer(AcquireAnswer::Unknown { until: self.lease.settled_at(last_repeat) });
        }
    }

    fn poll_timeout(&self) -> Option<Time> {
        let own = match self.phase {
            Phase::Watching { until } => until.min(self.until),
            Phase::Waiting => self.until,
            Phase::Unconfirmed { retry_at, .. } | Phase::Settling { retry_at } => retry_at,
            _ => Time::MAX,
        };
        let answer = if self.answered { Time::MAX } else { self.answer_by() };
        let next = own.min(answer);
        (next != Time::MAX).then_some(next)
    }

    fn poll_command(&mut self) -> Option<AcquireCommand> {
        self.commands.pop_front()
    }
}

impl Acquire {
    fn apply(&mut self, input: AcquireInput, error: Option<ErrorRef<'_>>, now: Time) {
        match input {
            AcquireInput::WaitUntil(until) => self.until = until.unwrap_or(Time::MAX),
            AcquireInput::Cancel => self.cancel(now),
            _ => match self.phase {
                Phase::Claiming { sent } => self.on_claim_reply(input, sent, error, now),
                Phase::Waiting => self.on_wait_reply(input, error, now),
                Phase::Watching { .. } if input == AcquireInput::Changed => self.claim(now),
                Phase::Confirming { sent, granted_at } => {
                    self.on_confirm_reply(input, sent, granted_at, now);
                }
                Phase::Releasing | Phase::Abandoning => self.on_release_reply(input, now),
                Phase::Watching { .. }
                | Phase::Unconfirmed { .. }
                | Phase::Settling { .. }
                | Phase::Finished => {}
            },
        }
        self.handle_timeout(now);
    }

    fn answer_by(&self) -> Time {
        self.until + self.lease.request_limit().min(ANSWER_GRACE)
    }

    fn claim(&mut self, now: Time) {
        self.phase = Phase::Claiming { sent: now };
        self.attempt = self.attempt.saturating_add(1);
        let queue = !self.try_once && !self.answered && now < self.until;
        self.may_be_queued |= queue;
        self.request(AcquireCommand::Claim { limit: self.lease.request_limit(), queue });
    }

    fn on_claim_reply(
        &mut self,
        input: AcquireInput,
        sent: Time,
        error: Option<ErrorRef<'_>>,
        now: Time,
    ) {
        if let AcquireInput::Failed(failure) = input {
            self.failing = true;
            return self.claim_failed(failure, sent, error, now);
        }
        self.failing = false;
        self.may_be_queued = false;
        self.unanswered_since = None;
        match input {
            // A deadline that counts from `sent` could lie after the end of the store's lease.
            AcquireInput::Granted(LeaseStart::FromRequest) if self.may_be_granted => {
                self.on_grant(LeaseStart::FromConfirm, sent, now);
            }
            AcquireInput::Granted(start) => self.on_grant(start, sent, now),
            AcquireInput::Queued if self.caller_done(now) || self.try_once => self.abandon(),
            AcquireInput::Queued => self.wait(now),
            AcquireInput::Contended { .. } if self.answered => self.finish(),
            AcquireInput::Contended { .. } if self.try_once => {
                self.answer(AcquireAnswer::Contended);
                self.finish();
            }
            AcquireInput::Contended { retry_after } => {
                self.watch(retry_after.unwrap_or_default(), now);
            }
            _ => {}
        }
    }

    fn claim_failed(
        &mut self,
        failure: RequestFailure,
        sent: Time,
        error: Option<ErrorRef<'_>>,
        now: Time,
    ) {
        if failure == RequestFailure::Unknown {
            self.may_be_granted = true;
            if !self.answered {
                self.unanswered_since = Some(sent);
            }
            return self.settle_later(now);
        }
        let may_retry =
            failure == RequestFailure::Transient && !self.try_once && !self.caller_done(now);
        let earlier = self.unanswered_since.filter(|earlier| *earlier != sent);
        let unsettled = earlier.is_some_and(|earlier| now < self.lease.settled_at(earlier));
        if earlier.is_some() && (unsettled || self.may_be_queued) {
            // An earlier attempt may have been granted or queued although this one failed. To answer `Failed` now would
            // deny a hold that may exist, so the machine repeats the claim until the earlier attempt has settled.
            if failure == RequestFailure::Permanent {
                self.until = self.until.min(now);
            }
            if may_retry && !unsettled {
                return self.retry(error, now);
            }
            return self.settle_later(now);
        }
        self.unanswered_since = None;
        self.may_be_queued = false;
        if may_retry {
            self.retry(error, now);
        } else {
            self.answer(AcquireAnswer::Failed);
            self.finish();
        }
    }

    /// Claims again after a short pause, to learn the outcome of an unanswered claim. Once the caller has been
    /// answered, this ends when the store's lease on any such grant must have expired.
    fn settle_later(&mut self, now: Time) {
        let retry_at = now + self.lease.retry_pause();
        let settled =
            self.unanswered_since.is_none_or(|sent| retry_at >= self.lease.settled_at(sent));
        if self.answered && settled {
            self.finish();
        } else {
            self.phase = Phase::Settling { retry_at };
        }
    }

    fn wait(&mut self, now: Time) {
        self.phase = Phase::Waiting;
        self.may_be_granted = true;
        let limit = WAIT_SLICE.min(self.until.since(now));
        self.request(AcquireCommand::Wait { limit });
    }

    fn on_wait_reply(&mut self, input: AcquireInput, error: Option<ErrorRef<'_>>, now: Time) {
        match input {
            // Two kinds of grant need no renewal. A grant without a lease has no deadline. `Since` carries an instant
            // of our own clock at which the store had not granted yet: the store's lease began after it and therefore
            // ends after our deadline, however long the reply took. If it took so long that the deadline has passed,
            // `acquired_or_late` releases the hold.
            AcquireInput::Granted(start @ (LeaseStart::NoLease | LeaseStart::Since(_))) => {
                self.on_grant(start, now, now);
            }
            // Any other grant out of a wait needs a renewal. The store made the grant at an unknown instant of the
            // wait, perhaps long before its reply arrived: `now` would give a deadline after the end of the store's
            // lease.
            AcquireInput::Granted(_) if self.lease.rules().confirm_waited_grants => {
                self.on_grant(LeaseStart::FromConfirm, now, now);
            }
            AcquireInput::Granted(_) => self.on_grant(LeaseStart::FromRequest, now, now),
            AcquireInput::StillQueued => self.wait(now),
            AcquireInput::PlaceLost => self.retry(None, now),
            AcquireInput::Failed(RequestFailure::Permanent) => {
                self.failing = true;
                self.permanent_failure = true;
                self.until = self.until.min(now);
                self.abandon();
            }
            // The store may have kept the place: the repeated claim finds it again.
            AcquireInput::Failed(_) => {
                self.failing = true;
                self.unanswered_since = Some(now);
                self.may_be_queued = true;
                self.retry(error, now);
            }
            _ => {}
        }
    }

    fn on_grant(&mut self, start: LeaseStart, sent: Time, now: Time) {
        match start {
            _ if self.answered => self.release(),
            LeaseStart::NoLease => self.acquired(sent, Time::MAX),
            LeaseStart::FromConfirm => self.confirm(now, now),
            LeaseStart::Since(at) => self.acquired_or_late(at, now),
            LeaseStart::FromRequest => self.acquired_or_late(sent, now),
        }
    }

    /// Answers with the hold. A grant that is past its own deadline is released instead (contract 4): its reply arrived
    /// so late that another client may hold the lock already.
    fn acquired_or_late(&mut self, sent: Time, now: Time) {
        let deadline = self.lease.deadline(sent, now);
        if now >= deadline && self.lease.rules().release_late_grants {
            self.release();
        } else {
            self.acquired(sent, deadline);
        }
    }

    fn acquired(&mut self, sent: Time, deadline: Time) {
        self.retry.reset();
        self.answer(AcquireAnswer::Acquired { sent, deadline });
        self.finish();
    }

    fn confirm(&mut self, granted_at: Time, now: Time) {
        if self.answered || now >= granted_at + self.lease.ttl() {
            return self.release();
        }
        self.phase = Phase::Confirming { sent: now, granted_at };
        self.may_be_granted = true;
        self.request(AcquireCommand::Confirm { limit: self.lease.request_limit() });
    }

    fn on_confirm_reply(&mut self, input: AcquireInput, sent: Time, granted_at: Time, now: Time) {
        match input {
            AcquireInput::Confirmed if self.answered => self.release(),
            AcquireInput::Confirmed => self.acquired_or_late(sent, now),
            AcquireInput::Refused if self.answered => self.finish(),
            // The hold has ended meanwhile. A single attempt does not wait for the next one.
            AcquireInput::Refused if self.try_once => {
                self.answer(AcquireAnswer::Contended);
                self.finish();
            }
            AcquireInput::Refused => self.retry(None, now),
            AcquireInput::Failed(_) => {
                self.failing = true;
                let retry_at = now + self.lease.retry_pause();
                self.phase = Phase::Unconfirmed { retry_at, granted_at };
            }
            _ => {}
        }
    }

    fn release(&mut self) {
        self.phase = Phase::Releasing;
        self.may_be_granted = true;
        self.request(AcquireCommand::Release { limit: self.lease.request_limit() });
    }

    fn abandon(&mut self) {
        self.phase = Phase::Abandoning;
        self.may_be_granted = true;
        self.request(AcquireCommand::Abandon { limit: self.lease.request_limit() });
    }

    fn on_release_reply(&mut self, input: AcquireInput, now: Time) {
        match input {
            AcquireInput::Released | AcquireInput::Refused if self.answered => self.finish(),
            AcquireInput::Released | AcquireInput::Refused if self.try_once => {
                self.answer(AcquireAnswer::Contended);
                self.finish();
            }
            AcquireInput::Released | AcquireInput::Refused => self.retry(None, now),
            AcquireInput::Failed(_) => {
                // The repeated claim finds the hold or the place if it is still there, and then it is released.
                self.may_be_queued |= self.phase == Phase::Abandoning;
                self.unanswered_since = self.unanswered_since.or(Some(now));
                self.settle_later(now);
            }
            _ => {}
        }
    }

    /// Waits until a contended key changes, if the store pushes changes, or until the next claim is due.
    fn watch(&mut self, at_least: Duration, now: Time) {
        match self.fallback_interval {
            Some(backstop) => {
                let spread = 0.75 + self.random.unit() / 2.0;
                self.pause(backstop.mul_f64(spread).max(at_least), now);
            }
            None => self.retry_after(at_least, None, now),
        }
    }

    fn retry(&mut self, error: Option<ErrorRef<'_>>, now: Time) {
        self.retry_after(Duration::ZERO, error, now);
    }

    fn retry_after(&mut self, at_least: Duration, last_error: Option<ErrorRef<'_>>, now: Time) {
        let elapsed = now.since(self.started);
        let context = RetryContext { attempt: self.attempt, elapsed, last_error };
        match self.retry.next_delay(&context, self.random.unit()) {
            Some(delay) => self.pause(delay.max(at_least), now),
            None if self.unanswered_since.is_some() => {
                self.until = self.until.min(now);
                self.settle_later(now);
            }
            None => {
                self.answer(if self.failing {
                    AcquireAnswer::Failed
                } else {
                    AcquireAnswer::GaveUp
                });
                self.finish();
            }
        }
    }

    /// Waits for `delay`, or until the key changes. Then the claim is sent again.
    fn pause(&mut self, delay: Duration, now: Time) {
        if self.caller_done(now) {
            self.give_up(now);
        } else {
            self.phase = Phase::Watching { until: now + delay };
            self.request(AcquireCommand::Watch);
        }
    }

    fn give_up(&mut self, now: Time) {
        if self.unanswered_since.is_none() {
            self.answer(if self.permanent_failure {
                AcquireAnswer::Failed
            } else {
                AcquireAnswer::TimedOut
            });
        }
        self.settle_or_finish(now);
    }

    fn cancel(&mut self, now: Time) {
        let claiming = matches!(self.phase, Phase::Claiming { .. });
        if !self.answered && (claiming || self.unanswered_since.is_some()) {
            self.note_unanswered(now);
        }
        self.answered = true;
        match self.phase {
            Phase::Waiting => self.abandon(),
            Phase::Watching { .. } => self.settle_or_finish(now),
            Phase::Unconfirmed { .. } => self.release(),
            _ => {}
        }
    }

    /// Notes that the claim is unanswered and may have taken effect. Returns the new `unanswered_since`.
    ///
    /// If the claim was unanswered before, that instant is kept, with one exception: a claim that may be queued has
    /// settled. Its place may be granted even then, so the time to settle begins again now.
    fn note_unanswered(&mut self, now: Time) -> Time {
        if self.may_be_queued
            && self.unanswered_since.is_some_and(|sent| now >= self.lease.settled_at(sent))
        {
            self.unanswered_since = Some(now);
        }
        *self.unanswered_since.get_or_insert(match self.phase {
            Phase::Claiming { sent } | Phase::Confirming { sent, .. } => sent,
            _ => now,
        })
    }

    fn settle_or_finish(&mut self, now: Time) {
        if self.unanswered_since.is_some() { self.settle_later(now) } else { self.finish() }
    }

    fn caller_done(&self, now: Time) -> bool {
        self.answered || now >= self.until
    }

    /// Queues a command that sends a request. It replaces a wait or watch that the driver has not polled yet.
    fn request(&mut self, command: AcquireCommand) {
        self.commands.retain(|queued| {
            !matches!(queued, AcquireCommand::Wait { .. } | AcquireCommand::Watch)
        });
        self.commands.push_back(command);
    }

    fn answer(&mut self, answer: AcquireAnswer) {
        if !self.answered {
            self.answered = true;
            self.commands.push_back(AcquireCommand::Answer(answer));
        }
    }

    fn finish(&mut self) {
        self.phase = Phase::Finished;
        self.commands.push_back(AcquireCommand::Finish);
    }
}

#[cfg(test)]
mod tests;
