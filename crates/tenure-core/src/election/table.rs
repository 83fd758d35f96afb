//! The transition table of the election, as data.
//!
//! [`TABLE`] decides each of the 84 pairs of a state and an input. The machine in [`election`](super) looks its next step
//! up here and has no second opinion, and [`markdown`] prints the same data for people.
//!
//! A row either ignores its input or lists cases. The first case whose conditions all hold is taken: the machine changes
//! its state, announces the change, and then performs the actions from left to right. The last case of a row has no
//! condition, so that every input finds its answer.

use std::fmt;

mod page;
mod rows;

pub use page::markdown;
pub use rows::TABLE;

/// Where a participant of an election stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ElectionState {
    /// Nothing runs: before the first start and after every stop.
    #[default]
    Stopped,
    /// Takes part and waits for its next claim.
    Follower,
    /// A claim is on its way.
    Acquiring,
    /// Holds the key, and proves it again and again.
    Leader,
    /// The hold is gone; for a short while it is sought again before anybody is told.
    Reconnecting,
    /// Gives the hold back on request.
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

/// What can happen to a participant: the kind of an [`Input`](super::Input), without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InputKind {
    /// The user wants to take part.
    Start,
    /// The user, or a signal, wants this participant to end.
    StopRequested,
    /// It is time for the next claim: the pause is over, or the store said that the key is free.
    AcquireAttempt,
    /// The store granted the claim.
    AcquireSucceeded,
    /// Another holds the key.
    AcquireFailed,
    /// The store could not be reached, or answered with an error.
    StoreError,
    /// The store confirmed the hold.
    HealthOk,
    /// The hold is gone: its session ended, the store says so, or its deadline passed.
    HealthFailed,
    /// The store granted the key again within the grace window.
    ReacquireSucceeded,
    /// The store did not grant the key again: another holds it, or there is no connection.
    ReacquireFailed,
    /// The grace window is over.
    GraceExpired,
    /// The user wants another participant to lead.
    ReleaseRequested,
    /// The store took the hold back.
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

/// One pair of the table: what an input means in a state.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The state that the input finds.
    pub from: ElectionState,
    /// The input.
    pub input: InputKind,
    /// What follows.
    pub outcome: Outcome,
}

/// What follows from an input.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// Nothing, for this reason.
    Ignore(&'static str),
    /// The first of these that fits.
    Cases(&'static [Case]),
}

impl Outcome {
    /// The cases in the order in which they are tried; none where the input is ignored.
    pub const fn cases(&self) -> &'static [Case] {
        match self {
            Self::Ignore(_) => &[],
            Self::Cases(cases) => cases,
        }
    }
}

/// One way in which an input can turn out.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The conditions, all of which must hold.
    pub when: &'static [When],
    /// The state afterwards.
    pub to: ElectionState,
    /// What is done after the change, in order.
    pub actions: &'static [Action],
    /// The reason, for whoever reads the table.
    pub why: &'static str,
}

/// A condition of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum When {
    /// The input speaks of a claim that this participant has given up.
    Late,
    /// The input speaks of the very claim by which this participant leads.
    Ours,
    /// The error will not pass by waiting.
    Permanent,
    /// The error leaves open whether the hold stands, and the hold has a deadline that will settle it.
    Unclear,
    /// A grace window is configured and no other holder was seen.
    Grace,
    /// `auto_reacquire` is off.
    NoReacquire,
    /// The retry strategy wants no further attempt.
    GaveUp,
    /// The deadline of the grant has passed before the grant arrived.
    Expired,
    /// The cool-down after a step-down still runs.
    CoolingDown,
    /// A claim is on its way.
    ClaimInFlight,
    /// Another holder was seen.
    AnotherHolder,
    /// There was nothing to release.
    NotHeld,
    /// The release is part of a shutdown.
    Stopping,
}

impl When {
    /// The condition in words.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Late => "it speaks of a claim that was given up",
            Self::Ours => "it speaks of the hold we have",
            Self::Permanent => "the error is permanent",
            Self::Unclear => "the error leaves the hold open and a deadline settles it",
            Self::Grace => "a grace window is set and no other holder was seen",
            Self::NoReacquire => "auto_reacquire is off",
            Self::GaveUp => "the retry strategy gives up",
            Self::Expired => "the grant is past its deadline",
            Self::CoolingDown => "the cool-down runs",
            Self::ClaimInFlight => "a claim is on its way",
            Self::AnotherHolder => "another holder was seen",
            Self::NotHeld => "there was nothing to release",
            Self::Stopping => "a stop was requested",
        }
    }
}

/// Something that a case does: a command to the store, an event for the user, or a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Command: claim the key under a new number.
    Claim,
    /// Command: connect again and claim the key under a new number.
    Reacquire,
    /// Command: release the hold, and answer.
    Release,
    /// Command: release the hold that the input brought, without an answer.
    ReleaseUnused,
    /// Command: close the session, in which nothing runs.
    Close,
    /// Command: cut the session off with whatever runs or is held in it; where nothing does, close it.
    Abort,
    /// Take the grant: token, deadline and health checks begin; the retry strategy starts over.
    Hold,
    /// Move the deadline out and plan the next health check.
    Extend,
    /// Ask again well before the deadline.
    ProbeSoon,
    /// Start the timer of the grace window.
    OpenWindow,
    /// Begin a run: the first claim is due at once.
    Begin,
    /// Plan the next attempt after the pause that the retry strategy wants.
    Pause,
    /// Plan the next claim after the cool-down.
    CoolDown,
    /// Start the timer that bounds the release, or tighten it.
    Bound,
    /// Remember that the release ends in a stop.
    StopAfterwards,
    /// Event: the participant leads.
    Acquired,
    /// Event: the participant gave its leadership up.
    Released,
    /// Event: the participant's leadership ended against its will.
    Lost,
    /// Event: a claim came to nothing, though the store answered.
    AcquireFailed,
    /// Event: something failed, with its cause.
    Error,
    /// Event: the run is over, with its reason.
    Stopped,
}

impl Action {
    /// Whether this tells the user something, rather than doing something.
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

    /// The action in words; an event is called by its name.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Reacquire => "reconnect and claim",
            Self::Release => "release",
            Self::ReleaseUnused => "give that grant back",
            Self::Close => "close the session",
            Self::Abort => "cut the session off",
            Self::Hold => "take the grant, start health checks",
            Self::Extend => "move the deadline out",
            Self::ProbeSoon => "check again soon",
            Self::OpenWindow => "open the grace window",
            Self::Begin => "plan a claim at once",
            Self::Pause => "pause before the next attempt",
            Self::CoolDown => "cool down before the next claim",
            Self::Bound => "bound the release",
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

/// The row of a pair.
pub fn row(from: ElectionState, input: InputKind) -> &'static Row {
    &TABLE[from as usize][input as usize]
}

#[cfg(test)]
mod tests;
