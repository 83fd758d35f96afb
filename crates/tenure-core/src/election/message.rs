//! What goes into the election machine and what comes out of it.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::table::{ElectionState, InputKind};
use crate::time::Time;
use crate::token::FencingToken;

/// The number of a claim, unique within one [`Election`](super::Election) and never used again.
///
/// It also names the hold and the session that come out of the claim, so that an answer which arrives late is never
/// taken for the answer to a later question.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimNumber(pub(super) u64);

impl fmt::Debug for ClaimNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "claim {}", self.0)
    }
}

/// What the store granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElectionGrant {
    /// Larger than the token of every grant of this key before.
    pub token: FencingToken,
    /// The hold counts while `now < deadline`. [`Time::MAX`] where the store knows no lease.
    pub deadline: Time,
}

/// A term, as the next one is compared with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The fencing token of its grant.
    pub token: FencingToken,
    /// How many grants of the key there were, this one included; `None` where the store does not count them.
    pub grants: Option<u64>,
}

impl Term {
    /// Whether the count shows another term between this one and `next`. Without a count nothing is shown. Where the
    /// epoch has changed the store may have forgotten grants, and then nobody can say that there was none.
    pub fn another_before(self, next: Self) -> bool {
        let Some((before, after)) = self.grants.zip(next.grants) else { return false };
        self.token.epoch() != next.token.epoch() || after != before.saturating_add(1)
    }
}

/// Something that happened, told to [`Election::handle`](super::Election::handle).
#[derive(Clone, Debug)]
pub enum ElectionInput {
    /// The user wants to take part.
    Start,
    /// The user, or a signal, wants this participant to end.
    StopRequested {
        /// The hard bound on the release; the configured one where `None`.
        timeout: Option<Duration>,
    },
    /// The next claim is due. The machine's own timer says this; say it earlier when the store tells that the key is free.
    AcquireAttempt,
    /// Answer to [`Command::Claim`]: granted.
    AcquireSucceeded {
        /// The claim that is answered.
        claim: ClaimNumber,
        /// What was granted.
        grant: ElectionGrant,
    },
    /// Answer to [`Command::Claim`]: another holds the key.
    AcquireFailed {
        /// The claim that is answered.
        claim: ClaimNumber,
    },
    /// The store failed: instead of the answer to a command, or out of the blue.
    StoreError {
        /// The claim whose session failed; `None` where it cannot be told, which counts for the current one.
        claim: Option<ClaimNumber>,
        /// What failed.
        failure: StoreFailure,
    },
    /// Answer to [`Command::Probe`]: the hold stands.
    HealthOk {
        /// The claim whose hold was confirmed.
        claim: ClaimNumber,
        /// The new deadline, counted from before the request was sent.
        deadline: Time,
    },
    /// The hold is gone, by an answer to [`Command::Probe`] or because the store said so unasked.
    HealthFailed {
        /// The claim whose hold is gone.
        claim: ClaimNumber,
        /// How it is known.
        cause: Cause,
    },
    /// Answer to [`Command::Reacquire`]: granted.
    ReacquireSucceeded {
        /// The claim that is answered.
        claim: ClaimNumber,
        /// What was granted.
        grant: ElectionGrant,
        /// Whether another held the key since this participant lost it.
        another_held: bool,
    },
    /// Answer to [`Command::Reacquire`]: not granted.
    ReacquireFailed {
        /// The claim that is answered.
        claim: ClaimNumber,
        /// [`Cause::HeldByAnother`] closes the window; every other cause is tried again while it is open.
        cause: Cause,
    },
    /// The grace window is over. The machine's own timer says this.
    GraceExpired,
    /// The user wants another participant to lead.
    ReleaseRequested {
        /// The hard bound on the release; the configured one where `None`.
        timeout: Option<Duration>,
    },
    /// Answer to [`Command::Release`]: the hold is given back.
    ReleaseSucceeded {
        /// The claim whose hold was released.
        claim: ClaimNumber,
    },
    /// Answer to [`Command::Release`]: it failed.
    ReleaseFailed {
        /// The claim whose hold was to be released.
        claim: ClaimNumber,
        /// [`Cause::NotHeld`] and [`Cause::HeldByAnother`] make it a loss.
        cause: Cause,
    },
}

impl ElectionInput {
    /// The input without its data, as the table knows it.
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

    /// The claim that the input speaks of.
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

    /// What was granted.
    pub(super) const fn grant(&self) -> Option<ElectionGrant> {
        match *self {
            Self::AcquireSucceeded { grant, .. } | Self::ReacquireSucceeded { grant, .. } => {
                Some(grant)
            }
            _ => None,
        }
    }

    /// What went wrong.
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

    /// The error of the store behind it.
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

/// Something to do, from [`Election::poll_command`](super::Election::poll_command).
///
/// Commands are done in their order. `Claim`, `Probe`, `Reacquire` and `Release` are answered by an input with the same
/// number; a command that comes before the answer takes precedence over it, and the answer is then welcome but not needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElectionCommand {
    /// Claim the key, connecting first where there is no session.
    Claim {
        /// The number of this claim.
        claim: ClaimNumber,
    },
    /// Prove that the hold stands: renew the lease, or ask the session for a sign of life. Without a lease no deadline
    /// ends the wait for the answer, so the driver bounds it.
    Probe {
        /// The claim whose hold is meant.
        claim: ClaimNumber,
    },
    /// Open a new session and claim the key in it: the grace window is open.
    Reacquire {
        /// The number of this claim.
        claim: ClaimNumber,
    },
    /// Release the hold.
    Release {
        /// The claim whose hold is meant.
        claim: ClaimNumber,
    },
    /// Release a hold that nobody uses. Needs no answer; finding nothing to release is success.
    ReleaseUnused {
        /// The claim whose hold is meant.
        claim: ClaimNumber,
    },
    /// Cut the session of this claim off at once, whatever runs in it, and make sure that nothing it holds or may still
    /// be granted stays longer than the store's own lease. Needs no answer; a grant that came first is still told.
    Abort {
        /// The claim whose session is meant.
        claim: ClaimNumber,
    },
    /// Close the session, if one is open; nothing runs in it. Needs no answer.
    Close,
}

/// Something to tell the user, from [`Election::poll_event`](super::Election::poll_event).
///
/// Within one step the change of state comes first, and `Stopped` last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectionEvent {
    /// The participant leads. Followed by exactly one `Lost` or `Released` before the next.
    Acquired {
        /// The fencing token of the grant.
        token: FencingToken,
    },
    /// The participant gave its leadership up.
    Released,
    /// The participant's leadership ended against its will.
    Lost {
        /// How it ended.
        why: Cause,
    },
    /// A claim came to nothing: another holds the key, or the grant arrived past its deadline.
    AcquireFailed {
        /// The failures in a row, this one included.
        attempt: u32,
        /// The pause before the next claim; `None` where there will be none.
        next_delay: Option<Duration>,
    },
    /// The state has changed.
    StateChange {
        /// The state before.
        from: ElectionState,
        /// The state now.
        to: ElectionState,
    },
    /// Something failed.
    Error {
        /// What it was.
        why: Cause,
    },
    /// The run is over; once per run.
    Stopped {
        /// What ended it.
        why: StopReason,
    },
}

/// What ended a hold, or spoiled an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The deadline passed without a confirmation.
    Deadline,
    /// The store says that this participant holds nothing.
    NotHeld,
    /// Another holds the key, or held it in between.
    HeldByAnother,
    /// The release did not finish within its bound.
    TimedOut,
    /// The store failed.
    Failed(StoreFailure),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadline => f.write_str("the deadline of the hold passed"),
            Self::NotHeld => f.write_str("the store says that the key is not held"),
            Self::HeldByAnother => f.write_str("another holds the key"),
            Self::TimedOut => f.write_str("the release did not finish in time"),
            Self::Failed(failure) => failure.fmt(f),
        }
    }
}

/// Why a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// Somebody asked for it.
    Requested,
    /// Its term is over, or could not begin, and `auto_reacquire` is off.
    TermOver,
    /// The retry strategy wanted no further attempt.
    GaveUp,
    /// An error that waiting will not cure.
    Failed(StoreFailure),
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested => f.write_str("stop requested"),
            Self::TermOver => f.write_str("term over and auto_reacquire is off"),
            Self::GaveUp => f.write_str("the retry strategy gave up"),
            Self::Failed(failure) => failure.fmt(f),
        }
    }
}

/// An error of the store, with what it means for the election.
#[derive(Clone, Debug)]
pub struct StoreFailure {
    /// What it means.
    pub kind: FailureKind,
    /// The error itself, for people and for the retry strategy.
    pub error: Arc<dyn Error + Send + Sync>,
}

impl StoreFailure {
    /// An error of the store.
    pub fn new(kind: FailureKind, error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind, error: Arc::from(error.into()) }
    }
}

impl fmt::Display for StoreFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// Equal where it is the very same error, not one that reads alike.
impl PartialEq for StoreFailure {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind && Arc::ptr_eq(&self.error, &other.error)
    }
}

impl Eq for StoreFailure {}

/// What an error of the store means for the election.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// No clear answer, but the session or the lease may stand: a time-out, a broken reply. Where the hold has no
    /// deadline this counts as [`Broken`](Self::Broken).
    Unclear,
    /// The session is gone; a new one may do better.
    Broken,
    /// Waiting will not help: bad credentials, a bad key, a database that does not exist.
    Permanent,
}
