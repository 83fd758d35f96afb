//! Types of the table.

use std::fmt;

/// State of a participant in an election.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[non_exhaustive]
pub enum ElectionState {
    /// Not running: before the first start and after every stop.
    #[default]
    Stopped,
    /// Takes part and waits for its next claim.
    Follower,
    /// A claim is in flight.
    Acquiring,
    /// Holds the key, and confirms the hold periodically.
    Leader,
    /// The hold is gone. Within the grace window it is claimed again before a loss is reported.
    Reconnecting,
    /// Releases the hold on request.
    Releasing,
}

impl ElectionState {
    /// Every state, in the order of the table.
    pub const ALL: [Self; 6] = [
        Self::Stopped,
        Self::Follower,
        Self::Acquiring,
        Self::Leader,
        Self::Reconnecting,
        Self::Releasing,
    ];
}

impl fmt::Display for ElectionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stopped => "stopped",
            Self::Follower => "follower",
            Self::Acquiring => "acquiring",
            Self::Leader => "leader",
            Self::Reconnecting => "reconnecting",
            Self::Releasing => "releasing",
        })
    }
}

/// Kind of an [`ElectionInput`](crate::election::ElectionInput), without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InputKind {
    /// The user starts the election.
    Start,
    /// The user, or a signal, stops this participant.
    StopRequested,
    /// The next claim is due: the pause is over, or the store reported that the key is free.
    AcquireAttempt,
    /// The store granted the claim.
    AcquireSucceeded,
    /// Another participant holds the key.
    AcquireFailed,
    /// The store could not be reached, or answered with an error.
    StoreError,
    /// The store confirmed the hold.
    HealthOk,
    /// The hold is gone: its session ended, the store reports so, or its deadline passed.
    HealthFailed,
    /// The store granted the key again within the grace window.
    ReacquireSucceeded,
    /// The store did not grant the key again: another participant holds it, or there is no connection.
    ReacquireFailed,
    /// The grace window is over.
    GraceExpired,
    /// The user asks this participant to step down.
    ReleaseRequested,
    /// The store released the hold.
    ReleaseSucceeded,
    /// The release failed, took too long, or found nothing to release.
    ReleaseFailed,
}

impl InputKind {
    /// Every kind of input, in the order of the table.
    pub const ALL: [Self; 14] = [
        Self::Start,
        Self::StopRequested,
        Self::AcquireAttempt,
        Self::AcquireSucceeded,
        Self::AcquireFailed,
        Self::StoreError,
        Self::HealthOk,
        Self::HealthFailed,
        Self::ReacquireSucceeded,
        Self::ReacquireFailed,
        Self::GraceExpired,
        Self::ReleaseRequested,
        Self::ReleaseSucceeded,
        Self::ReleaseFailed,
    ];
}

impl fmt::Display for InputKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Row of the table: the outcome of an input in a state.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// State in which the input arrives.
    pub from: ElectionState,
    /// Kind of input.
    pub input: InputKind,
    /// Outcome of the input.
    pub outcome: Outcome,
}

/// Outcome of an input.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// No effect, for this reason.
    Ignore(&'static str),
    /// The first case that applies.
    Cases(&'static [Case]),
}

impl Outcome {
    /// Cases in the order in which they are tried; empty if the input is ignored.
    pub const fn cases(&self) -> &'static [Case] {
        match self {
            Self::Ignore(_) => &[],
            Self::Cases(cases) => cases,
        }
    }
}

/// One possible outcome of an input.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Conditions, all of which must hold.
    pub when: &'static [When],
    /// Next state.
    pub to: ElectionState,
    /// Actions after the change of state, in order.
    pub actions: &'static [Action],
    /// Reason, for readers of the table.
    pub why: &'static str,
}

/// Condition of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum When {
    /// The input concerns a claim that this participant has abandoned.
    Late,
    /// The input concerns the claim by which this participant leads.
    Ours,
    /// Waiting will not cure the error.
    Permanent,
    /// It is unknown whether the hold still exists, and the hold has a deadline that will settle it.
    Unclear,
    /// A grace window is configured and no other holder was seen.
    Grace,
    /// `auto_reacquire` is off.
    NoReacquire,
    /// The retry strategy gives up.
    GaveUp,
    /// The deadline of the grant passed before the grant arrived.
    Expired,
    /// The cool-down after a step-down is still running.
    CoolingDown,
    /// A claim is in flight.
    ClaimInFlight,
    /// Another holder was seen.
    AnotherHolder,
    /// There was nothing to release.
    NotHeld,
    /// The release is part of a shutdown.
    Stopping,
}

impl When {
    /// Text of the condition.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Late => "the input concerns an abandoned claim",
            Self::Ours => "the input concerns the current hold",
            Self::Permanent => "the error is permanent",
            Self::Unclear => "it is unknown whether the hold exists, and a deadline settles it",
            Self::Grace => "a grace window is set and no other holder was seen",
            Self::NoReacquire => "auto_reacquire is off",
            Self::GaveUp => "the retry strategy gives up",
            Self::Expired => "the grant is past its deadline",
            Self::CoolingDown => "the cool-down is running",
            Self::ClaimInFlight => "a claim is in flight",
            Self::AnotherHolder => "another holder was seen",
            Self::NotHeld => "there was nothing to release",
            Self::Stopping => "a stop was requested",
        }
    }
}

/// Action of a case: a command to the store, an event for the user, or a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Command: claim the key under a new number.
    Claim,
    /// Command: connect again and claim the key under a new number.
    Reacquire,
    /// Command: release the hold. An answer is expected.
    Release,
    /// Command: release the hold that the input granted. No answer is expected.
    ReleaseUnused,
    /// Command: close an idle session.
    Close,
    /// Command: abort the session with every request and hold in it; close it if there are none.
    Abort,
    /// Accept the grant: set token and deadline, start health checks, and reset the retry strategy.
    Hold,
    /// Extend the deadline and schedule the next health check.
    Extend,
    /// Check again well before the deadline.
    ProbeSoon,
    /// Start the timer of the grace window.
    OpenWindow,
    /// Begin a run: the first claim is due at once.
    Begin,
    /// Schedule the next attempt after the pause of the retry strategy.
    Pause,
    /// Schedule the next claim after the cool-down.
    CoolDown,
    /// Start the timer that limits the release, or shorten it.
    Bound,
    /// Stop after the release.
    StopAfterwards,
    /// Event: the participant leads.
    Acquired,
    /// Event: the participant released its leadership.
    Released,
    /// Event: the participant lost its leadership.
    Lost,
    /// Event: a claim failed although the store answered.
    AcquireFailed,
    /// Event: something failed, with its cause.
    Error,
    /// Event: the run is over, with its reason.
    Stopped,
}

impl Action {
    /// True for an event for the user.
    pub const fn is_event(self) -> bool {
        matches!(
            self,
            Self::Acquired
                | Self::Released
                | Self::Lost
                | Self::AcquireFailed
                | Self::Error
                | Self::Stopped
        )
    }

    /// Text of the action; the name of an event.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Reacquire => "reconnect and claim",
            Self::Release => "release",
            Self::ReleaseUnused => "release that grant",
            Self::Close => "close the session",
            Self::Abort => "abort the session",
            Self::Hold => "accept the grant, start health checks",
            Self::Extend => "extend the deadline",
            Self::ProbeSoon => "check again soon",
            Self::OpenWindow => "open the grace window",
            Self::Begin => "schedule a claim at once",
            Self::Pause => "pause before the next attempt",
            Self::CoolDown => "cool down before the next claim",
            Self::Bound => "limit the time of the release",
            Self::StopAfterwards => "stop afterwards",
            Self::Acquired => "Acquired",
            Self::Released => "Released",
            Self::Lost => "Lost",
            Self::AcquireFailed => "AcquireFailed",
            Self::Error => "Error",
            Self::Stopped => "Stopped",
        }
    }
}
