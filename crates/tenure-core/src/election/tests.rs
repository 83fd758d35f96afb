//! Tests of the machine, in logical time. Its output is compared as text, so a test reads like a log.

mod decisions;
mod details;
mod exhaustive;
mod listed;
mod random;

use super::*;
use crate::retry::FixedInterval;

/// The machine, and a clock that only the tests advance.
#[derive(Debug)]
struct Trial {
    election: Election,
    now: Time,
}

/// Pause between claims in trials.
const PAUSE: Duration = Duration::from_secs(2);
/// Length of a hold in trials.
const LEASE: Duration = Duration::from_secs(10);

impl Trial {
    fn new(config: ElectionConfig) -> Self {
        Self::with_retry(config, FixedInterval { interval: PAUSE })
    }

    fn with_retry(config: ElectionConfig, retry: impl Retry + 'static) -> Self {
        // Not the origin, so that a time of zero is not mistaken for now.
        let now = Time::from_nanos(1_000_000_000_000);
        Self { election: Election::new(config, Box::new(retry), 1), now }
    }

    /// Trial that has reached `state` by ordinary inputs, with all output taken.
    fn at(state: ElectionState, config: ElectionConfig) -> Self {
        let mut trial = Self::new(config);
        trial.bring_to(state);
        trial
    }

    fn bring_to(&mut self, state: ElectionState) {
        if state != ElectionState::Stopped {
            self.feed(ElectionInput::Start);
        }
        if !matches!(state, ElectionState::Stopped | ElectionState::Follower) {
            self.wait(Duration::ZERO);
        }
        if matches!(
            state,
            ElectionState::Leader | ElectionState::Reconnecting | ElectionState::Releasing
        ) {
            self.grant(1);
        }
        if state == ElectionState::Reconnecting {
            let claim = self.claim();
            self.feed(ElectionInput::HealthFailed { claim, cause: Cause::Failed(broken("cut")) });
        }
        if state == ElectionState::Releasing {
            self.feed(ElectionInput::ReleaseRequested { timeout: None });
        }
        assert_eq!(self.election.state(), state);
    }

    fn feed(&mut self, input: ElectionInput) -> String {
        self.election.handle(input, self.now);
        self.outputs()
    }

    /// Advances time, and calls the machine whenever a timer is due.
    fn wait(&mut self, span: Duration) -> String {
        let until = self.now + span;
        let mut output = Vec::new();
        while let Some(due) = self.election.poll_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.election.handle_timeout(self.now);
            output.push(self.outputs());
        }
        self.now = until;
        output.retain(|text| !text.is_empty());
        output.join("; ")
    }

    /// Answers the claim in flight with a grant whose token is `number`.
    fn grant(&mut self, number: u64) -> String {
        let input =
            ElectionInput::AcquireSucceeded { claim: self.claim(), grant: self.offer(number) };
        self.feed(input)
    }

    fn regrant(&mut self, number: u64, another_held: bool) -> String {
        let (claim, grant) = (self.claim(), self.offer(number));
        self.feed(ElectionInput::ReacquireSucceeded { claim, grant, another_held })
    }

    fn offer(&self, number: u64) -> ElectionGrant {
        ElectionGrant { token: FencingToken::new(0, number), deadline: self.now + LEASE }
    }

    fn claim(&self) -> ClaimNumber {
        self.election.claim.expect("a claim is current")
    }

    fn leads(&self) -> bool {
        self.election.is_leader(self.now)
    }

    /// Commands in brackets, then events, in their order.
    fn outputs(&mut self) -> String {
        let commands: Vec<_> =
            std::iter::from_fn(|| self.election.poll_command()).map(command_text).collect();
        let events = std::iter::from_fn(|| self.election.poll_event()).map(|e| event_text(&e));
        let commands = (!commands.is_empty()).then(|| format!("[{}]", commands.join(", ")));
        commands.into_iter().chain(events).collect::<Vec<_>>().join("; ")
    }
}

fn command_text(command: ElectionCommand) -> String {
    match command {
        ElectionCommand::Claim { claim } => format!("claim {}", claim.0),
        ElectionCommand::Probe { claim } => format!("probe {}", claim.0),
        ElectionCommand::Reacquire { claim } => format!("reacquire {}", claim.0),
        ElectionCommand::Release { claim } => format!("release {}", claim.0),
        ElectionCommand::ReleaseUnused { claim } => format!("release unused {}", claim.0),
        ElectionCommand::Abort { claim } => format!("abort {}", claim.0),
        ElectionCommand::Close => String::from("close"),
    }
}

fn event_text(event: &ElectionEvent) -> String {
    match event {
        ElectionEvent::Acquired { token } => format!("acquired {token}"),
        ElectionEvent::Released => String::from("released"),
        ElectionEvent::Lost { why } => format!("lost ({})", brief(why)),
        ElectionEvent::AcquireFailed { attempt, next_delay: Some(delay) } => {
            format!("failed {attempt}, again in {delay:?}")
        }
        ElectionEvent::AcquireFailed { attempt, next_delay: None } => format!("failed {attempt}"),
        ElectionEvent::StateChange { from, to } => format!("{from} > {to}"),
        ElectionEvent::Error { why } => format!("error ({})", brief(why)),
        ElectionEvent::Stopped { why: StopReason::Failed(failure) } => {
            format!("stopped ({failure})")
        }
        ElectionEvent::Stopped { why } => format!("stopped ({why:?})"),
    }
}

fn brief(cause: &Cause) -> String {
    match cause {
        Cause::Failed(failure) => failure.to_string(),
        other => format!("{other:?}"),
    }
}

fn broken(message: &str) -> StoreFailure {
    StoreFailure::new(FailureKind::Broken, message)
}

fn permanent(message: &str) -> StoreFailure {
    StoreFailure::new(FailureKind::Permanent, message)
}

fn unclear(message: &str) -> StoreFailure {
    StoreFailure::new(FailureKind::Unclear, message)
}

fn plain() -> ElectionConfig {
    ElectionConfig::default()
}

fn graceful() -> ElectionConfig {
    ElectionConfig { reconnect_grace: Some(Duration::from_secs(8)), ..plain() }
}

fn once(config: ElectionConfig) -> ElectionConfig {
    ElectionConfig { auto_reacquire: false, ..config }
}

/// Strategy that always gives up.
#[derive(Debug)]
struct GivesUp;

impl Retry for GivesUp {
    fn next_delay(&mut self, _: &RetryContext<'_>, _random: f64) -> Option<Duration> {
        None
    }

    fn reset(&mut self) {}
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
