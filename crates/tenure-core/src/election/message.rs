//! Inputs, commands and events of the election machine.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::table::{ElectionState, InputKind};
use crate::time::Time;
use crate::token::FencingToken;

/// Number of a claim, unique within one [`Election`](super::Election) and never reused.
///
/// It also names the hold and the session that result from the claim, so a late answer is never mistaken for the answer
/// to a later request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimNumber(pub(super) u64);

impl fmt::Debug for ClaimNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "claim {}", self.0)
    }
}

/// Grant by the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElectionGrant {
    /// Fencing token, larger than that of every earlier grant of this key.
    pub token: FencingToken,
    /// End of the hold's validity: it is valid while `now < deadline`. [`Time::MAX`] if the store has no leases.
    pub deadline: Time,
}

/// One term of this participant. Its count of grants shows if another participant led before the next term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// Fencing token of the grant.
    pub token: FencingToken,
    /// Number of grants of the key so far, including this one; `None` if the store does not count them.
    pub grants: Option<u64>,
}

impl Term {
    /// True if another term may have come between this one and `next`: the count of grants did not grow by exactly one,
    /// or the epoch changed, after which the store may have lost grants.
    ///
    /// False also if the store does not count grants, because then nothing is known.
    pub fn another_term_before(self, next: Self) -> bool {
        let Some((before, after)) = self.grants.zip(next.grants) else { return false };
        self.token.epoch() != next.token.epoch() || after != before.saturating_add(1)
    }
}

/// Event that the driver passes to [`Machine::handle`](crate::Machine::handle).
#[derive(Clone, Debug)]
pub enum ElectionInput {
    /// The user starts the election.
    Start,
    /// The user, or a signal, stops this participant.
    StopRequested {
        /// Hard time limit of the release; `None` for the configured one.
        timeout: Option<Duration>,
    },
    /// The next claim is due. The machine's own timer produces this input; pass it earlier if the store reports that
    /// the key is free.
    AcquireAttempt,
    /// Answer to [`ElectionCommand::Claim`]: granted.
    AcquireSucceeded {
        /// Answered claim.
        claim: ClaimNumber,
        /// Grant by the store.
        grant: ElectionGrant,
    },
    /// Answer to [`ElectionCommand::Claim`]: another participant holds the key.
    AcquireFailed {
        /// Answered claim.
        claim: ClaimNumber,
    },
    /// The store failed: in place of the answer to a command, or unprompted.
    StoreError {
        /// Claim whose session failed; `None` if unknown, which counts as the current claim.
        claim: Option<ClaimNumber>,
        /// Failure of the store.
        failure: StoreFailure,
    },
    /// Answer to [`ElectionCommand::Probe`]: the hold is confirmed.
    HealthOk {
        /// Claim whose hold was confirmed.
        claim: ClaimNumber,
        /// New deadline, counted from before the request was sent.
        deadline: Time,
    },
    /// The hold is gone, by an answer to [`ElectionCommand::Probe`] or by a notification from the store.
    HealthFailed {
        /// Claim whose hold is gone.
        claim: ClaimNumber,
        /// Cause of the loss.
        cause: Cause,
    },
    /// Answer to [`ElectionCommand::Reacquire`]: granted.
    ReacquireSucceeded {
        /// Answered claim.
        claim: ClaimNumber,
        /// Grant by the store.
        grant: ElectionGrant,
        /// Another participant held the key after this one lost it.
        another_held: bool,
    },
    /// Answer to [`ElectionCommand::Reacquire`]: not granted.
    ReacquireFailed {
        /// Answered claim.
        claim: ClaimNumber,
        /// [`Cause::HeldByAnother`] closes the window; every other cause is retried while the window is open.
        cause: Cause,
    },
    /// The grace window is over. The machine's own timer produces this input.
    GraceExpired,
    /// The user asks this participant to step down.
    ReleaseRequested {
        /// Hard time limit of the release; `None` for the configured one.
        timeout: Option<Duration>,
    },
    /// Answer to [`ElectionCommand::Release`]: the hold is released.
    ReleaseSucceeded {
        /// Claim whose hold was released.
        claim: ClaimNumber,
    },
    /// Answer to [`ElectionCommand::Release`]: it failed.
    ReleaseFailed {
        /// Claim whose hold was to be released.
        claim: ClaimNumber,
        /// With [`Cause::NotHeld`] or [`Cause::HeldByAnother`], the hold was lost before the release.
        cause: Cause,
    },
}

impl ElectionInput {
    /// Kind of the input, as used in the table.
    pub const fn kind(&self) -> InputKind {
        match self {
            Self::Start => InputKind::Start,
            Self::StopRequested { .. } => InputKind::StopRequested,
            Self::AcquireAttempt => InputKind::AcquireAttempt,
            Self::AcquireSucceeded { .. } => InputKind::AcquireSucceeded,
            Self::AcquireFailed { .. } => InputKind::AcquireFailed,
            Self::StoreError { .. } => InputKind::StoreError,
            Self::HealthOk { .. } => InputKind::HealthOk,
            Self::HealthFailed { .. } => InputKind::HealthFailed,
            Self::ReacquireSucceeded { .. } => InputKind::ReacquireSucceeded,
            Self::ReacquireFailed { .. } => InputKind::ReacquireFailed,
            Self::GraceExpired => InputKind::GraceExpired,
            Self::ReleaseRequested { .. } => InputKind::ReleaseRequested,
            Self::ReleaseSucceeded { .. } => InputKind::ReleaseSucceeded,
            Self::ReleaseFailed { .. } => InputKind::ReleaseFailed,
        }
    }

    /// Claim that the input concerns.
    pub const fn claim(&self) -> Option<ClaimNumber> {
        match *self {
            Self::AcquireSucceeded { claim, .. }
            | Self::AcquireFailed { claim }
            | Self::HealthOk { claim, .. }
            | Self::HealthFailed { claim, .. }
            | Self::ReacquireSucceeded { claim, .. }
            | Self::ReacquireFailed { claim, .. }
            | Self::ReleaseSucceeded { claim }
            | Self::ReleaseFailed { claim, .. } => Some(claim),
            Self::StoreError { claim, .. } => claim,
            Self::Start
            | Self::StopRequested { .. }
            | Self::AcquireAttempt
            | Self::GraceExpired
            | Self::ReleaseRequested { .. } => None,
        }
    }

    /// Grant of the input.
    pub(super) const fn grant(&self) -> Option<ElectionGrant> {
        match *self {
            Self::AcquireSucceeded { grant, .. } | Self::ReacquireSucceeded { grant, .. } => {
                Some(grant)
            }
            _ => None,
        }
    }

    /// Cause of the failure, if the input reports one.
    pub(super) fn cause(&self) -> Option<Cause> {
        match self {
            Self::StoreError { failure, .. } => Some(Cause::Failed(failure.clone())),
            Self::HealthFailed { cause, .. }
            | Self::ReacquireFailed { cause, .. }
            | Self::ReleaseFailed { cause, .. } => Some(cause.clone()),
            Self::ReacquireSucceeded { another_held: true, .. } => Some(Cause::HeldByAnother),
            _ => None,
        }
    }

    /// Store error behind the input.
    pub(super) const fn failure(&self) -> Option<&StoreFailure> {
        match self {
            Self::StoreError { failure, .. }
            | Self::HealthFailed { cause: Cause::Failed(failure), .. }
            | Self::ReacquireFailed { cause: Cause::Failed(failure), .. }
            | Self::ReleaseFailed { cause: Cause::Failed(failure), .. } => Some(failure),
            _ => None,
        }
    }
}

/// Command to the driver, from [`Machine::poll_command`](crate::Machine::poll_command).
///
/// Commands are executed in order. `Claim`, `Probe`, `Reacquire` and `Release` are answered by an input with the same
/// number. A later command can make an outstanding answer obsolete, such as `Release` after `Probe`. The answer is then
/// not needed, but may be passed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElectionCommand {
    /// Claim the key. Connect first if there is no session.
    Claim {
        /// Number of this claim.
        claim: ClaimNumber,
    },
    /// Confirm the hold: renew the lease, or check that the session is alive. Without a lease no deadline ends the wait
    /// for the answer, so the driver must limit it.
    Probe {
        /// Claim of the hold.
        claim: ClaimNumber,
    },
    /// Open a new session and claim the key in it: the grace window is open.
    Reacquire {
        /// Number of this claim.
        claim: ClaimNumber,
    },
    /// Release the hold.
    Release {
        /// Claim of the hold.
        claim: ClaimNumber,
    },
    /// Release an unused hold. Needs no answer; it is no error if there is nothing to release.
    ReleaseUnused {
        /// Claim of the hold.
        claim: ClaimNumber,
    },
    /// Abort the session of this claim at once, with every request in it. Ensure that no hold or later grant of the
    /// session lasts longer than the store's own lease. Needs no answer, but a grant that preceded the abort is still
    /// passed in.
    Abort {
        /// Claim of the session.
        claim: ClaimNumber,
    },
    /// Close the session, if one is open; it has no request in flight. Needs no answer.
    Close,
}

/// Event for the user, from [`Election::poll_event`](super::Election::poll_event).
///
/// Within one step the change of state comes first, and `Stopped` last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectionEvent {
    /// The participant leads. Exactly one `Lost` or `Released` follows before the next `Acquired`.
    Acquired {
        /// Fencing token of the grant.
        token: FencingToken,
    },
    /// The participant released its leadership.
    Released,
    /// The participant lost its leadership.
    Lost {
        /// Cause of the loss.
        why: Cause,
    },
    /// A claim failed: another participant holds the key, or the grant arrived past its deadline.
    AcquireFailed {
        /// Consecutive failures, including this one.
        attempt: u32,
        /// Pause before the next claim; `None` if there will be none.
        next_delay: Option<Duration>,
    },
    /// The state has changed.
    StateChange {
        /// Previous state.
        from: ElectionState,
        /// New state.
        to: ElectionState,
    },
    /// A failure occurred.
    Error {
        /// Cause of the failure.
        why: Cause,
    },
    /// The run has ended; once per run.
    Stopped {
        /// Reason for the end.
        why: StopReason,
    },
}

/// Cause of the end of a hold or of a failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The deadline passed without a confirmation.
    Deadline,
    /// The store reports that this participant holds nothing.
    NotHeld,
    /// Another participant holds the key, or held it in between.
    HeldByAnother,
    /// The release did not finish within its time limit.
    TimedOut,
    /// The store failed.
    Failed(StoreFailure),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadline => f.write_str("the deadline of the hold passed"),
            Self::NotHeld => f.write_str("the store reports that the key is not held"),
            Self::HeldByAnother => f.write_str("another participant holds the key"),
            Self::TimedOut => f.write_str("the release did not finish in time"),
            Self::Failed(failure) => failure.fmt(f),
        }
    }
}

/// Reason for the end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A stop was requested.
    Requested,
    /// The term ended, or could not begin, and `auto_reacquire` is off.
    TermOver,
    /// The retry strategy gave up.
    GaveUp,
    /// Error that waiting will not cure.
    Failed(StoreFailure),
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested => f.write_str("stop requested"),
            Self::TermOver => f.write_str("the term ended and auto_reacquire is off"),
            Self::GaveUp => f.write_str("the retry strategy gave up"),
            Self::Failed(failure) => failure.fmt(f),
        }
    }
}

/// Store error, with its meaning for the election.
#[derive(Clone, Debug)]
pub struct StoreFailure {
    /// Meaning for the election.
    pub kind: FailureKind,
    /// The error itself, for messages and for the retry strategy.
    pub error: Arc<dyn Error + Send + Sync>,
}

impl StoreFailure {
    /// Wraps an error of the store.
    pub fn new(kind: FailureKind, error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind, error: Arc::from(error.into()) }
    }
}

impl fmt::Display for StoreFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// Equal only if both are the same error instance; equal text is not enough.
impl PartialEq for StoreFailure {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind && Arc::ptr_eq(&self.error, &other.error)
    }
}

impl Eq for StoreFailure {}

/// Meaning of a store error for the election.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// No clear answer, but the session or the lease may still exist: a time-out, a broken reply. If the hold has no
    /// deadline this counts as [`Broken`](Self::Broken).
    Unclear,
    /// The session is gone; a new one may succeed.
    Broken,
    /// Waiting will not help: bad credentials, an invalid key, a database that does not exist.
    Permanent,
}
