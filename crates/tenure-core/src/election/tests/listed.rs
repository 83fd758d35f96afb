//! The nineteen pairs that pgleaderlock lists, each under its own name, as changed by the decisions.

use super::*;

#[test]
fn stopped_start_follows_and_claims_at_once() {
    let mut trial = Trial::new(plain());
    assert_eq!(trial.feed(ElectionInput::Start), "stopped > follower");
    assert_eq!(trial.election.poll_timeout(), Some(trial.now));
}

#[test]
fn follower_acquire_attempt_claims() {
    let mut trial = Trial::at(ElectionState::Follower, plain());
    assert_eq!(trial.feed(ElectionInput::AcquireAttempt), "[claim 1]; follower > acquiring");
    assert_eq!(trial.election.poll_timeout(), None);
}

#[test]
fn follower_stop_requested_closes_and_stops() {
    let mut trial = Trial::at(ElectionState::Follower, plain());
    let output = trial.feed(ElectionInput::StopRequested { timeout: None });
    assert_eq!(output, "[close]; follower > stopped; stopped (Requested)");
    assert_eq!(trial.election.poll_timeout(), None);
}

#[test]
fn acquiring_acquire_succeeded_leads_and_starts_health_checks() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    assert_eq!(trial.grant(7), "acquiring > leader; acquired 7");
    assert!(trial.leads());
    assert_eq!(trial.election.fencing_token(), Some(FencingToken::new(0, 7)));
    assert_eq!(trial.election.deadline(), Some(trial.now + LEASE));
    assert_eq!(trial.wait(secs(5)), "[probe 1]");
}

#[test]
fn acquiring_acquire_failed_pauses_as_follower() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let output = trial.feed(ElectionInput::AcquireFailed { claim: trial.claim() });
    assert_eq!(output, "acquiring > follower; failed 1, again in 2s");
    assert_eq!(trial.wait(secs(1)), "");
    assert_eq!(trial.wait(secs(1)), "[claim 2]; follower > acquiring");
}

#[test]
fn acquiring_store_error_pauses_as_follower() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let claim = Some(trial.claim());
    let output = trial.feed(ElectionInput::StoreError { claim, failure: broken("refused") });
    assert_eq!(output, "[abort 1]; acquiring > follower; error (refused)");
    assert_eq!(trial.wait(PAUSE), "[claim 2]; follower > acquiring");
}

#[test]
fn acquiring_store_error_stops_without_auto_reacquire() {
    let mut trial = Trial::at(ElectionState::Acquiring, once(plain()));
    let output = trial.feed(ElectionInput::StoreError { claim: None, failure: broken("refused") });
    assert_eq!(output, "[abort 1]; acquiring > stopped; error (refused); stopped (TermOver)");
}

#[test]
fn acquiring_stop_requested_cuts_the_claim_off() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let output = trial.feed(ElectionInput::StopRequested { timeout: None });
    assert_eq!(output, "[abort 1]; acquiring > stopped; stopped (Requested)");
}

#[test]
fn leader_health_ok_moves_the_deadline_and_says_nothing() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    assert_eq!(trial.wait(secs(5)), "[probe 1]");
    let deadline = trial.now + LEASE;
    assert_eq!(trial.feed(ElectionInput::HealthOk { claim: trial.claim(), deadline }), "");
    assert_eq!(trial.election.deadline(), Some(deadline));
    assert_eq!(trial.wait(secs(5)), "[probe 1]");
}

#[test]
fn leader_health_failed_opens_the_grace_window() {
    let mut trial = Trial::at(ElectionState::Leader, graceful());
    let cause = Cause::Failed(broken("cut"));
    let output = trial.feed(ElectionInput::HealthFailed { claim: trial.claim(), cause });
    assert_eq!(output, "[abort 1, reacquire 2]; leader > reconnecting; error (cut)");
    assert!(!trial.leads());
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + secs(8)));
}

#[test]
fn leader_health_failed_is_a_loss_without_a_window() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    let cause = Cause::Failed(broken("cut"));
    let output = trial.feed(ElectionInput::HealthFailed { claim: trial.claim(), cause });
    assert_eq!(output, "[abort 1]; leader > follower; error (cut); lost (cut)");
    assert_eq!(trial.wait(PAUSE), "[claim 2]; follower > acquiring");
}

#[test]
fn leader_store_error_opens_the_grace_window() {
    let mut trial = Trial::at(ElectionState::Leader, graceful());
    let claim = Some(trial.claim());
    let output = trial.feed(ElectionInput::StoreError { claim, failure: broken("reset") });
    assert_eq!(output, "[abort 1, reacquire 2]; leader > reconnecting; error (reset)");
}

#[test]
fn leader_store_error_is_a_loss_without_a_window() {
    let mut trial = Trial::at(ElectionState::Leader, once(plain()));
    let output = trial.feed(ElectionInput::StoreError { claim: None, failure: broken("reset") });
    assert_eq!(
        output,
        "[abort 1]; leader > stopped; error (reset); lost (reset); stopped (TermOver)"
    );
}

#[test]
fn leader_stop_requested_releases() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    let output = trial.feed(ElectionInput::StopRequested { timeout: None });
    assert_eq!(output, "[release 1]; leader > releasing");
    assert!(!trial.leads());
}

#[test]
fn leader_release_requested_releases() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    let output = trial.feed(ElectionInput::ReleaseRequested { timeout: None });
    assert_eq!(output, "[release 1]; leader > releasing");
    assert!(!trial.leads());
}

#[test]
fn reconnecting_reacquire_succeeded_leads_again_in_silence() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    assert_eq!(trial.regrant(9, false), "reconnecting > leader");
    assert!(trial.leads());
    assert_eq!(trial.election.fencing_token(), Some(FencingToken::new(0, 9)));
}

#[test]
fn reconnecting_reacquire_failed_is_a_loss_when_another_holds() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    let claim = trial.claim();
    let output = trial.feed(ElectionInput::ReacquireFailed { claim, cause: Cause::HeldByAnother });
    assert_eq!(output, "reconnecting > follower; lost (HeldByAnother)");
    assert_eq!(trial.wait(PAUSE), "[claim 3]; follower > acquiring");
}

#[test]
fn reconnecting_grace_expired_is_a_loss() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    assert_eq!(trial.wait(secs(8)), "[abort 2]; reconnecting > follower; lost (cut)");
    assert_eq!(trial.wait(PAUSE), "[claim 3]; follower > acquiring");

    let mut trial = Trial::at(ElectionState::Reconnecting, once(graceful()));
    let output = trial.wait(secs(8));
    assert_eq!(output, "[abort 2]; reconnecting > stopped; lost (cut); stopped (TermOver)");
}

#[test]
fn reconnecting_stop_requested_stops() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    let output = trial.feed(ElectionInput::StopRequested { timeout: None });
    assert_eq!(output, "[abort 2]; reconnecting > stopped; lost (cut); stopped (Requested)");
}

#[test]
fn releasing_release_succeeded_stops_or_follows() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    trial.feed(ElectionInput::StopRequested { timeout: None });
    let output = trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    assert_eq!(output, "[close]; releasing > stopped; released; stopped (Requested)");

    let mut trial = Trial::at(ElectionState::Releasing, plain());
    let output = trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    assert_eq!(output, "releasing > follower; released");

    let mut trial = Trial::at(ElectionState::Releasing, once(plain()));
    let output = trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    assert_eq!(output, "[close]; releasing > stopped; released; stopped (TermOver)");
}

#[test]
fn releasing_release_failed_stops_after_a_stop() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    trial.feed(ElectionInput::StopRequested { timeout: None });
    let cause = Cause::Failed(broken("reset"));
    let output = trial.feed(ElectionInput::ReleaseFailed { claim: trial.claim(), cause });
    assert_eq!(
        output,
        "[abort 1]; releasing > stopped; error (reset); released; stopped (Requested)"
    );
}

#[test]
fn releasing_store_error_stops_after_a_stop() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    trial.feed(ElectionInput::StopRequested { timeout: None });
    let output = trial.feed(ElectionInput::StoreError { claim: None, failure: permanent("gone") });
    assert_eq!(
        output,
        "[abort 1]; releasing > stopped; error (gone); released; stopped (Requested)"
    );
}
