//! The election machine: one participant that claims a key, leads while it holds the key, and releases it.
//!
//! [`Election`] is a [`Machine`]: it decides and does no I/O. Its driver executes its commands at the store, and passes
//! its events to the user ([`poll_event`](Election::poll_event)). All decisions are in [`table`], and only there.
//!
//! Invariants:
//!
//! - Leadership is a deadline, not a state: [`is_leader`](Election::is_leader) compares the deadline with `now`.
//! - `Acquired` and (`Lost` or `Released`) alternate strictly.
//! - At most one claim is in flight. The grant of an abandoned claim is released.
//! - The state changes before a command can be polled: when a release is sent, the participant no longer leads.
//! - Every release has a time limit. After it the session is aborted, whatever the store does.
//! - Every run ends with one `Stopped`. After it, `Start` begins a new run. A claim number is never reused, so late
//!   answers to requests of the old run cannot disturb the new one.
//!
//! ```
//! use std::time::Duration;
//! use tenure_core::election::{Election, ElectionCommand, ElectionConfig, ElectionGrant, ElectionInput};
//! use tenure_core::retry::ExponentialBackoff;
//! use tenure_core::{FencingToken, Machine, Time};
//!
//! let now = Time::ZERO;
//! let seed = 1;
//! let mut election = Election::new(ElectionConfig::default(), Box::new(ExponentialBackoff::default()), seed);
//! election.handle(ElectionInput::Start, now);
//! assert_eq!(election.poll_timeout(), Some(now));
//! election.handle_timeout(now);
//! let Some(ElectionCommand::Claim { claim }) = election.poll_command() else { panic!("a claim is due") };
//!
//! let grant = ElectionGrant { token: FencingToken::new(0, 7), deadline: now + Duration::from_secs(15) };
//! election.handle(ElectionInput::AcquireSucceeded { claim, grant }, now);
//! assert!(election.is_leader(now));
//! assert!(!election.is_leader(now + Duration::from_secs(15)));
//! ```

mod message;
pub mod table;
mod timers;

use std::collections::VecDeque;
use std::error::Error;
use std::time::Duration;

pub use self::message::{
    Cause, ClaimNumber, ElectionCommand, ElectionEvent, ElectionGrant, ElectionInput, FailureKind,
    StopReason, StoreFailure, Term,
};
use self::table::{Action, Case, When};
pub use self::table::{ElectionState, InputKind};
use self::timers::{Due, ElectionTimers};
use crate::retry::{Retry, RetryContext};
use crate::{FencingToken, Machine, Random, Time};

/// Settings of a participant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElectionConfig {
    /// Time from one confirmation of the hold to the next health check.
    pub health_interval: Duration,
    /// Time for which a lost hold is claimed again before `Lost` is reported; `None` reports it at once.
    ///
    /// The window delays only the event: [`Election::is_leader`] is false in it.
    pub reconnect_grace: Option<Duration>,
    /// True to follow again after a term, and after a store error during a claim; false to stop instead.
    pub auto_reacquire: bool,
    /// Time after a step-down in which this participant makes no claim, so that another can lead.
    ///
    /// If followers poll, it must be at least their longest pause.
    pub cool_down: Duration,
    /// Time limit of a release after a step-down, if the request gives none.
    pub step_down_timeout: Duration,
    /// Time limit of a release after a stop, if the request gives none.
    pub shutdown_timeout: Duration,
}

impl Default for ElectionConfig {
    fn default() -> Self {
        Self {
            health_interval: Duration::from_secs(5),
            reconnect_grace: None,
            auto_reacquire: true,
            cool_down: Duration::from_secs(5),
            step_down_timeout: Duration::from_secs(5),
            shutdown_timeout: Duration::from_secs(10),
        }
    }
}

/// Participant of an election.
///
/// After each call of `handle` and `handle_timeout`, poll commands and events until there are none. They are kept until
/// they are polled.
#[derive(Debug)]
pub struct Election {
    config: ElectionConfig,
    retry: Box<dyn Retry>,
    random: Random,
    state: ElectionState,
    /// Grant by which this participant leads; `None` outside of [`ElectionState::Leader`].
    leadership: Option<ElectionGrant>,
    /// Claim that is in flight, or whose hold we have.
    claim: Option<ClaimNumber>,
    /// Number of claims so far: the number of the latest claim.
    claim_count: u64,
    timers: ElectionTimers,
    /// End of the cool-down after a step-down: no claim before it.
    cool_down_until: Time,
    /// Cause that opened the grace window: the reason of the loss if the hold is not recovered.
    loss: Option<Cause>,
    /// The release in flight ends the run.
    stopping: bool,
    /// Consecutive failures.
    attempt: u32,
    /// Time of the first claim or failure since the last success.
    failing_since: Option<Time>,
    commands: VecDeque<ElectionCommand>,
    events: VecDeque<ElectionEvent>,
}

impl Election {
    /// Creates a participant that has not started. `retry` decides on the pauses between claims and between attempts to
    /// reconnect; `seed` is that of their jitter.
    pub fn new(config: ElectionConfig, retry: Box<dyn Retry>, seed: u64) -> Self {
        Self {
            config,
            retry,
            random: Random::new(seed),
            state: ElectionState::Stopped,
            leadership: None,
            claim: None,
            claim_count: 0,
            timers: ElectionTimers::NONE,
            cool_down_until: Time::ZERO,
            loss: None,
            stopping: false,
            attempt: 0,
            failing_since: None,
            commands: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Removes the next event.
    pub fn poll_event(&mut self) -> Option<ElectionEvent> {
        self.events.pop_front()
    }

    /// Current state. Use [`is_leader`](Self::is_leader) before acting as the leader.
    pub const fn state(&self) -> ElectionState {
        self.state
    }

    /// True if this participant leads at `now`.
    pub fn is_leader(&self, now: Time) -> bool {
        self.leadership.is_some_and(|grant| now < grant.deadline)
    }

    /// End of leadership unless the hold is confirmed again; `None` if this participant does not lead.
    pub fn deadline(&self) -> Option<Time> {
        self.leadership.map(|grant| grant.deadline)
    }

    /// Fencing token of the term. A recovery within the grace window gives a new token.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.leadership.map(|grant| grant.token)
    }
}

impl Machine for Election {
    type Input = ElectionInput;
    type Command = ElectionCommand;

    fn handle(&mut self, input: ElectionInput, now: Time) {
        let random = self.random.unit();
        // The timers that end a hold fire first: an answer that arrives after the deadline must not extend a hold that
        // the deadline has ended.
        while let Some(due) = self.timers.take_end(now) {
            self.fire(due, random, now);
        }
        self.step(input, random, now);
    }

    fn handle_timeout(&mut self, now: Time) {
        let random = self.random.unit();
        while let Some(due) = self.timers.take(now) {
            self.fire(due, random, now);
        }
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    fn poll_command(&mut self) -> Option<ElectionCommand> {
        self.commands.pop_front()
    }
}

impl Election {
    fn fire(&mut self, due: Due, random: f64, now: Time) {
        let input = match (due, self.claim) {
            (Due::Deadline, Some(claim)) => {
                ElectionInput::HealthFailed { claim, cause: Cause::Deadline }
            }
            (Due::ReleaseLimit, Some(claim)) => {
                ElectionInput::ReleaseFailed { claim, cause: Cause::TimedOut }
            }
            (Due::Grace, _) => ElectionInput::GraceExpired,
            (Due::Attempt, _) => ElectionInput::AcquireAttempt,
            (Due::Probe, Some(claim)) => {
                return self.commands.push_back(ElectionCommand::Probe { claim });
            }
            // These timers are set only while there is a claim.
            (Due::Deadline | Due::ReleaseLimit | Due::Probe, None) => return,
        };
        self.step(input, random, now);
    }

    fn step(&mut self, input: ElectionInput, random: f64, now: Time) {
        let cases = table::row(self.state, input.kind()).outcome.cases();
        let mut step = Step { input, random, now, retry_consulted: false, delay: None };
        let fits = |case: &&Case| case.when.iter().all(|when| self.is_met(*when, &mut step));
        let Some(case) = cases.iter().find(fits) else { return };
        if case.to != self.state {
            self.change_state(case.to);
        }
        for action in case.actions {
            self.perform(*action, case, &step);
        }
    }

    /// True if a condition is met by the input and the current state.
    fn is_met(&mut self, when: When, step: &mut Step) -> bool {
        let input = &step.input;
        let failed = |kind| input.failure().is_some_and(|failure| failure.kind == kind);
        match when {
            When::Late => input.claim().is_some_and(|claim| Some(claim) != self.claim),
            When::Ours => input.claim().is_some_and(|claim| Some(claim) == self.claim),
            When::Permanent => failed(FailureKind::Permanent),
            When::Unclear => {
                failed(FailureKind::Unclear) && self.deadline().is_some_and(|end| end != Time::MAX)
            }
            When::Grace => {
                self.config.reconnect_grace.is_some() && input.cause() != Some(Cause::HeldByAnother)
            }
            When::NoReacquire => !self.config.auto_reacquire,
            When::GaveUp => self.retry_delay(step).is_none(),
            When::Expired => input.grant().is_some_and(|grant| grant.deadline <= step.now),
            When::CoolingDown => step.now < self.cool_down_until,
            When::ClaimInFlight => self.claim.is_some(),
            When::AnotherHolder => input.cause() == Some(Cause::HeldByAnother),
            When::NotHeld => {
                matches!(input.cause(), Some(Cause::NotHeld | Cause::HeldByAnother))
            }
            When::Stopping => self.stopping,
        }
    }

    /// Pause from the retry strategy, which is consulted once per step.
    fn retry_delay(&mut self, step: &mut Step) -> Option<Duration> {
        if std::mem::replace(&mut step.retry_consulted, true) {
            return step.delay;
        }
        self.attempt = self.attempt.saturating_add(1);
        let opened_by = match &self.loss {
            Some(Cause::Failed(failure)) => Some(failure),
            _ => None,
        };
        let last_error = step.input.failure().or(opened_by);
        let context = RetryContext {
            attempt: self.attempt,
            elapsed: step.now.since(*self.failing_since.get_or_insert(step.now)),
            last_error: last_error.map(|failure| &*failure.error as &(dyn Error + 'static)),
        };
        step.delay = self.retry.next_delay(&context, step.random);
        step.delay
    }

    fn change_state(&mut self, to: ElectionState) {
        let from = std::mem::replace(&mut self.state, to);
        self.leadership = None;
        // A hold that is being released still ends at its deadline.
        let deadline =
            if to == ElectionState::Releasing { self.timers.deadline } else { Time::MAX };
        self.timers = ElectionTimers { deadline, ..ElectionTimers::NONE };
        self.events.push_back(ElectionEvent::StateChange { from, to });
    }

    fn perform(&mut self, action: Action, case: &Case, step: &Step) {
        match action {
            Action::Claim => {
                let claim = self.new_claim(step.now);
                self.commands.push_back(ElectionCommand::Claim { claim });
            }
            Action::Reacquire => {
                let claim = self.new_claim(step.now);
                self.commands.push_back(ElectionCommand::Reacquire { claim });
            }
            Action::Release => {
                self.commands.extend(self.claim.map(|claim| ElectionCommand::Release { claim }));
            }
            Action::ReleaseUnused => {
                self.commands.extend(
                    step.input.claim().map(|claim| ElectionCommand::ReleaseUnused { claim }),
                );
            }
            Action::Close => {
                self.claim = None;
                self.commands.push_back(ElectionCommand::Close);
            }
            Action::Abort => {
                let abort = self.claim.take().map(|claim| ElectionCommand::Abort { claim });
                self.commands.push_back(abort.unwrap_or(ElectionCommand::Close));
            }
            Action::Hold => self.accept_grant(step),
            Action::Extend => self.extend(step),
            Action::ProbeSoon => self.timers.probe = step.now + self.probe_pause(step.now),
            Action::OpenWindow => {
                self.loss = step.input.cause();
                self.timers.grace = step.now + self.config.reconnect_grace.unwrap_or_default();
            }
            Action::Begin => {
                self.reset_retry();
                self.stopping = false;
                self.cool_down_until = Time::ZERO;
                self.schedule_claim(step.now);
            }
            Action::Pause => {
                let delay = step.delay.unwrap_or_default();
                self.schedule_claim((step.now + delay).max(self.cool_down_until));
            }
            Action::CoolDown => {
                self.cool_down_until = self.cool_down_until.max(step.now + self.config.cool_down);
                let planned = self.planned_attempt(step.now);
                self.schedule_claim(planned.max(self.cool_down_until));
            }
            Action::Bound => {
                self.timers.release_limit =
                    self.timers.release_limit.min(step.now + self.release_limit(&step.input));
            }
            Action::StopAfterwards => self.stopping = true,
            Action::Acquired
            | Action::Released
            | Action::Lost
            | Action::AcquireFailed
            | Action::Error
            | Action::Stopped => {
                let event = self.event(action, case, step);
                self.events.extend(event);
            }
        }
    }

    fn event(&mut self, action: Action, case: &Case, step: &Step) -> Option<ElectionEvent> {
        match action {
            Action::Acquired => self.fencing_token().map(|token| ElectionEvent::Acquired { token }),
            Action::Released => Some(ElectionEvent::Released),
            Action::Lost => Some(ElectionEvent::Lost { why: self.loss_reason(&step.input) }),
            Action::AcquireFailed => {
                Some(ElectionEvent::AcquireFailed { attempt: self.attempt, next_delay: step.delay })
            }
            Action::Error => step.input.cause().map(|why| ElectionEvent::Error { why }),
            Action::Stopped => {
                Some(ElectionEvent::Stopped { why: self.stop_reason(case, &step.input) })
            }
            _ => None,
        }
    }

    /// Starts a new claim and returns its number.
    fn new_claim(&mut self, now: Time) -> ClaimNumber {
        self.claim_count += 1;
        self.failing_since.get_or_insert(now);
        self.timers.attempt = Time::MAX;
        *self.claim.insert(ClaimNumber(self.claim_count))
    }

    fn accept_grant(&mut self, step: &Step) {
        self.leadership = step.input.grant();
        self.timers.deadline = self.deadline().unwrap_or(Time::MAX);
        self.timers.probe = step.now + self.config.health_interval;
        self.loss = None;
        self.reset_retry();
    }

    fn extend(&mut self, step: &Step) {
        let (Some(grant), ElectionInput::HealthOk { deadline, .. }) =
            (&mut self.leadership, &step.input)
        else {
            return;
        };
        // Two clear answers prove the hold until the later of their deadlines, in whichever order they arrive.
        grant.deadline = grant.deadline.max(*deadline);
        self.timers.deadline = grant.deadline;
        self.timers.probe = step.now + self.config.health_interval;
    }

    /// Quarter of the remaining time, so that several more checks fit before the deadline.
    fn probe_pause(&self, now: Time) -> Duration {
        let left = self.deadline().unwrap_or(now).since(now);
        (left / 4).max(MIN_PROBE_PAUSE).min(self.config.health_interval)
    }

    fn reset_retry(&mut self) {
        self.retry.reset();
        self.attempt = 0;
        self.failing_since = None;
    }

    /// Schedules the next claim. The previous claim has been answered or aborted.
    fn schedule_claim(&mut self, attempt: Time) {
        self.claim = None;
        self.timers.attempt = attempt;
    }

    fn planned_attempt(&self, now: Time) -> Time {
        if self.timers.attempt == Time::MAX { now } else { self.timers.attempt }
    }

    fn release_limit(&self, input: &ElectionInput) -> Duration {
        match input {
            ElectionInput::StopRequested { timeout } => {
                timeout.unwrap_or(self.config.shutdown_timeout)
            }
            ElectionInput::ReleaseRequested { timeout } => {
                timeout.unwrap_or(self.config.step_down_timeout)
            }
            _ => Duration::MAX,
        }
    }

    /// Cause that opened the grace window, unless another participant is known to have led since.
    fn loss_reason(&mut self, input: &ElectionInput) -> Cause {
        let opened_by = self.loss.take();
        match input.cause() {
            Some(Cause::HeldByAnother) => Cause::HeldByAnother,
            cause => opened_by.or(cause).unwrap_or(Cause::NotHeld),
        }
    }

    fn stop_reason(&self, case: &Case, input: &ElectionInput) -> StopReason {
        if case.when.contains(&When::GaveUp) {
            return StopReason::GaveUp;
        }
        match input.failure() {
            Some(failure) if case.when.contains(&When::Permanent) => {
                StopReason::Failed(failure.clone())
            }
            _ if self.stopping || input.kind() == InputKind::StopRequested => StopReason::Requested,
            _ => StopReason::TermOver,
        }
    }
}

/// Shortest pause between probes. Without it, quick refusals would turn the last moments before a deadline into a busy
/// loop.
const MIN_PROBE_PAUSE: Duration = Duration::from_millis(50);

/// Input that is being handled, and the results of its handling so far.
struct Step {
    input: ElectionInput,
    random: f64,
    now: Time,
    /// The retry strategy was consulted. It counts its calls, so it is consulted at most once.
    retry_consulted: bool,
    /// Result of the retry strategy.
    delay: Option<Duration>,
}

#[cfg(test)]
mod tests;
