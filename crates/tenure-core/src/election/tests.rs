//! Tests of the machine, in logical time. What it says is compared as text, so that a test reads like a log.

mod decisions;
mod details;
mod exhaustive;
mod listed;
mod random;

use super::*;
use crate::retry::FixedInterval;

/// The machine, a clock that only tests move, and what the machine has said since it was last asked.
#[derive(Debug)]
struct Trial {
    election: Election,
    now: Time,
}

/// The pause that trials use between claims.
const PAUSE: Duration = Duration::from_secs(2);
/// How long a hold lasts in trials.
const LEASE: Duration = Duration::from_secs(10);

impl Trial {
    fn new(config: Config) -> Self {
        Self::with_retry(config, FixedInterval { interval: PAUSE })
    }

    fn with_retry(config: Config, retry: impl Retry + 'static) -> Self {
        // Not the origin, so that a time of zero is not mistaken for now.
        let now = Time::from_nanos(1_000_000_000_000);
        Self { election: Election::new(config, Box::new(retry)), now }
    }

    /// A trial that has been brought to `state` by the ordinary way, with nothing left to hear.
    fn at(state: State, config: Config) -> Self {
        let mut trial = Self::new(config);
        trial.bring_to(state);
        trial
    }

    fn bring_to(&mut self, state: State) {
        if state != State::Stopped {
            self.tell(Input::Start);
        }
        if !matches!(state, State::Stopped | State::Follower) {
            self.wait(Duration::ZERO);
        }
        if matches!(state, State::Leader | State::Reconnecting | State::Releasing) {
            self.grant(1);
        }
        if state == State::Reconnecting {
            let claim = self.claim();
            self.tell(Input::HealthFailed { claim, cause: Cause::Failed(broken("cut")) });
        }
        if state == State::Releasing {
            self.tell(Input::ReleaseRequested { timeout: None });
        }
        assert_eq!(self.election.state(), state);
    }

    fn tell(&mut self, input: Input) -> String {
        self.election.handle(input, 0.0, self.now);
        self.heard()
    }

    /// Lets time pass, waking the machine whenever it wants to be woken.
    fn wait(&mut self, span: Duration) -> String {
        let until = self.now + span;
        let mut said = Vec::new();
        while let Some(due) = self.election.poll_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.election.handle_timeout(0.0, self.now);
            said.push(self.heard());
        }
        self.now = until;
        said.retain(|words| !words.is_empty());
        said.join("; ")
    }

    /// Answers the claim on its way with a grant whose token is `number`.
    fn grant(&mut self, number: u64) -> String {
        let input = Input::AcquireSucceeded { claim: self.claim(), grant: self.offer(number) };
        self.tell(input)
    }

    fn regrant(&mut self, number: u64, another_held: bool) -> String {
        let (claim, grant) = (self.claim(), self.offer(number));
        self.tell(Input::ReacquireSucceeded { claim, grant, another_held })
    }

    fn offer(&self, number: u64) -> Grant {
        Grant { token: FencingToken::new(0, number), deadline: self.now + LEASE }
    }

    fn claim(&self) -> ClaimId {
        self.election.claim.expect("a claim is current")
    }

    fn leads(&self) -> bool {
        self.election.is_leader(self.now)
    }

    /// Commands in brackets, then events, in their order.
    fn heard(&mut self) -> String {
        let commands: Vec<_> =
            std::iter::from_fn(|| self.election.poll_command()).map(command_text).collect();
        let events = std::iter::from_fn(|| self.election.poll_event()).map(|e| event_text(&e));
        let commands = (!commands.is_empty()).then(|| format!("[{}]", commands.join(", ")));
        commands.into_iter().chain(events).collect::<Vec<_>>().join("; ")
    }
}

fn command_text(command: Command) -> String {
    match command {
        Command::Claim { claim } => format!("claim {}", claim.0),
        Command::Probe { claim } => format!("probe {}", claim.0),
        Command::Reacquire { claim } => format!("reacquire {}", claim.0),
        Command::Release { claim } => format!("release {}", claim.0),
        Command::GiveBack { claim } => format!("give back {}", claim.0),
        Command::Abort { claim } => format!("abort {}", claim.0),
        Command::Close => String::from("close"),
    }
}

fn event_text(event: &Event) -> String {
    match event {
        Event::Acquired { token } => format!("acquired {token}"),
        Event::Released => String::from("released"),
        Event::Lost { why } => format!("lost ({})", brief(why)),
        Event::AcquireFailed { attempt, next_delay: Some(delay) } => {
            format!("failed {attempt}, again in {delay:?}")
        }
        Event::AcquireFailed { attempt, next_delay: None } => format!("failed {attempt}"),
        Event::StateChange { from, to } => format!("{from} > {to}"),
        Event::Error { why } => format!("error ({})", brief(why)),
        Event::Stopped { why: StopReason::Failed(failure) } => format!("stopped ({failure})"),
        Event::Stopped { why } => format!("stopped ({why:?})"),
    }
}

fn brief(cause: &Cause) -> String {
    match cause {
        Cause::Failed(failure) => failure.to_string(),
        other => format!("{other:?}"),
    }
}

fn broken(message: &str) -> Failure {
    Failure::new(FailureKind::Broken, message)
}

fn permanent(message: &str) -> Failure {
    Failure::new(FailureKind::Permanent, message)
}

fn unclear(message: &str) -> Failure {
    Failure::new(FailureKind::Unclear, message)
}

fn plain() -> Config {
    Config::default()
}

fn graceful() -> Config {
    Config { reconnect_grace: Some(Duration::from_secs(8)), ..plain() }
}

fn once(config: Config) -> Config {
    Config { auto_reacquire: false, ..config }
}

/// Wants no further attempt, ever.
#[derive(Debug)]
struct Never;

impl Retry for Never {
    fn next_delay(&mut self, _: &RetryContext<'_>, _random: f64) -> Option<Duration> {
        None
    }

    fn reset(&mut self) {}
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
