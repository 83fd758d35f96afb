//! Rows of the table, 84 in all. Read a block as: in this state, on this input, the first case that applies.

use super::{Action, Case, ElectionState, InputKind, Outcome, Row, When};

/// Every pair of a state and an input, in the order of [`ElectionState::ALL`] and then of [`InputKind::ALL`].
pub static TABLE: [[Row; InputKind::ALL.len()]; ElectionState::ALL.len()] =
    [STOPPED, FOLLOWER, ACQUIRING, LEADER, RECONNECTING, RELEASING];

type Rows = [Row; InputKind::ALL.len()];

/// Rows of one state, as `Input => { cases }`. Every form covers all circumstances: its last case has no condition.
macro_rules! rows {
    ($from:ident: $($input:ident => { $($body:tt)* })*) => {
        [$(Row {
            from: ElectionState::$from,
            input: InputKind::$input,
            outcome: rows!(@outcome $($body)*),
        }),*]
    };
    (@outcome ignore $why:literal) => { Outcome::Ignore($why) };
    (@outcome always -> $to:ident [$($action:ident)*] $why:literal) => {
        Outcome::Cases(&[rows!(@case [] $to [$($action)*] $why)])
    };
    (@outcome
        $(if [$($when:ident)+] -> $to:ident [$($action:ident)*] $why:literal)+
        else -> $last:ident [$($last_action:ident)*] $last_why:literal
    ) => {
        Outcome::Cases(&[
            $(rows!(@case [$($when)+] $to [$($action)*] $why),)+
            rows!(@case [] $last [$($last_action)*] $last_why),
        ])
    };
    (@case [$($when:ident)*] $to:ident [$($action:ident)*] $why:literal) => {
        Case {
            when: &[$(When::$when),*],
            to: ElectionState::$to,
            actions: &[$(Action::$action),*],
            why: $why,
        }
    };
}

const STOPPED: Rows = rows! { Stopped:
    Start => {
        always -> Follower [Begin] "a new run, the first or a later one"
    }
    StopRequested => { ignore "nothing is running: a second stop has no effect" }
    AcquireAttempt => { ignore "a stopped participant makes no claims" }
    AcquireSucceeded => {
        always -> Stopped [ReleaseUnused] "the grant arrived after the stop: an unused hold must be released"
    }
    AcquireFailed => { ignore "a late answer to the claim that the stop aborted" }
    StoreError => { ignore "nothing is running that it could affect" }
    HealthOk => { ignore "a late answer to a health check of a former hold" }
    HealthFailed => { ignore "that hold has already ended" }
    ReacquireSucceeded => {
        always -> Stopped [ReleaseUnused] "the grant arrived after the stop: an unused hold must be released"
    }
    ReacquireFailed => { ignore "a late answer to the attempt that the stop aborted" }
    GraceExpired => { ignore "the window closed with the run" }
    ReleaseRequested => { ignore "a stopped participant holds nothing" }
    ReleaseSucceeded => { ignore "a late answer to a release that was aborted" }
    ReleaseFailed => { ignore "a late answer to a release that was aborted" }
};

const FOLLOWER: Rows = rows! { Follower:
    Start => { ignore "already running: a second start has no effect" }
    StopRequested => {
        always -> Stopped [Close Stopped] "nothing is held and no request is in flight"
    }
    AcquireAttempt => {
        if [CoolingDown] -> Follower [] "after a step-down the other participants go first"
        else -> Acquiring [Claim] "the pause is over, or the store reported that the key is free"
    }
    AcquireSucceeded => {
        always -> Follower [ReleaseUnused] "the claim was abandoned: its grant must be released"
    }
    AcquireFailed => { ignore "a late answer to an abandoned claim" }
    StoreError => {
        if [Late] -> Follower [] "the end of a session that was aborted on purpose"
        if [Permanent] -> Stopped [Close Error Stopped] "waiting will not help"
        else -> Follower [Error] "nothing is lost: the next claim connects again"
    }
    HealthOk => { ignore "a late answer to a health check of a former hold" }
    HealthFailed => { ignore "that hold has ended, and its end was reported" }
    ReacquireSucceeded => {
        always -> Follower [ReleaseUnused] "the window closed first and the loss was reported: the grant must be released"
    }
    ReacquireFailed => { ignore "a late answer: the window is closed" }
    GraceExpired => { ignore "the window is closed already" }
    ReleaseRequested => {
        always -> Follower [CoolDown] "nothing to release, but the request shows that this participant should not lead now"
    }
    ReleaseSucceeded => { ignore "a late answer to a release that was aborted" }
    ReleaseFailed => { ignore "a late answer to a release that was aborted" }
};

const ACQUIRING: Rows = rows! { Acquiring:
    Start => { ignore "already running: a second start has no effect" }
    StopRequested => {
        always -> Stopped [Abort Stopped] "the claim is aborted; a grant that still arrives is released"
    }
    AcquireAttempt => { ignore "one claim at a time" }
    AcquireSucceeded => {
        if [Late] -> Acquiring [ReleaseUnused] "the grant of an earlier claim: its session was aborted"
        if [Expired GaveUp] -> Stopped [ReleaseUnused Close AcquireFailed Stopped] "too late to be used, and no further attempt is wanted"
        if [Expired] -> Follower [ReleaseUnused Pause AcquireFailed] "a grant past its own deadline is not valid"
        else -> Leader [Hold Acquired] "the key is ours until the deadline"
    }
    AcquireFailed => {
        if [Late] -> Acquiring [] "the answer to an earlier claim"
        if [GaveUp] -> Stopped [Close AcquireFailed Stopped] "another participant leads, and no further attempt is wanted"
        else -> Follower [Pause AcquireFailed] "another participant leads: this one pauses as a follower"
    }
    StoreError => {
        if [Late] -> Acquiring [] "the end of a session that was aborted on purpose"
        if [Permanent] -> Stopped [Abort Error Stopped] "waiting will not help"
        if [NoReacquire] -> Stopped [Abort Error Stopped] "one attempt, as configured"
        if [GaveUp] -> Stopped [Abort Error Stopped] "no further attempt is wanted"
        else -> Follower [Abort Pause Error] "nothing was held, so nothing is lost; the claim may have been granted, so its session is aborted"
    }
    HealthOk => { ignore "a late answer to a health check of a former hold" }
    HealthFailed => { ignore "that hold has ended, and its end was reported" }
    ReacquireSucceeded => {
        always -> Acquiring [ReleaseUnused] "the window closed first and the loss was reported: the grant must be released"
    }
    ReacquireFailed => { ignore "a late answer: the window is closed" }
    GraceExpired => { ignore "the window is closed already" }
    ReleaseRequested => {
        always -> Follower [Abort CoolDown] "a grant may be in flight to a participant that should not lead: the claim is aborted"
    }
    ReleaseSucceeded => { ignore "a late answer to a release that was aborted" }
    ReleaseFailed => { ignore "a late answer to a release that was aborted" }
};

const LEADER: Rows = rows! { Leader:
    Start => { ignore "already running: a second start has no effect" }
    StopRequested => {
        always -> Releasing [StopAfterwards Release Bound] "the next leader need not wait for the lease to expire"
    }
    AcquireAttempt => { ignore "a holder never claims again: a session that holds twice must release twice" }
    AcquireSucceeded => {
        if [Ours] -> Leader [] "the grant by which this participant leads, reported twice"
        else -> Leader [ReleaseUnused] "the grant of an earlier claim: its session was aborted"
    }
    AcquireFailed => { ignore "a late answer to an earlier claim" }
    StoreError => {
        if [Late] -> Leader [] "the end of a session that was aborted on purpose"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [Unclear] -> Leader [ProbeSoon Error] "only a clear answer moves the deadline, and only the deadline ends the hold"
        if [Grace] -> Reconnecting [Abort OpenWindow Reacquire Error] "the session is gone; the hold may be recovered before a loss is reported"
        if [NoReacquire] -> Stopped [Abort Error Lost Stopped] "one term, as configured"
        if [GaveUp] -> Stopped [Abort Error Lost Stopped] "no further attempt is wanted"
        else -> Follower [Abort Pause Error Lost] "the cause is reported before the loss"
    }
    HealthOk => {
        if [Late] -> Leader [] "it proves an earlier hold, not this one"
        else -> Leader [Extend] "the hold stands"
    }
    HealthFailed => {
        if [Late] -> Leader [] "the end of an earlier hold"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [Grace] -> Reconnecting [Abort OpenWindow Reacquire Error] "the hold is gone; it may be recovered before a loss is reported"
        if [NoReacquire] -> Stopped [Abort Error Lost Stopped] "one term, as configured"
        if [GaveUp] -> Stopped [Abort Error Lost Stopped] "no further attempt is wanted"
        else -> Follower [Abort Pause Error Lost] "the cause is reported before the loss"
    }
    ReacquireSucceeded => {
        if [Ours] -> Leader [] "the grant by which this participant leads, reported twice"
        else -> Leader [ReleaseUnused] "the grant of an earlier window: its session was aborted"
    }
    ReacquireFailed => { ignore "a late answer: the window is closed" }
    GraceExpired => { ignore "the hold was recovered in time" }
    ReleaseRequested => {
        always -> Releasing [Release Bound] "leadership is handed over on request"
    }
    ReleaseSucceeded => { ignore "no release of this hold was requested: the answer concerns an earlier hold" }
    ReleaseFailed => { ignore "no release of this hold was requested: the answer concerns an earlier hold" }
};

const RECONNECTING: Rows = rows! { Reconnecting:
    Start => { ignore "already running: a second start has no effect" }
    StopRequested => {
        always -> Stopped [Abort Lost Stopped] "the term is lost; a grant that still arrives is released"
    }
    AcquireAttempt => {
        if [ClaimInFlight] -> Reconnecting [] "one claim at a time"
        else -> Reconnecting [Reacquire] "the window is open and the pause is over"
    }
    AcquireSucceeded => {
        always -> Reconnecting [ReleaseUnused] "the grant of an earlier claim: its session was aborted"
    }
    AcquireFailed => { ignore "a late answer to an earlier claim" }
    StoreError => {
        if [Late] -> Reconnecting [] "the end of the session that was aborted when the window opened"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [GaveUp] -> Stopped [Abort Error Lost Stopped] "no further attempt is wanted"
        else -> Reconnecting [Abort Pause Error] "a failed connection is retried while the window is open"
    }
    HealthOk => { ignore "a late answer from the aborted session: it does not restore the hold" }
    HealthFailed => { ignore "the loss that opened the window" }
    ReacquireSucceeded => {
        if [Late] -> Reconnecting [ReleaseUnused] "the grant of an abandoned attempt"
        if [Expired GaveUp] -> Stopped [ReleaseUnused Close Lost Stopped] "too late to be used, and no further attempt is wanted"
        if [Expired] -> Reconnecting [ReleaseUnused Pause] "a grant past its own deadline is not valid"
        if [AnotherHolder] -> Leader [Hold Lost Acquired] "another participant led in between: that ends one term and begins the next"
        else -> Leader [Hold] "recovered in time: a new token, and no loss is reported"
    }
    ReacquireFailed => {
        if [Late] -> Reconnecting [] "the answer to an abandoned attempt"
        if [AnotherHolder NoReacquire] -> Stopped [Close Lost Stopped] "another participant leads; one term, as configured"
        if [AnotherHolder GaveUp] -> Stopped [Close Lost Stopped] "another participant leads, and no further attempt is wanted"
        if [AnotherHolder] -> Follower [Pause Lost] "another participant leads: the term cannot be recovered"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [GaveUp] -> Stopped [Abort Error Lost Stopped] "no further attempt is wanted"
        else -> Reconnecting [Abort Pause Error] "a failed connection is retried while the window is open"
    }
    GraceExpired => {
        if [NoReacquire] -> Stopped [Abort Lost Stopped] "one term, as configured"
        if [GaveUp] -> Stopped [Abort Lost Stopped] "no further attempt is wanted"
        else -> Follower [Abort Pause Lost] "the hold was not recovered in time"
    }
    ReleaseRequested => {
        if [NoReacquire] -> Stopped [Abort Lost Stopped] "nothing is left to release; one term, as configured"
        else -> Follower [Abort CoolDown Lost] "nothing is left to release: the hold was lost before"
    }
    ReleaseSucceeded => { ignore "no release is in flight: the answer concerns an earlier hold" }
    ReleaseFailed => { ignore "no release is in flight: the answer concerns an earlier hold" }
};

const RELEASING: Rows = rows! { Releasing:
    Start => { ignore "still running; after a stop, start again once it has stopped" }
    StopRequested => {
        always -> Releasing [StopAfterwards Bound] "the release finishes within the shorter of the two time limits, then the run ends"
    }
    AcquireAttempt => { ignore "the release comes first" }
    AcquireSucceeded => {
        if [Ours] -> Releasing [] "the grant that is being released, reported twice"
        else -> Releasing [ReleaseUnused] "the grant of an earlier claim: its session was aborted"
    }
    AcquireFailed => { ignore "a late answer to an earlier claim" }
    StoreError => {
        if [Late] -> Releasing [] "the end of a session that was aborted on purpose"
        if [Stopping] -> Stopped [Abort Error Released Stopped] "the end of the session releases the hold"
        if [Permanent] -> Stopped [Abort Error Released Stopped] "waiting will not help"
        if [NoReacquire] -> Stopped [Abort Error Released Stopped] "the end of the session releases the hold; one term, as configured"
        else -> Follower [Abort CoolDown Error Released] "the end of the session releases the hold"
    }
    HealthOk => { ignore "a late answer to a health check: the release continues" }
    HealthFailed => {
        if [Late] -> Releasing [] "the end of an earlier hold"
        if [Stopping] -> Stopped [Abort Error Lost Stopped] "the hold ended before it was released"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [NoReacquire] -> Stopped [Abort Error Lost Stopped] "the hold ended before it was released; one term, as configured"
        else -> Follower [Abort CoolDown Error Lost] "the hold ended before it was released"
    }
    ReacquireSucceeded => {
        if [Ours] -> Releasing [] "the grant that is being released, reported twice"
        else -> Releasing [ReleaseUnused] "the grant of an earlier window: its session was aborted"
    }
    ReacquireFailed => { ignore "a late answer: the window is closed" }
    GraceExpired => { ignore "the window is closed already" }
    ReleaseRequested => {
        always -> Releasing [Bound] "the release is in flight: the shorter time limit applies"
    }
    ReleaseSucceeded => {
        if [Late] -> Releasing [] "the answer concerns an earlier hold"
        if [Stopping] -> Stopped [Close Released Stopped] "released, then disconnected"
        if [NoReacquire] -> Stopped [Close Released Stopped] "one term, as configured"
        else -> Follower [CoolDown Released] "the other participants go first"
    }
    ReleaseFailed => {
        if [Late] -> Releasing [] "the answer concerns an earlier hold"
        if [NotHeld Stopping] -> Stopped [Abort Lost Stopped] "the hold was gone before the release: a loss"
        if [NotHeld NoReacquire] -> Stopped [Abort Lost Stopped] "the hold was gone before the release: a loss; one term, as configured"
        if [NotHeld] -> Follower [Abort CoolDown Lost] "the hold was gone before the release: a loss"
        if [Stopping] -> Stopped [Abort Error Released Stopped] "the end of the session releases the hold"
        if [Permanent] -> Stopped [Abort Error Released Stopped] "waiting will not help"
        if [NoReacquire] -> Stopped [Abort Error Released Stopped] "the end of the session releases the hold; one term, as configured"
        else -> Follower [Abort CoolDown Error Released] "the end of the session releases the hold"
    }
};
