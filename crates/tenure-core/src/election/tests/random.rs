//! Thousands of random histories against a store that answers late, wrongly or never.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::Random;
use crate::retry::ExponentialBackoff;

/// Random generator, in the units of this test.
struct Dice(Random);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn millis(&mut self, bound: u64) -> Duration {
        Duration::from_millis(self.below(bound))
    }
}

/// Strategy that gives up after some attempts.
#[derive(Debug)]
struct Few(u32);

impl Retry for Few {
    fn next_delay(&mut self, context: &RetryContext<'_>, _random: f64) -> Option<Duration> {
        (context.attempt < self.0).then_some(Duration::from_millis(300))
    }

    fn reset(&mut self) {}
}

/// One participant, its store and its user, with the invariants that hold at every step.
struct ElectionWorld {
    election: Election,
    config: ElectionConfig,
    random: Dice,
    now: Time,
    /// Answers in flight.
    answers: Vec<(Time, ElectionInput)>,
    /// Claim that was sent and neither answered nor aborted.
    outstanding: Option<ClaimNumber>,
    /// Holds of this participant at the store.
    held: BTreeSet<ClaimNumber>,
    /// Latest deadline that the store confirmed for each claim, by answers to requests.
    vouched: BTreeMap<ClaimNumber, Time>,
    tokens: u64,
    claims: u64,
    terms: u64,
    state: ElectionState,
    running: bool,
    /// `Acquired` was reported and its end was not.
    leading: bool,
    stop_by: Time,
    no_claim_before: Time,
    seen: BTreeSet<(ElectionState, InputKind)>,
}

impl ElectionWorld {
    fn new(seed: u64) -> Self {
        let mut random = Dice(Random::new(seed));
        let config = ElectionConfig {
            health_interval: random.millis(3_000),
            reconnect_grace: random.chance(60).then(|| random.millis(4_000)),
            auto_reacquire: random.chance(75),
            cool_down: random.millis(3_000),
            step_down_timeout: random.millis(2_000),
            shutdown_timeout: random.millis(2_000),
        };
        let retry: Box<dyn Retry> = match random.below(4) {
            0 => Box::new(FixedInterval { interval: random.millis(2_000) }),
            1 => Box::new(FixedInterval { interval: Duration::ZERO }),
            2 => Box::new(Few(2 + u32::try_from(random.below(5)).unwrap())),
            _ => Box::new(ExponentialBackoff::default()),
        };
        Self {
            election: Election::new(config, retry, seed),
            config,
            random,
            now: Time::from_nanos(1_000_000_000),
            answers: Vec::new(),
            outstanding: None,
            held: BTreeSet::new(),
            vouched: BTreeMap::new(),
            tokens: 0,
            claims: 0,
            terms: 0,
            state: ElectionState::Stopped,
            running: false,
            leading: false,
            stop_by: Time::MAX,
            no_claim_before: Time::ZERO,
            seen: BTreeSet::new(),
        }
    }

    fn live(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.random.below(10) {
                0 | 1 => self.user(),
                2 => self.stray(),
                _ => self.advance(),
            }
        }
        self.end();
    }

    /// Stops within the time limit, and checks that no hold is left after the last late answer.
    fn end(&mut self) {
        self.stop();
        while self.election.state() != ElectionState::Stopped {
            assert!(self.election.poll_timeout().is_some(), "a stop is always bounded");
            self.advance();
        }
        while !self.answers.is_empty() {
            self.advance();
        }
        assert_eq!(self.held, BTreeSet::new(), "left behind");
        assert!(!self.leading && !self.running);
        assert_eq!(self.election.poll_timeout(), None);
    }

    /// Advances to the next answer or timer; sometimes late, as after a suspension.
    fn advance(&mut self) {
        let answer = self.answers.iter().map(|(at, _)| *at).min();
        let timer = self.election.poll_timeout();
        let Some(due) = answer.into_iter().chain(timer).min() else { return };
        self.now = self.now.max(due);
        if self.random.chance(3) {
            self.now = self.now + self.random.millis(20_000);
        }
        let next = self.answers.iter().position(|(at, _)| *at <= self.now);
        match next {
            Some(n) if timer.is_none_or(|at| at > self.now) || self.random.chance(50) => {
                let (_, input) = self.answers.swap_remove(n);
                self.deliver(input);
            }
            _ => {
                self.election.handle_timeout(self.now);
                let next = self.election.poll_timeout();
                assert!(next.is_none_or(|at| at > self.now), "a timer that fired is not due again");
                self.settle();
            }
        }
    }

    fn deliver(&mut self, input: ElectionInput) {
        let answered = matches!(
            input.kind(),
            InputKind::AcquireSucceeded
                | InputKind::AcquireFailed
                | InputKind::ReacquireSucceeded
                | InputKind::ReacquireFailed
                | InputKind::StoreError
        );
        if answered && input.claim() == self.outstanding {
            self.outstanding = None;
        }
        self.feed(input);
    }

    fn feed(&mut self, input: ElectionInput) {
        self.seen.insert((self.election.state(), input.kind()));
        self.election.handle(input, self.now);
        self.settle();
    }

    fn user(&mut self) {
        self.now = self.now + self.random.millis(400);
        match self.random.below(8) {
            0 => self.stop(),
            1 | 2 => {
                let timeout = self.random.chance(50).then(|| self.random.millis(1_000));
                self.feed(ElectionInput::ReleaseRequested { timeout });
            }
            3 => self.feed(ElectionInput::AcquireAttempt),
            _ => self.feed(ElectionInput::Start),
        }
    }

    fn stop(&mut self) {
        let timeout = self.random.chance(50).then(|| self.random.millis(1_000));
        let bound = self.now + timeout.unwrap_or(self.config.shutdown_timeout);
        if self.running {
            self.stop_by = self.stop_by.min(bound);
        }
        self.feed(ElectionInput::StopRequested { timeout });
    }

    /// Sends an input that concerns an earlier claim, or that is unprompted.
    fn stray(&mut self) {
        let claim = ClaimNumber(1_000_000 + self.random.below(1_000));
        let cause = self.cause();
        let grant = self.grant();
        let input = match self.random.below(11) {
            0 => ElectionInput::AcquireSucceeded { claim, grant },
            1 => ElectionInput::AcquireFailed { claim },
            2 => ElectionInput::StoreError { claim: None, failure: self.failure() },
            3 => ElectionInput::StoreError { claim: Some(claim), failure: self.failure() },
            4 => ElectionInput::HealthOk { claim, deadline: grant.deadline },
            5 => ElectionInput::HealthFailed { claim, cause },
            6 => ElectionInput::ReacquireSucceeded {
                claim,
                grant,
                another_held: self.random.chance(50),
            },
            7 => ElectionInput::ReacquireFailed { claim, cause },
            8 => ElectionInput::GraceExpired,
            9 => ElectionInput::ReleaseSucceeded { claim },
            _ => ElectionInput::ReleaseFailed { claim, cause },
        };
        if input.grant().is_some() {
            self.held.insert(claim);
        }
        self.feed(input);
    }

    fn failure(&mut self) -> StoreFailure {
        match self.random.below(10) {
            0 => permanent("permanent"),
            1..4 => unclear("unclear"),
            _ => broken("broken"),
        }
    }

    fn cause(&mut self) -> Cause {
        match self.random.below(4) {
            0 => Cause::NotHeld,
            1 => Cause::HeldByAnother,
            _ => Cause::Failed(self.failure()),
        }
    }

    fn grant(&mut self) -> ElectionGrant {
        self.tokens += 1;
        let no_lease = self.random.chance(10);
        let deadline = if no_lease { Time::MAX } else { self.now + self.random.millis(6_000) };
        ElectionGrant { token: FencingToken::new(0, self.tokens), deadline }
    }

    /// Executes the machine's commands, takes its events, and checks the invariants.
    fn settle(&mut self) {
        while let Some(command) = self.election.poll_command() {
            self.execute(command);
        }
        while let Some(event) = self.election.poll_event() {
            self.check_event(&event);
        }
        assert_eq!(self.state, self.election.state());
        assert_eq!(self.running, self.state != ElectionState::Stopped);
        let led = matches!(
            self.state,
            ElectionState::Leader | ElectionState::Reconnecting | ElectionState::Releasing
        );
        assert_eq!(self.leading, led, "{}", self.state);
        let deadline = self.election.deadline();
        assert_eq!(deadline.is_some(), self.state == ElectionState::Leader);
        if let Some(end) = deadline {
            assert!(!self.election.is_leader(end));
            let vouched = self.election.claim.and_then(|claim| self.vouched.get(&claim));
            assert!(
                vouched.is_some_and(|until| end <= *until),
                "a deadline that the store did not confirm"
            );
            assert_eq!(self.election.is_leader(self.now), self.now < end);
            assert!(self.election.poll_timeout().is_none_or(|at| at <= end));
        } else {
            assert!(!self.election.is_leader(self.now) && !self.election.is_leader(Time::ZERO));
        }
        assert!(self.now <= self.stop_by || !self.running, "a stop past its time limit");
    }

    fn execute(&mut self, command: ElectionCommand) {
        match command {
            ElectionCommand::Claim { claim } => {
                assert!(self.now >= self.no_claim_before, "a claim within the cool-down");
                self.ask(claim, false);
            }
            ElectionCommand::Reacquire { claim } => self.ask(claim, true),
            ElectionCommand::Probe { claim } => self.probe(claim),
            ElectionCommand::Release { claim } => self.release(claim),
            ElectionCommand::ReleaseUnused { claim } => {
                self.held.remove(&claim);
            }
            ElectionCommand::Abort { claim } => self.abort_session(claim),
            ElectionCommand::Close => {
                assert_eq!(self.outstanding, None, "close is for idle sessions");
            }
        }
    }

    fn ask(&mut self, claim: ClaimNumber, again: bool) {
        assert_eq!(self.outstanding, None, "one claim at a time");
        assert!(claim.0 > self.claims, "a new number for every claim");
        self.claims = claim.0;
        self.outstanding = Some(claim);
        let outcome = self.random.below(100);
        let input = match outcome {
            0..55 => {
                self.held.insert(claim);
                let grant = self.grant();
                if again {
                    let another_held = self.random.chance(30);
                    ElectionInput::ReacquireSucceeded { claim, grant, another_held }
                } else {
                    ElectionInput::AcquireSucceeded { claim, grant }
                }
            }
            55..75 if again => {
                ElectionInput::ReacquireFailed { claim, cause: Cause::HeldByAnother }
            }
            55..75 => ElectionInput::AcquireFailed { claim },
            75..95 => {
                let failure = self.failure();
                if failure.kind == FailureKind::Unclear {
                    // The request took effect and its answer was lost.
                    self.held.insert(claim);
                }
                if again && self.random.chance(70) {
                    ElectionInput::ReacquireFailed { claim, cause: Cause::Failed(failure) }
                } else {
                    ElectionInput::StoreError { claim: Some(claim), failure }
                }
            }
            _ => return,
        };
        self.answer(input);
    }

    fn probe(&mut self, claim: ClaimNumber) {
        let input = match self.random.below(100) {
            0..60 => {
                let deadline = self.now + self.random.millis(6_000);
                ElectionInput::HealthOk { claim, deadline }
            }
            60..70 => ElectionInput::HealthFailed { claim, cause: self.cause() },
            70..90 => ElectionInput::StoreError { claim: Some(claim), failure: self.failure() },
            _ => return,
        };
        self.answer(input);
    }

    fn release(&mut self, claim: ClaimNumber) {
        let input = match self.random.below(100) {
            0..60 => {
                self.held.remove(&claim);
                ElectionInput::ReleaseSucceeded { claim }
            }
            60..80 => ElectionInput::ReleaseFailed { claim, cause: self.cause() },
            80..85 => ElectionInput::StoreError { claim: Some(claim), failure: self.failure() },
            _ => return,
        };
        self.answer(input);
    }

    fn answer(&mut self, input: ElectionInput) {
        let until = match &input {
            ElectionInput::HealthOk { deadline, .. } => Some(*deadline),
            other => other.grant().map(|grant| grant.deadline),
        };
        if let (Some(claim), Some(until)) = (input.claim(), until) {
            let vouched = self.vouched.entry(claim).or_insert(until);
            *vouched = until.max(*vouched);
        }
        let at = self.now + self.random.millis(1_500);
        self.answers.push((at, input));
    }

    /// Ends the hold. An answer may be in flight already, and with it a grant.
    fn abort_session(&mut self, claim: ClaimNumber) {
        self.held.remove(&claim);
        if self.outstanding == Some(claim) {
            self.outstanding = None;
        }
        if self.random.chance(50) {
            self.answers.retain(|(_, input)| input.claim() != Some(claim));
        }
        let through =
            self.answers.iter().any(|(_, i)| i.claim() == Some(claim) && i.grant().is_some());
        if through {
            self.held.insert(claim);
        }
    }

    fn check_event(&mut self, event: &ElectionEvent) {
        match event {
            ElectionEvent::Acquired { .. } => {
                assert!(!self.leading, "acquired twice");
                assert!(self.election.is_leader(self.now), "acquired too late to lead");
                self.leading = true;
                self.terms += 1;
            }
            ElectionEvent::Released | ElectionEvent::Lost { .. } => {
                assert!(self.leading, "an end without a beginning");
                self.leading = false;
                if *event == ElectionEvent::Released
                    && self.election.state() == ElectionState::Follower
                {
                    self.no_claim_before = self.now + self.config.cool_down;
                }
            }
            ElectionEvent::StateChange { from, to } => {
                assert_eq!(*from, self.state);
                assert_ne!(from, to);
                self.state = *to;
                if *from == ElectionState::Stopped {
                    self.running = true;
                    self.no_claim_before = Time::ZERO;
                }
            }
            ElectionEvent::Stopped { .. } => {
                assert!(self.running, "stopped twice");
                self.running = false;
                self.stop_by = Time::MAX;
            }
            ElectionEvent::AcquireFailed { .. } | ElectionEvent::Error { .. } => {
                assert!(self.running);
            }
        }
    }
}

#[test]
fn random_histories_keep_every_promise() {
    let mut seen = BTreeSet::new();
    let mut terms = 0;
    for seed in 0..10_000 {
        let mut world = ElectionWorld::new(seed);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.live(150)));
        assert!(outcome.is_ok(), "seed {seed}");
        seen.append(&mut world.seen);
        terms += world.terms;
    }
    assert!(terms > 20_000, "{terms} terms are too few to prove anything");
    // Inputs that only the machine's own timers produce are not counted: these are all pairs that a driver can cause.
    assert_eq!(seen.len(), 84);
}
