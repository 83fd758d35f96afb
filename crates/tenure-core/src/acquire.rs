//! Acquisition: claim, then wait in the queue or back off, until granted, timed out or abandoned.
//!
//! One machine for every store. At most one request is under way at a time; while one that may change the store is
//! ([`Command::Claim`], [`Command::Confirm`], [`Command::Release`], [`Command::Abandon`]) the machine only answers the
//! caller and never asks for another. A [`Command::Wait`] or [`Command::Watch`] may be cut short by the next command.
//!
//! The caller is answered once. What may still be held at the store after that (the caller went away, or nothing clear
//! was heard in time) is resolved and given back before the machine finishes.

use std::collections::VecDeque;
use std::error::Error;
use std::time::Duration;

use crate::lease::Lease;
use crate::retry::{Retry, RetryContext};
use crate::{Random, Time};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// A claim or a wait was granted.
    Granted(Counts),
    /// A claim found a place in the queue.
    Queued,
    /// Another holds it, and there is no place to wait in.
    Busy {
        /// The shortest pause that the store asks for.
        retry_after: Option<Duration>,
    },
    /// A wait ended, and the place is still ours.
    Still,
    /// A wait ended because the place is gone.
    Gone,
    /// The store saw the key change while we watched it.
    Changed,
    /// The store renewed the grant that was to be confirmed.
    Confirmed,
    /// The store says that the grant to be confirmed or released is not ours.
    Refused,
    /// The grant was released, or the place was given up.
    GivenBack,
    /// The request under way failed.
    Failed(Failure),
    /// The caller waits until then and no longer; never before, where the caller only enqueued.
    WaitUntil(Option<Time>),
    /// The caller went away.
    Cancel,
}

/// From when a granted lease counts (contract 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counts {
    /// From before the request that was granted was sent.
    FromRequest,
    /// From before a renewal that has yet to confirm it.
    FromConfirm,
    /// From an instant of our own clock at which the store surely had not granted it yet: as good as before a request of
    /// ours, without a renewal to make it so. [`Looks`](crate::object::Looks) says which; never the store's own time.
    Since(Time),
    /// The store keeps the hold without a lease, as long as the session lives.
    NoLease,
}

/// What a failed request tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// It may have landed all the same.
    Unknown,
    /// It did not land; another try may.
    Transient,
    /// It did not land, and no further try will.
    Permanent,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Send the claim. Always the same one: what an earlier sending of it got is still ours.
    Claim {
        /// The longest that the request may take.
        limit: Duration,
        /// Whether to take a place in the queue where it is held.
        queue: bool,
    },
    /// Wait at our place in the queue.
    Wait {
        /// How long.
        limit: Duration,
    },
    /// Wait for the key to change, where the store can tell, or for the time-out.
    Watch,
    /// Renew the grant, so that its lease counts from a request of our own.
    Confirm {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Give the grant back.
    Release {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Give the place in the queue up, and a grant that raced it back.
    Abandon {
        /// The longest that the request may take.
        limit: Duration,
    },
    /// Tell the caller.
    Answer(Answer),
    /// The machine has ended; nothing follows. After [`Answer::Acquired`] the hold is the keeper's.
    Finish,
}

/// What the caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// Granted.
    Acquired {
        /// When the request that the lease counts from was sent.
        sent: Time,
        /// Until when the hold is valid.
        deadline: Time,
    },
    /// Another holds it, and the caller did not want to wait.
    Held,
    /// The caller's time ran out; nothing is held.
    TimedOut,
    /// The retry strategy gave up; nothing is held.
    GaveUp,
    /// The last request failed and no other will help; nothing is held.
    Failed,
    /// Nothing clear was heard in time: the store may keep the lock for us until then.
    Unknown {
        /// When the store has let go at the latest.
        until: Time,
    },
}

type Cause<'a> = &'a (dyn Error + 'static);

/// What an acquisition is to do.
#[derive(Debug)]
pub struct Terms {
    /// The lease asked for.
    pub lease: Lease,
    /// Claim once, and take no place in a queue.
    pub try_once: bool,
    /// The caller's end of patience.
    pub until: Option<Time>,
    /// The pause between claims where there is no queue.
    pub retry: Box<dyn Retry>,
    /// How often to claim on a store that pushes changes, in case one goes missing; `None` where it does not push.
    pub backstop: Option<Duration>,
    /// The seed of the jitter.
    pub seed: u64,
}

/// The longest wait in one request: a store that lost our place is found out that late at most.
const WAIT_SLICE: Duration = Duration::from_secs(30);
/// How long past the caller's time a clear answer is waited for, before the answer is that nothing is clear.
const GRACE: Duration = Duration::from_secs(1);

/// Acquires one hold.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is true or false in every phase")]
pub struct Acquire {
    lease: Lease,
    try_once: bool,
    until: Time,
    retry: Box<dyn Retry>,
    backstop: Option<Duration>,
    random: Random,
    phase: Phase,
    started: Time,
    attempt: u32,
    /// The last attempt ended with an error, not with a busy key.
    failing: bool,
    /// When the last claim that may have landed unheard was sent.
    unheard: Option<Time>,
    /// What is unheard of may be a place in the queue. Its turn can come at any time, so time alone settles nothing.
    may_wait: bool,
    /// No further try will help: what is left is to give back, then to say so.
    hopeless: bool,
    answered: bool,
    commands: VecDeque<Command>,
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
        granted: Time,
    },
    /// Between two tries to confirm.
    Unconfirmed {
        at: Time,
        granted: Time,
    },
    Releasing,
    Abandoning,
    /// Between two tries to give back or to find out.
    Settling {
        at: Time,
    },
    Finished,
}

impl Acquire {
    /// Starts with a claim.
    pub fn new(terms: Terms, now: Time) -> Self {
        let Terms { lease, try_once, until, retry, backstop, seed } = terms;
        let mut acquire = Self {
            lease,
            try_once,
            // One try takes one request; a caller who gave no time still gets an answer.
            until: if try_once { now + lease.request_limit() } else { until.unwrap_or(Time::MAX) },
            retry,
            backstop,
            random: Random::new(seed),
            phase: Phase::Finished,
            started: now,
            attempt: 0,
            failing: false,
            unheard: None,
            may_wait: false,
            hopeless: false,
            answered: false,
            commands: VecDeque::new(),
        };
        acquire.claim(now);
        acquire
    }

    /// Takes note of what happened.
    pub fn handle(&mut self, input: Input, now: Time) {
        self.take(input, None, now);
    }

    /// Takes note of a request that failed; the retry strategy is shown the error.
    pub fn handle_failure(&mut self, failure: Failure, error: Cause<'_>, now: Time) {
        self.take(Input::Failed(failure), Some(error), now);
    }

    fn take(&mut self, input: Input, error: Option<Cause<'_>>, now: Time) {
        match input {
            Input::WaitUntil(until) => self.until = until.unwrap_or(Time::MAX),
            Input::Cancel => self.cancel(now),
            _ => match self.phase {
                Phase::Claiming { sent } => self.claimed(input, sent, error, now),
                Phase::Waiting => self.waited(input, error, now),
                Phase::Watching { .. } if input == Input::Changed => self.claim(now),
                Phase::Confirming { sent, granted } => self.confirmed(input, sent, granted, now),
                Phase::Releasing | Phase::Abandoning => self.given_back(input, now),
                Phase::Watching { .. }
                | Phase::Unconfirmed { .. }
                | Phase::Settling { .. }
                | Phase::Finished => {}
            },
        }
        self.handle_timeout(now);
    }

    /// Takes note of the time.
    pub fn handle_timeout(&mut self, now: Time) {
        match self.phase {
            Phase::Waiting if now >= self.until => self.abandon(),
            Phase::Watching { .. } if now >= self.until => self.give_up(now),
            Phase::Watching { until } if now >= until => self.claim(now),
            Phase::Unconfirmed { at, granted } if now >= at => self.confirm(granted, now),
            Phase::Settling { at } if now >= at => self.claim(now),
            _ => {}
        }
        if !self.answered && now >= self.answer_by() {
            let sent = self.note_unheard(now);
            // To find out, the claim is sent again until the first is settled; the last of those may land too.
            let last = self.lease.settled_at(sent);
            self.answer(Answer::Unknown { until: self.lease.settled_at(last) });
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        let own = match self.phase {
            Phase::Watching { until } => until.min(self.until),
            Phase::Waiting => self.until,
            Phase::Unconfirmed { at, .. } | Phase::Settling { at } => at,
            _ => Time::MAX,
        };
        let answer = if self.answered { Time::MAX } else { self.answer_by() };
        let next = own.min(answer);
        (next != Time::MAX).then_some(next)
    }

    /// What to do next.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// Whether the last attempt ended with an error rather than with a busy key.
    pub fn is_failing(&self) -> bool {
        self.failing
    }

    fn answer_by(&self) -> Time {
        self.until + self.lease.request_limit().min(GRACE)
    }

    fn claim(&mut self, now: Time) {
        self.phase = Phase::Claiming { sent: now };
        self.attempt = self.attempt.saturating_add(1);
        let queue = !self.try_once && !self.answered && now < self.until;
        self.may_wait |= queue;
        self.request(Command::Claim { limit: self.lease.request_limit(), queue });
    }

    fn claimed(&mut self, input: Input, sent: Time, error: Option<Cause<'_>>, now: Time) {
        if let Input::Failed(failure) = input {
            self.failing = true;
            return self.claim_failed(failure, sent, error, now);
        }
        self.failing = false;
        self.may_wait = false;
        let repeated = self.unheard.take().is_some();
        match input {
            // The lease may have begun with a sending of this claim that we did not hear of.
            Input::Granted(Counts::FromRequest) if repeated => {
                self.granted(Counts::FromConfirm, sent, now);
            }
            Input::Granted(counts) => self.granted(counts, sent, now),
            Input::Queued if self.unwanted(now) || self.try_once => self.abandon(),
            Input::Queued => self.wait(now),
            Input::Busy { .. } if self.answered => self.finish(),
            Input::Busy { .. } if self.try_once => {
                self.answer(Answer::Held);
                self.finish();
            }
            Input::Busy { retry_after } => self.watch(retry_after.unwrap_or_default(), now),
            _ => {}
        }
    }

    fn claim_failed(&mut self, failure: Failure, sent: Time, error: Option<Cause<'_>>, now: Time) {
        if failure == Failure::Unknown {
            if !self.answered {
                self.unheard = Some(sent);
            }
            return self.settle_later(now);
        }
        let again = failure == Failure::Transient && !self.try_once && !self.unwanted(now);
        let earlier = self.unheard.filter(|earlier| *earlier != sent);
        let unsettled = earlier.is_some_and(|earlier| now < self.lease.settled_at(earlier));
        if earlier.is_some() && (unsettled || self.may_wait) {
            // An earlier sending may have landed although this one did not.
            if failure == Failure::Permanent {
                self.until = self.until.min(now);
            }
            if again && !unsettled {
                return self.retry(error, now);
            }
            return self.settle_later(now);
        }
        self.unheard = None;
        self.may_wait = false;
        if again {
            self.retry(error, now);
        } else {
            self.answer(Answer::Failed);
            self.finish();
        }
    }

    /// Claims again soon, to find out what an unheard claim got; once the caller was answered, until the store has let
    /// go of it by itself.
    fn settle_later(&mut self, now: Time) {
        let at = now + self.lease.retry_pause();
        let over = self.unheard.is_none_or(|sent| at >= self.lease.settled_at(sent));
        if self.answered && over {
            self.finish();
        } else {
            self.phase = Phase::Settling { at };
        }
    }

    fn wait(&mut self, now: Time) {
        self.phase = Phase::Waiting;
        let limit = WAIT_SLICE.min(self.until.since(now));
        self.request(Command::Wait { limit });
    }

    fn waited(&mut self, input: Input, error: Option<Cause<'_>>, now: Time) {
        match input {
            Input::Granted(counts @ (Counts::NoLease | Counts::Since(_))) => {
                self.granted(counts, now, now);
            }
            // Whatever else the store says, no instant of the wait is one to count from.
            Input::Granted(_) if self.lease.rules().confirm_waited_grants => {
                self.granted(Counts::FromConfirm, now, now);
            }
            Input::Granted(_) => self.granted(Counts::FromRequest, now, now),
            Input::Still => self.wait(now),
            Input::Gone => self.retry(None, now),
            Input::Failed(Failure::Permanent) => {
                self.failing = true;
                self.hopeless = true;
                self.until = self.until.min(now);
                self.abandon();
            }
            // The place may be kept: the same claim finds it again.
            Input::Failed(_) => {
                self.failing = true;
                self.unheard = Some(now);
                self.may_wait = true;
                self.retry(error, now);
            }
            _ => {}
        }
    }

    fn granted(&mut self, counts: Counts, sent: Time, now: Time) {
        match counts {
            _ if self.answered => self.release(),
            Counts::NoLease => self.acquired(sent, Time::MAX),
            Counts::FromConfirm => self.confirm(now, now),
            Counts::Since(at) => self.acquired_or_late(at, now),
            Counts::FromRequest => self.acquired_or_late(sent, now),
        }
    }

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
        self.answer(Answer::Acquired { sent, deadline });
        self.finish();
    }

    fn confirm(&mut self, granted: Time, now: Time) {
        if self.answered || now >= granted + self.lease.ttl() {
            return self.release();
        }
        self.phase = Phase::Confirming { sent: now, granted };
        self.request(Command::Confirm { limit: self.lease.request_limit() });
    }

    fn confirmed(&mut self, input: Input, sent: Time, granted: Time, now: Time) {
        match input {
            Input::Confirmed if self.answered => self.release(),
            Input::Confirmed => self.acquired_or_late(sent, now),
            Input::Refused if self.answered => self.finish(),
            Input::Refused => self.retry(None, now),
            Input::Failed(_) => {
                self.failing = true;
                let at = now + self.lease.retry_pause();
                self.phase = Phase::Unconfirmed { at, granted };
            }
            _ => {}
        }
    }

    fn release(&mut self) {
        self.phase = Phase::Releasing;
        self.request(Command::Release { limit: self.lease.request_limit() });
    }

    fn abandon(&mut self) {
        self.phase = Phase::Abandoning;
        self.request(Command::Abandon { limit: self.lease.request_limit() });
    }

    fn given_back(&mut self, input: Input, now: Time) {
        match input {
            Input::GivenBack | Input::Refused if self.answered => self.finish(),
            Input::GivenBack | Input::Refused if self.try_once => {
                self.answer(Answer::Held);
                self.finish();
            }
            Input::GivenBack | Input::Refused => self.retry(None, now),
            Input::Failed(_) => {
                // The same claim finds what is left, and then it is given back.
                self.may_wait |= self.phase == Phase::Abandoning;
                self.unheard = self.unheard.or(Some(now));
                self.settle_later(now);
            }
            _ => {}
        }
    }

    /// Sleeps until a busy key changes, where the store tells, or until it is time to claim again.
    fn watch(&mut self, at_least: Duration, now: Time) {
        match self.backstop {
            Some(backstop) => {
                let spread = 0.75 + self.random.unit() / 2.0;
                self.pause(backstop.mul_f64(spread).max(at_least), now);
            }
            None => self.retry_after(at_least, None, now),
        }
    }

    fn retry(&mut self, error: Option<Cause<'_>>, now: Time) {
        self.retry_after(Duration::ZERO, error, now);
    }

    fn retry_after(&mut self, at_least: Duration, last_error: Option<Cause<'_>>, now: Time) {
        let elapsed = now.since(self.started);
        let context = RetryContext { attempt: self.attempt, elapsed, last_error };
        match self.retry.next_delay(&context, self.random.unit()) {
            Some(delay) => self.pause(delay.max(at_least), now),
            None if self.unheard.is_some() => {
                self.until = self.until.min(now);
                self.settle_later(now);
            }
            None => {
                self.answer(if self.failing { Answer::Failed } else { Answer::GaveUp });
                self.finish();
            }
        }
    }

    fn pause(&mut self, delay: Duration, now: Time) {
        if self.unwanted(now) {
            self.give_up(now);
        } else {
            self.phase = Phase::Watching { until: now + delay };
            self.request(Command::Watch);
        }
    }

    fn give_up(&mut self, now: Time) {
        if self.unheard.is_none() {
            self.answer(if self.hopeless { Answer::Failed } else { Answer::TimedOut });
        }
        self.settle_or_finish(now);
    }

    fn cancel(&mut self, now: Time) {
        let claiming = matches!(self.phase, Phase::Claiming { .. });
        if !self.answered && (claiming || self.unheard.is_some()) {
            self.note_unheard(now);
        }
        self.answered = true;
        match self.phase {
            Phase::Waiting => self.abandon(),
            Phase::Watching { .. } => self.settle_or_finish(now),
            Phase::Unconfirmed { .. } => self.release(),
            _ => {}
        }
    }

    /// Notes that the request under way may land unheard, if none is noted already; since when. A place whose turn may
    /// come after its claim would be settled counts from now.
    fn note_unheard(&mut self, now: Time) -> Time {
        if self.may_wait && self.unheard.is_some_and(|sent| now >= self.lease.settled_at(sent)) {
            self.unheard = Some(now);
        }
        *self.unheard.get_or_insert(match self.phase {
            Phase::Claiming { sent } | Phase::Confirming { sent, .. } => sent,
            _ => now,
        })
    }

    fn settle_or_finish(&mut self, now: Time) {
        if self.unheard.is_some() { self.settle_later(now) } else { self.finish() }
    }

    fn unwanted(&self, now: Time) -> bool {
        self.answered || now >= self.until
    }

    /// Asks for a request. A wait that nobody has begun yet is overtaken by it.
    fn request(&mut self, command: Command) {
        self.commands.retain(|queued| !matches!(queued, Command::Wait { .. } | Command::Watch));
        self.commands.push_back(command);
    }

    fn answer(&mut self, answer: Answer) {
        if !self.answered {
            self.answered = true;
            self.commands.push_back(Command::Answer(answer));
        }
    }

    fn finish(&mut self) {
        self.phase = Phase::Finished;
        self.commands.push_back(Command::Finish);
    }
}

#[cfg(test)]
mod tests;
