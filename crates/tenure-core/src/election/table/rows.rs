//! The 84 rows. Read a block as: in this state, on this input, the first case that fits.

use super::{Action, Case, ElectionState, InputKind, Outcome, Row, When};

/// Every pair of a state and an input, by [`State::ALL`] and then by [`InputKind::ALL`].
pub static TABLE: [[Row; InputKind::ALL.len()]; ElectionState::ALL.len()] =
    [STOPPED, FOLLOWER, ACQUIRING, LEADER, RECONNECTING, RELEASING];

type Rows = [Row; InputKind::ALL.len()];

/// `Input => { cases }` for one state. The forms allow no row without an answer for every circumstance.
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
    StopRequested => { ignore "nothing runs: stopping twice is stopping once" }
    AcquireAttempt => { ignore "no claim without a run" }
    AcquireSucceeded => {
        always -> Stopped [ReleaseUnused] "the grant overtook the stop: a hold that nobody uses must not stay"
    }
    AcquireFailed => { ignore "a late answer to the claim that the stop cut off" }
    StoreError => { ignore "nothing runs that could suffer from it" }
    HealthOk => { ignore "a late answer to a check of a hold that is gone" }
    HealthFailed => { ignore "that hold was given up before" }
    ReacquireSucceeded => {
        always -> Stopped [ReleaseUnused] "the grant overtook the stop: a hold that nobody uses must not stay"
    }
    ReacquireFailed => { ignore "a late answer to the attempt that the stop cut off" }
    GraceExpired => { ignore "the window closed with the run" }
    ReleaseRequested => { ignore "who does not take part leads nothing" }
    ReleaseSucceeded => { ignore "a late answer to a release that was cut off" }
    ReleaseFailed => { ignore "a late answer to a release that was cut off" }
};

const FOLLOWER: Rows = rows! { Follower:
    Start => { ignore "already running: two starts are one" }
    StopRequested => {
        always -> Stopped [Close Stopped] "nothing is held and nothing is on its way"
    }
    AcquireAttempt => {
        if [CoolingDown] -> Follower [] "after a step-down the others have their turn first"
        else -> Acquiring [Claim] "the pause is over, or the store said that the key is free"
    }
    AcquireSucceeded => {
        always -> Follower [ReleaseUnused] "the claim was given up: its grant must not stay"
    }
    AcquireFailed => { ignore "a late answer to a claim that was given up" }
    StoreError => {
        if [Late] -> Follower [] "the end of a session that was cut off on purpose"
        if [Permanent] -> Stopped [Close Error Stopped] "waiting will not help"
        else -> Follower [Error] "nothing is lost: the next claim connects again"
    }
    HealthOk => { ignore "a late answer to a check of a hold that is gone" }
    HealthFailed => { ignore "that hold is gone, and was reported" }
    ReacquireSucceeded => {
        always -> Follower [ReleaseUnused] "the window closed first and the loss was told: its grant must not stay"
    }
    ReacquireFailed => { ignore "a late answer: the window is closed" }
    GraceExpired => { ignore "the window is closed already" }
    ReleaseRequested => {
        always -> Follower [CoolDown] "nothing to release, but who asks for it does not want to lead right now"
    }
    ReleaseSucceeded => { ignore "a late answer to a release that was cut off" }
    ReleaseFailed => { ignore "a late answer to a release that was cut off" }
};

const ACQUIRING: Rows = rows! { Acquiring:
    Start => { ignore "already running: two starts are one" }
    StopRequested => {
        always -> Stopped [Abort Stopped] "the claim is cut off; a grant that comes all the same is given back"
    }
    AcquireAttempt => { ignore "one claim at a time" }
    AcquireSucceeded => {
        if [Late] -> Acquiring [ReleaseUnused] "the grant of an earlier claim: its session was cut off"
        if [Expired GaveUp] -> Stopped [ReleaseUnused Close AcquireFailed Stopped] "too late to be used, and no further attempt is wanted"
        if [Expired] -> Follower [ReleaseUnused Pause AcquireFailed] "a grant past its own deadline is worth nothing"
        else -> Leader [Hold Acquired] "the key is ours until the deadline"
    }
    AcquireFailed => {
        if [Late] -> Acquiring [] "the answer to an earlier claim"
        if [GaveUp] -> Stopped [Close AcquireFailed Stopped] "another leads, and no further attempt is wanted"
        else -> Follower [Pause AcquireFailed] "another leads: the pause is spent as a follower"
    }
    StoreError => {
        if [Late] -> Acquiring [] "the end of a session that was cut off on purpose"
        if [Permanent] -> Stopped [Abort Error Stopped] "waiting will not help"
        if [NoReacquire] -> Stopped [Abort Error Stopped] "one try, as configured"
        if [GaveUp] -> Stopped [Abort Error Stopped] "no further attempt is wanted"
        else -> Follower [Abort Pause Error] "who never led loses nothing; the claim may have landed, so its session goes"
    }
    HealthOk => { ignore "a late answer to a check of a hold that is gone" }
    HealthFailed => { ignore "that hold is gone, and was reported" }
    ReacquireSucceeded => {
        always -> Acquiring [ReleaseUnused] "the window closed first and the loss was told: its grant must not stay"
    }
    ReacquireFailed => { ignore "a late answer: the window is closed" }
    GraceExpired => { ignore "the window is closed already" }
    ReleaseRequested => {
        always -> Follower [Abort CoolDown] "a grant may be on its way to one who does not want to lead: the claim is cut off"
    }
    ReleaseSucceeded => { ignore "a late answer to a release that was cut off" }
    ReleaseFailed => { ignore "a late answer to a release that was cut off" }
};

const LEADER: Rows = rows! { Leader:
    Start => { ignore "already running: two starts are one" }
    StopRequested => {
        always -> Releasing [StopAfterwards Release Bound] "the next leader need not wait for the lease to run out"
    }
    AcquireAttempt => { ignore "who holds never claims again: a session that holds twice must release twice" }
    AcquireSucceeded => {
        if [Ours] -> Leader [] "the grant by which we lead, told twice"
        else -> Leader [ReleaseUnused] "the grant of an earlier claim: its session was cut off"
    }
    AcquireFailed => { ignore "a late answer to an earlier claim" }
    StoreError => {
        if [Late] -> Leader [] "the end of a session that was cut off on purpose"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [Unclear] -> Leader [ProbeSoon Error] "only a clear answer moves the deadline, and only the deadline ends the hold"
        if [Grace] -> Reconnecting [Abort OpenWindow Reacquire Error] "the session is gone; it may come back before anybody notices"
        if [NoReacquire] -> Stopped [Abort Error Lost Stopped] "one term, as configured"
        if [GaveUp] -> Stopped [Abort Error Lost Stopped] "no further attempt is wanted"
        else -> Follower [Abort Pause Error Lost] "first the cause, then the loss"
    }
    HealthOk => {
        if [Late] -> Leader [] "it proves an earlier hold, not this one"
        else -> Leader [Extend] "the hold stands"
    }
    HealthFailed => {
        if [Late] -> Leader [] "the end of an earlier hold"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [Grace] -> Reconnecting [Abort OpenWindow Reacquire Error] "the hold is gone; it may come back before anybody notices"
        if [NoReacquire] -> Stopped [Abort Error Lost Stopped] "one term, as configured"
        if [GaveUp] -> Stopped [Abort Error Lost Stopped] "no further attempt is wanted"
        else -> Follower [Abort Pause Error Lost] "first the cause, then the loss"
    }
    ReacquireSucceeded => {
        if [Ours] -> Leader [] "the grant by which we lead, told twice"
        else -> Leader [ReleaseUnused] "the grant of an earlier window: its session was cut off"
    }
    ReacquireFailed => { ignore "a late answer: the window is closed" }
    GraceExpired => { ignore "the hold came back in time" }
    ReleaseRequested => {
        always -> Releasing [Release Bound] "a hand-over on request"
    }
    ReleaseSucceeded => { ignore "no release of this hold was asked for: it speaks of an earlier one" }
    ReleaseFailed => { ignore "no release of this hold was asked for: it speaks of an earlier one" }
};

const RECONNECTING: Rows = rows! { Reconnecting:
    Start => { ignore "already running: two starts are one" }
    StopRequested => {
        always -> Stopped [Abort Lost Stopped] "what was led is lost; a grant that comes all the same is given back"
    }
    AcquireAttempt => {
        if [ClaimInFlight] -> Reconnecting [] "one claim at a time"
        else -> Reconnecting [Reacquire] "the window is open and the pause is over"
    }
    AcquireSucceeded => {
        always -> Reconnecting [ReleaseUnused] "the grant of an earlier claim: its session was cut off"
    }
    AcquireFailed => { ignore "a late answer to an earlier claim" }
    StoreError => {
        if [Late] -> Reconnecting [] "the end of the session that was cut off when the window opened"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [GaveUp] -> Stopped [Abort Error Lost Stopped] "no further attempt is wanted"
        else -> Reconnecting [Abort Pause Error] "no connection is tried again while the window is open"
    }
    HealthOk => { ignore "a late answer from the session that was cut off: it revives nothing" }
    HealthFailed => { ignore "the loss that opened the window" }
    ReacquireSucceeded => {
        if [Late] -> Reconnecting [ReleaseUnused] "the grant of an attempt that was given up"
        if [Expired GaveUp] -> Stopped [ReleaseUnused Close Lost Stopped] "too late to be used, and no further attempt is wanted"
        if [Expired] -> Reconnecting [ReleaseUnused Pause] "a grant past its own deadline is worth nothing"
        if [AnotherHolder] -> Leader [Hold Lost Acquired] "another led in between: that ends one term and begins the next"
        else -> Leader [Hold] "recovered in time: a new token, and nobody is alarmed"
    }
    ReacquireFailed => {
        if [Late] -> Reconnecting [] "the answer to an attempt that was given up"
        if [AnotherHolder NoReacquire] -> Stopped [Close Lost Stopped] "another leads; one term, as configured"
        if [AnotherHolder GaveUp] -> Stopped [Close Lost Stopped] "another leads, and no further attempt is wanted"
        if [AnotherHolder] -> Follower [Pause Lost] "another leads: the window has nothing left to save"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [GaveUp] -> Stopped [Abort Error Lost Stopped] "no further attempt is wanted"
        else -> Reconnecting [Abort Pause Error] "no connection is tried again while the window is open"
    }
    GraceExpired => {
        if [NoReacquire] -> Stopped [Abort Lost Stopped] "one term, as configured"
        if [GaveUp] -> Stopped [Abort Lost Stopped] "no further attempt is wanted"
        else -> Follower [Abort Pause Lost] "the hold did not come back in time"
    }
    ReleaseRequested => {
        if [NoReacquire] -> Stopped [Abort Lost Stopped] "nothing is left to release; one term, as configured"
        else -> Follower [Abort CoolDown Lost] "nothing is left to release: it was lost before it could be given"
    }
    ReleaseSucceeded => { ignore "no release is on its way: it speaks of an earlier hold" }
    ReleaseFailed => { ignore "no release is on its way: it speaks of an earlier hold" }
};

const RELEASING: Rows = rows! { Releasing:
    Start => { ignore "still running; after a stop, start again once it has stopped" }
    StopRequested => {
        always -> Releasing [StopAfterwards Bound] "the release finishes within the tighter of both bounds, then the run ends"
    }
    AcquireAttempt => { ignore "first the release" }
    AcquireSucceeded => {
        if [Ours] -> Releasing [] "the grant that is being released, told twice"
        else -> Releasing [ReleaseUnused] "the grant of an earlier claim: its session was cut off"
    }
    AcquireFailed => { ignore "a late answer to an earlier claim" }
    StoreError => {
        if [Late] -> Releasing [] "the end of a session that was cut off on purpose"
        if [Stopping] -> Stopped [Abort Error Released Stopped] "the end of the session gives the hold up"
        if [Permanent] -> Stopped [Abort Error Released Stopped] "waiting will not help"
        if [NoReacquire] -> Stopped [Abort Error Released Stopped] "the end of the session gives the hold up; one term, as configured"
        else -> Follower [Abort CoolDown Error Released] "the end of the session gives the hold up"
    }
    HealthOk => { ignore "a late answer to a check: the hold is being given up all the same" }
    HealthFailed => {
        if [Late] -> Releasing [] "the end of an earlier hold"
        if [Stopping] -> Stopped [Abort Error Lost Stopped] "the hold ended before it could be given"
        if [Permanent] -> Stopped [Abort Error Lost Stopped] "waiting will not help"
        if [NoReacquire] -> Stopped [Abort Error Lost Stopped] "the hold ended before it could be given; one term, as configured"
        else -> Follower [Abort CoolDown Error Lost] "the hold ended before it could be given"
    }
    ReacquireSucceeded => {
        if [Ours] -> Releasing [] "the grant that is being released, told twice"
        else -> Releasing [ReleaseUnused] "the grant of an earlier window: its session was cut off"
    }
    ReacquireFailed => { ignore "a late answer: the window is closed" }
    GraceExpired => { ignore "the window is closed already" }
    ReleaseRequested => {
        always -> Releasing [Bound] "the release is on its way: only the tighter bound counts"
    }
    ReleaseSucceeded => {
        if [Late] -> Releasing [] "it speaks of an earlier hold"
        if [Stopping] -> Stopped [Close Released Stopped] "released, then disconnected"
        if [NoReacquire] -> Stopped [Close Released Stopped] "one term, as configured"
        else -> Follower [CoolDown Released] "the others have their turn first"
    }
    ReleaseFailed => {
        if [Late] -> Releasing [] "it speaks of an earlier hold"
        if [NotHeld Stopping] -> Stopped [Abort Lost Stopped] "the hold was gone before the release: a loss"
        if [NotHeld NoReacquire] -> Stopped [Abort Lost Stopped] "the hold was gone before the release: a loss; one term, as configured"
        if [NotHeld] -> Follower [Abort CoolDown Lost] "the hold was gone before the release: a loss"
        if [Stopping] -> Stopped [Abort Error Released Stopped] "the end of the session gives the hold up"
        if [Permanent] -> Stopped [Abort Error Released Stopped] "waiting will not help"
        if [NoReacquire] -> Stopped [Abort Error Released Stopped] "the end of the session gives the hold up; one term, as configured"
        else -> Follower [Abort CoolDown Error Released] "the end of the session gives the hold up"
    }
};
