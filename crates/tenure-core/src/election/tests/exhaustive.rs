//! Every pair under every configuration: the machine does what the table says, and nothing else.
//!
//! The circumstances of each trial are set up here, so the test knows which conditions hold without asking the machine.

use super::table::{Action, Row, When};
use super::*;

/// Circumstances of one trial.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each combination is a trial")]
struct Setup {
    state: ElectionState,
    grace: bool,
    auto_reacquire: bool,
    gives_up: bool,
    /// In `Follower`: cooling down. In `Leader`: no lease. In `Reconnecting`: between two attempts. In `Releasing`:
    /// stopping. Unused in the other states.
    special: bool,
}

impl Setup {
    fn all() -> Vec<Self> {
        let mut setups = Vec::new();
        for state in ElectionState::ALL {
            for bits in 0..16 {
                let [grace, auto_reacquire, gives_up, special] = [1, 2, 4, 8].map(|b| bits & b > 0);
                let setup = Self { state, grace, auto_reacquire, gives_up, special };
                if setup.is_possible() {
                    setups.push(setup);
                }
            }
        }
        setups
    }

    fn is_possible(self) -> bool {
        match self.state {
            ElectionState::Stopped | ElectionState::Acquiring => !self.special,
            ElectionState::Reconnecting => self.grace && !(self.special && self.gives_up),
            ElectionState::Follower | ElectionState::Leader | ElectionState::Releasing => true,
        }
    }

    fn trial(self) -> Trial {
        let base = if self.grace { graceful() } else { plain() };
        let config = ElectionConfig { auto_reacquire: self.auto_reacquire, ..base };
        let mut trial =
            if self.gives_up { Trial::with_retry(config, GivesUp) } else { Trial::new(config) };
        if self.state == ElectionState::Leader && self.special {
            trial.bring_to(ElectionState::Acquiring);
            let grant = ElectionGrant { deadline: Time::MAX, ..trial.offer(1) };
            trial.feed(ElectionInput::AcquireSucceeded { claim: trial.claim(), grant });
            return trial;
        }
        trial.bring_to(self.state);
        match self.state {
            ElectionState::Follower if self.special => {
                trial.feed(ElectionInput::ReleaseRequested { timeout: None });
            }
            ElectionState::Reconnecting if self.special => {
                let cause = Cause::Failed(broken("refused"));
                trial.feed(ElectionInput::ReacquireFailed { claim: trial.claim(), cause });
            }
            ElectionState::Releasing if self.special => {
                trial.feed(ElectionInput::StopRequested { timeout: None });
            }
            _ => {}
        }
        trial
    }

    /// True if a claim is in flight or a hold exists.
    fn has_claim(self) -> bool {
        match self.state {
            ElectionState::Stopped | ElectionState::Follower => false,
            ElectionState::Reconnecting => !self.special,
            ElectionState::Acquiring | ElectionState::Leader | ElectionState::Releasing => true,
        }
    }

    fn holds(self, when: When, shape: &InputShape) -> bool {
        let failed = |kind| shape.failure == Some(kind);
        match when {
            When::Late => shape.about == Some(About::Earlier),
            When::Ours => shape.about == Some(About::Current),
            When::Permanent => failed(FailureKind::Permanent),
            When::Unclear => failed(FailureKind::Unclear) && !self.special,
            When::Grace => self.grace && !shape.another,
            When::NoReacquire => !self.auto_reacquire,
            When::GaveUp => self.gives_up,
            When::Expired => shape.expired,
            When::CoolingDown | When::Stopping => self.special,
            When::ClaimInFlight => self.has_claim(),
            When::AnotherHolder => shape.another,
            When::NotHeld => shape.not_held || shape.another,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    Current,
    Earlier,
}

/// Input, and its properties that matter to conditions.
#[derive(Clone, Debug)]
struct InputShape {
    input: ElectionInput,
    about: Option<About>,
    failure: Option<FailureKind>,
    expired: bool,
    another: bool,
    not_held: bool,
}

impl InputShape {
    fn plain(input: ElectionInput) -> Self {
        Self { input, about: None, failure: None, expired: false, another: false, not_held: false }
    }
}

/// Every input in every shape that makes a difference.
fn inputs(trial: &Trial) -> Vec<InputShape> {
    let earlier = (ClaimNumber(987_654), About::Earlier);
    let current = trial.election.claim.map(|claim| (claim, About::Current));
    let timeouts = [None, Some(Duration::ZERO), Some(secs(1))];
    let mut all = vec![
        InputShape::plain(ElectionInput::Start),
        InputShape::plain(ElectionInput::AcquireAttempt),
        InputShape::plain(ElectionInput::GraceExpired),
    ];
    for timeout in timeouts {
        all.push(InputShape::plain(ElectionInput::StopRequested { timeout }));
        all.push(InputShape::plain(ElectionInput::ReleaseRequested { timeout }));
    }
    for (claim, about) in current.into_iter().chain([earlier]) {
        about_claim(&mut all, trial, claim, about);
    }
    for failure in failures() {
        let kind = failure.kind;
        let input = ElectionInput::StoreError { claim: None, failure };
        all.push(InputShape { failure: Some(kind), ..InputShape::plain(input) });
    }
    all
}

fn about_claim(all: &mut Vec<InputShape>, trial: &Trial, claim: ClaimNumber, about: About) {
    let shape = |input| InputShape { about: Some(about), ..InputShape::plain(input) };
    all.push(shape(ElectionInput::AcquireFailed { claim }));
    all.push(shape(ElectionInput::HealthOk { claim, deadline: trial.now + secs(60) }));
    all.push(shape(ElectionInput::ReleaseSucceeded { claim }));
    for expired in [true, false] {
        let deadline = if expired { trial.now } else { trial.now + LEASE };
        let grant = ElectionGrant { deadline, ..trial.offer(5) };
        all.push(InputShape { expired, ..shape(ElectionInput::AcquireSucceeded { claim, grant }) });
        for another_held in [true, false] {
            let input = ElectionInput::ReacquireSucceeded { claim, grant, another_held };
            all.push(InputShape { expired, another: another_held, ..shape(input) });
        }
    }
    for failure in failures() {
        let kind = failure.kind;
        let input = ElectionInput::StoreError { claim: Some(claim), failure };
        all.push(InputShape { failure: Some(kind), ..shape(input) });
    }
    let causes = [Cause::Deadline, Cause::NotHeld, Cause::HeldByAnother, Cause::TimedOut];
    for cause in causes.into_iter().chain(failures().map(Cause::Failed)) {
        for input in [
            ElectionInput::HealthFailed { claim, cause: cause.clone() },
            ElectionInput::ReacquireFailed { claim, cause: cause.clone() },
            ElectionInput::ReleaseFailed { claim, cause: cause.clone() },
        ] {
            all.push(InputShape {
                failure: if let Cause::Failed(f) = &cause { Some(f.kind) } else { None },
                another: cause == Cause::HeldByAnother,
                not_held: cause == Cause::NotHeld,
                ..shape(input)
            });
        }
    }
}

fn failures() -> [StoreFailure; 3] {
    [broken("broken"), permanent("permanent"), unclear("unclear")]
}

/// Result that the table specifies for these circumstances: the state, and the names of the commands and events.
fn promised(
    row: &Row,
    setup: Setup,
    shape: &InputShape,
) -> (ElectionState, Vec<String>, Vec<String>) {
    let fits = |case: &&Case| case.when.iter().all(|when| setup.holds(*when, shape));
    let Some(case) = row.outcome.cases().iter().find(fits) else {
        return (row.from, Vec::new(), Vec::new());
    };
    let mut commands = Vec::new();
    let mut events = Vec::new();
    if case.to != row.from {
        events.push(String::from("StateChange"));
    }
    for action in case.actions {
        match action {
            Action::Abort if !setup.has_claim() => commands.push(String::from("Close")),
            Action::Claim
            | Action::Reacquire
            | Action::Release
            | Action::ReleaseUnused
            | Action::Close
            | Action::Abort => commands.push(format!("{action:?}")),
            event if event.is_event() => events.push(format!("{event:?}")),
            _ => {}
        }
    }
    (case.to, commands, events)
}

/// Name of a variant: the part that `Debug` prints before the data.
fn name(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    text.split([' ', '(']).next().unwrap_or_default().to_owned()
}

#[test]
fn the_machine_does_what_the_table_says() {
    let mut pairs = std::collections::BTreeSet::new();
    let mut cases = std::collections::BTreeSet::new();
    for setup in Setup::all() {
        let shapes = inputs(&setup.trial());
        for shape in shapes {
            let mut trial = setup.trial();
            let row = table::row(setup.state, shape.input.kind());
            let (state, commands, events) = promised(row, setup, &shape);
            trial.election.handle(shape.input.clone(), trial.now);
            let context = format!("{setup:?} {shape:?}");
            assert_eq!(trial.election.state(), state, "{context}");
            let did: Vec<_> = std::iter::from_fn(|| trial.election.poll_command()).collect();
            let output: Vec<_> = std::iter::from_fn(|| trial.election.poll_event()).collect();
            assert_eq!(did.iter().map(name).collect::<Vec<_>>(), commands, "{context}");
            assert_eq!(output.iter().map(name).collect::<Vec<_>>(), events, "{context}");
            check_timers(&trial, &context);
            pairs.insert((row.from, row.input));
            cases.extend(taken(row, setup, &shape).map(|n| (row.from, row.input, n)));
        }
    }
    assert_eq!(pairs.len(), 84);
    let written: usize = table::TABLE.iter().flatten().map(|row| row.outcome.cases().len()).sum();
    assert_eq!(cases.len(), written, "every case of the table was taken");
}

fn taken(row: &Row, setup: Setup, shape: &InputShape) -> Option<usize> {
    let fits = |case: &Case| case.when.iter().all(|when| setup.holds(*when, shape));
    row.outcome.cases().iter().position(fits)
}

/// Each state has the timers that can end it, and only `Leader` leads.
fn check_timers(trial: &Trial, context: &str) {
    let state = trial.election.state();
    let waits = matches!(
        state,
        ElectionState::Follower | ElectionState::Reconnecting | ElectionState::Releasing
    );
    let silent = matches!(state, ElectionState::Stopped | ElectionState::Acquiring);
    let next = trial.election.poll_timeout();
    assert!(!waits || next.is_some(), "{context}");
    assert!(!silent || next.is_none(), "{context}");
    assert_eq!(trial.leads(), state == ElectionState::Leader, "{context}");
    let has_token = trial.election.fencing_token().is_some();
    assert_eq!(has_token, state == ElectionState::Leader, "{context}");
}
