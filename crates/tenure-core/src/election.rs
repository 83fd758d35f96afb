//! The election machine: one participant that claims a key, leads while it holds it, and lets go of it.
//!
//! [`Election`] decides and does nothing: its driver tells it what happened ([`handle`](Election::handle)), wakes it when
//! it wants to be woken ([`poll_timeout`](Election::poll_timeout), [`handle_timeout`](Election::handle_timeout)), carries
//! its commands to the store ([`poll_command`](Election::poll_command)) and its events to the user
//! ([`poll_event`](Election::poll_event)). What it decides is written down in [`table`], and only there.
//!
//! What always holds:
//!
//! - Leadership is a deadline, not a state: [`is_leader`](Election::is_leader) compares it with the time it is given.
//! - `Acquired` and (`Lost` or `Released`) alternate strictly.
//! - At most one claim is on its way. A grant that nobody waits for any more is given back.
//! - The state has changed before a command can be polled: nobody is leader while it is being released.
//! - Every release has a bound. Past it the session is cut off, whatever the store does.
//! - Every run ends with one `Stopped`. After it, `Start` begins a new run; a claim's number is never used twice, so
//!   that answers to the old run cannot disturb it.
//!
//! ```
//! use std::time::Duration;
//! use tenure_core::election::{Command, Config, Election, Grant, Input};
//! use tenure_core::retry::ExponentialBackoff;
//! use tenure_core::{FencingToken, Time};
//!
//! let now = Time::ZERO;
//! let random = 0.5;
//! let mut election = Election::new(Config::default(), Box::new(ExponentialBackoff::default()));
//! election.handle(Input::Start, random, now);
//! assert_eq!(election.poll_timeout(), Some(now));
//! election.handle_timeout(random, now);
//! let Some(Command::Claim { claim }) = election.poll_command() else { panic!("a claim is due") };
//!
//! let grant = Grant { token: FencingToken::new(0, 7), deadline: now + Duration::from_secs(15) };
//! election.handle(Input::AcquireSucceeded { claim, grant }, random, now);
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
use crate::time::Time;
use crate::token::FencingToken;

/// How a participant behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElectionConfig {
    /// The time from one confirmation of the hold to the next health check.
    pub health_interval: Duration,
    /// For how long a lost hold is sought again before `Lost` is told; `None` tells it at once.
    ///
    /// The window damps the events only: [`Election::is_leader`] is false in it.
    pub reconnect_grace: Option<Duration>,
    /// Whether to follow again after a term, and after an error before the first.
    pub auto_reacquire: bool,
    /// The time after a step-down in which this participant claims nothing, so that another can.
    ///
    /// Followers that poll need at least their longest pause.
    pub cool_down: Duration,
    /// The bound on a release that follows a step-down, where the request names none.
    pub step_down_timeout: Duration,
    /// The bound on a release that follows a stop, where the request names none.
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

/// One participant of an election.
///
/// After each call of `handle` and `handle_timeout`, poll commands and events until there are none: they are kept until
/// somebody does.
#[derive(Debug)]
pub struct Election {
    config: ElectionConfig,
    retry: Box<dyn Retry>,
    state: ElectionState,
    /// What this participant leads by; there is none outside of `State::Leader`.
    leadership: Option<ElectionGrant>,
    /// The claim that is on its way, or whose hold we have.
    claim: Option<ClaimNumber>,
    claims: u64,
    timers: ElectionTimers,
    /// No claim before this, because of a step-down.
    cool_down_until: Time,
    /// What opened the grace window: the reason of the loss if the window closes in vain.
    loss: Option<Cause>,
    /// Whether the release under way ends the run.
    stopping: bool,
    /// Failures in a row.
    attempt: u32,
    /// When the row of failures began.
    failing_since: Option<Time>,
    commands: VecDeque<ElectionCommand>,
    events: VecDeque<ElectionEvent>,
}

impl Election {
    /// A participant that has not started. `retry` decides on the pauses between claims and between attempts to
    /// reconnect.
    pub fn new(config: ElectionConfig, retry: Box<dyn Retry>) -> Self {
        Self {
            config,
            retry,
            state: ElectionState::Stopped,
            leadership: None,
            claim: None,
            claims: 0,
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

    /// Takes notice of something that happened. `random` is uniform in `[0, 1)`, for the pause that may follow.
    pub fn handle(&mut self, input: ElectionInput, random: f64, now: Time) {
        // An answer that arrives after the deadline must not save what the deadline has ended.
        while let Some(due) = self.timers.take_end(now) {
            self.fire(due, random, now);
        }
        self.step(input, random, now);
    }

    /// Does what is due. Calling it early, late or twice does no harm.
    pub fn handle_timeout(&mut self, random: f64, now: Time) {
        while let Some(due) = self.timers.take(now) {
            self.fire(due, random, now);
        }
    }

    /// When to call [`handle_timeout`](Self::handle_timeout); `None` where only an input can change something.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// The next thing to do.
    pub fn poll_command(&mut self) -> Option<ElectionCommand> {
        self.commands.pop_front()
    }

    /// The next thing to tell.
    pub fn poll_event(&mut self) -> Option<ElectionEvent> {
        self.events.pop_front()
    }

    /// Where this participant stands. Ask [`is_leader`](Self::is_leader) before acting as the leader.
    pub const fn state(&self) -> ElectionState {
        self.state
    }

    /// Whether this participant leads at `now`.
    pub fn is_leader(&self, now: Time) -> bool {
        self.leadership.is_some_and(|lead| now < lead.deadline)
    }

    /// Until when this participant leads unless the hold is confirmed again; `None` where it does not.
    pub fn deadline(&self) -> Option<Time> {
        self.leadership.map(|lead| lead.deadline)
    }

    /// The fencing token of the term; a new one after a recovery within the grace window.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.leadership.map(|lead| lead.token)
    }

    fn fire(&mut self, due: Due, random: f64, now: Time) {
        let input = match (due, self.claim) {
            (Due::Deadline, Some(claim)) => {
                ElectionInput::HealthFailed { claim, cause: Cause::Deadline }
            }
            (Due::Bound, Some(claim)) => {
                ElectionInput::ReleaseFailed { claim, cause: Cause::TimedOut }
            }
            (Due::Grace, _) => ElectionInput::GraceExpired,
            (Due::Attempt, _) => ElectionInput::AcquireAttempt,
            (Due::Probe, Some(claim)) => {
                return self.commands.push_back(ElectionCommand::Probe { claim });
            }
            // These timers run only while something is held.
            (Due::Deadline | Due::Bound | Due::Probe, None) => return,
        };
        self.step(input, random, now);
    }

    fn step(&mut self, input: ElectionInput, random: f64, now: Time) {
        let cases = table::row(self.state, input.kind()).outcome.cases();
        let mut step = Step { input, random, now, retry_consulted: false, delay: None };
        let fits = |case: &&Case| case.when.iter().all(|when| self.holds(*when, &mut step));
        let Some(case) = cases.iter().find(fits) else { return };
        if case.to != self.state {
            self.change(case.to);
        }
        for action in case.actions {
            self.perform(*action, case, &step);
        }
    }

    fn holds(&mut self, when: When, step: &mut Step) -> bool {
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

    /// Asks the retry strategy for a pause, once per step.
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

    fn change(&mut self, to: ElectionState) {
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
                let cut = self.claim.take().map(|claim| ElectionCommand::Abort { claim });
                self.commands.push_back(cut.unwrap_or(ElectionCommand::Close));
            }
            Action::Hold => self.hold(step),
            Action::Extend => self.extend(step),
            Action::ProbeSoon => self.timers.probe = step.now + self.probe_pause(step.now),
            Action::OpenWindow => {
                self.loss = step.input.cause();
                self.timers.grace = step.now + self.config.reconnect_grace.unwrap_or_default();
            }
            Action::Begin => {
                self.start_over();
                self.stopping = false;
                self.cool_down_until = Time::ZERO;
                self.wait_until(step.now);
            }
            Action::Pause => {
                let delay = step.delay.unwrap_or_default();
                self.wait_until((step.now + delay).max(self.cool_down_until));
            }
            Action::CoolDown => {
                self.cool_down_until = self.cool_down_until.max(step.now + self.config.cool_down);
                let planned = self.planned_attempt(step.now);
                self.wait_until(planned.max(self.cool_down_until));
            }
            Action::Bound => {
                self.timers.bound = self.timers.bound.min(step.now + self.bound(&step.input));
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

    /// The number of a new claim.
    fn new_claim(&mut self, now: Time) -> ClaimNumber {
        self.claims += 1;
        self.failing_since.get_or_insert(now);
        self.timers.attempt = Time::MAX;
        *self.claim.insert(ClaimNumber(self.claims))
    }

    fn hold(&mut self, step: &Step) {
        self.leadership = step.input.grant();
        self.timers.deadline = self.deadline().unwrap_or(Time::MAX);
        self.timers.probe = step.now + self.config.health_interval;
        self.loss = None;
        self.start_over();
    }

    fn extend(&mut self, step: &Step) {
        let (Some(lead), ElectionInput::HealthOk { deadline, .. }) =
            (&mut self.leadership, &step.input)
        else {
            return;
        };
        // Two clear answers prove the hold until the later of their deadlines, in whichever order they arrive.
        lead.deadline = lead.deadline.max(*deadline);
        self.timers.deadline = lead.deadline;
        self.timers.probe = step.now + self.config.health_interval;
    }

    /// A quarter of the time that is left, so that a few more questions fit in before the deadline.
    fn probe_pause(&self, now: Time) -> Duration {
        let left = self.deadline().unwrap_or(now).since(now);
        (left / 4).max(MIN_PROBE_PAUSE).min(self.config.health_interval)
    }

    fn start_over(&mut self) {
        self.retry.reset();
        self.attempt = 0;
        self.failing_since = None;
    }

    /// Plans the next claim; whatever was on its way is answered or cut off.
    fn wait_until(&mut self, attempt: Time) {
        self.claim = None;
        self.timers.attempt = attempt;
    }

    fn planned_attempt(&self, now: Time) -> Time {
        if self.timers.attempt == Time::MAX { now } else { self.timers.attempt }
    }

    fn bound(&self, input: &ElectionInput) -> Duration {
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

    /// What opened the grace window, unless it is known that another has led since.
    fn loss_reason(&mut self, input: &ElectionInput) -> Cause {
        let opened_by = self.loss.take();
        match input.cause() {
            Some(Cause::HeldByAnother) => Cause::HeldByAnother,
            said => opened_by.or(said).unwrap_or(Cause::NotHeld),
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

/// Quick refusals must not turn the last moments before a deadline into a busy loop.
const MIN_PROBE_PAUSE: Duration = Duration::from_millis(50);

/// One input on its way through the table.
struct Step {
    input: ElectionInput,
    random: f64,
    now: Time,
    /// Whether the retry strategy was asked: it counts the questions.
    retry_consulted: bool,
    /// Its answer.
    delay: Option<Duration>,
}

#[cfg(test)]
mod tests;
