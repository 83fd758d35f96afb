//! The ten decisions on which the table of pgleaderlock is silent or wrong, each under its number.

use super::*;

#[test]
fn d01_leadership_is_a_deadline_not_a_state() {
    let trial = Trial::at(ElectionState::Leader, plain());
    let deadline = trial.election.deadline().unwrap();
    assert!(trial.election.is_leader(deadline - Duration::from_nanos(1)));
    assert!(!trial.election.is_leader(deadline));
    assert_eq!(trial.election.state(), ElectionState::Leader, "the machine has had no input yet");
}

#[test]
fn d01_the_deadline_is_a_timer_and_ends_the_hold_at_once() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    assert_eq!(trial.wait(secs(5)), "[probe 1]", "the probe is never answered");
    assert_eq!(trial.election.poll_timeout(), trial.election.deadline());
    let output = trial.wait(secs(5));
    assert_eq!(output, "[abort 1]; leader > follower; error (Deadline); lost (Deadline)");
    assert_eq!(trial.election.deadline(), None);
}

#[test]
fn d01_an_answer_after_the_deadline_saves_nothing() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    let claim = trial.claim();
    trial.now = trial.now + LEASE;
    let deadline = trial.now + LEASE;
    let output = trial.feed(ElectionInput::HealthOk { claim, deadline });
    assert_eq!(output, "[abort 1]; leader > follower; error (Deadline); lost (Deadline)");
    assert!(!trial.leads());
}

#[test]
fn d01_leadership_ends_before_the_release_begins() {
    for stop in [true, false] {
        let mut trial = Trial::at(ElectionState::Leader, plain());
        let input = if stop {
            ElectionInput::StopRequested { timeout: None }
        } else {
            ElectionInput::ReleaseRequested { timeout: None }
        };
        trial.election.handle(input, trial.now);
        assert!(!trial.leads(), "before any command was polled");
        assert_eq!(trial.election.fencing_token(), None);
    }
}

#[test]
fn d01_no_lease_means_no_deadline() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let grant = ElectionGrant { token: FencingToken::new(0, 1), deadline: Time::MAX };
    trial.feed(ElectionInput::AcquireSucceeded { claim: trial.claim(), grant });
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + secs(5)));
    assert_eq!(trial.wait(secs(5)), "[probe 1]");
    assert_eq!(trial.election.poll_timeout(), None, "the answer to the probe decides");
    assert!(trial.leads());
}

#[test]
fn d02_participant_that_never_led_reports_no_loss() {
    for config in [plain(), graceful(), once(plain())] {
        for failure in [broken("x"), permanent("x"), unclear("x")] {
            let mut trial = Trial::at(ElectionState::Acquiring, config);
            let output = trial.feed(ElectionInput::StoreError { claim: None, failure });
            assert!(output.contains("error (x)") && !output.contains("lost"), "{output}");
        }
    }
}

#[test]
fn d03_the_cause_comes_before_the_loss() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    let output =
        trial.feed(ElectionInput::HealthFailed { claim: trial.claim(), cause: Cause::NotHeld });
    assert_eq!(output, "[abort 1]; leader > follower; error (NotHeld); lost (NotHeld)");
}

#[test]
fn d03_the_cause_alone_is_told_when_the_window_opens() {
    let mut trial = Trial::at(ElectionState::Leader, graceful());
    let output = trial.wait(LEASE);
    assert!(output.ends_with("leader > reconnecting; error (Deadline)"), "{output}");
}

#[test]
fn d04_no_connection_is_tried_again_within_the_window() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    for (failed, next) in [(2, 3), (3, 4), (4, 5)] {
        let cause = Cause::Failed(broken("refused"));
        let output = trial.feed(ElectionInput::ReacquireFailed { claim: trial.claim(), cause });
        assert_eq!(output, format!("[abort {failed}]; error (refused)"));
        assert_eq!(trial.wait(PAUSE), format!("[reacquire {next}]"));
    }
    assert_eq!(trial.election.state(), ElectionState::Reconnecting);
    assert_eq!(trial.wait(secs(2)), "[abort 5]; reconnecting > follower; lost (cut)");
}

#[test]
fn d04_held_by_another_closes_the_window_at_once() {
    let mut trial = Trial::at(ElectionState::Reconnecting, once(graceful()));
    let claim = trial.claim();
    let output = trial.feed(ElectionInput::ReacquireFailed { claim, cause: Cause::HeldByAnother });
    assert_eq!(output, "[close]; reconnecting > stopped; lost (HeldByAnother); stopped (TermOver)");
}

#[test]
fn d04_the_window_does_not_open_when_another_holds_already() {
    let mut trial = Trial::at(ElectionState::Leader, graceful());
    let claim = trial.claim();
    let output = trial.feed(ElectionInput::HealthFailed { claim, cause: Cause::HeldByAnother });
    assert_eq!(output, "[abort 1]; leader > follower; error (HeldByAnother); lost (HeldByAnother)");
}

#[test]
fn d04_another_leader_in_between_ends_one_term_and_begins_the_next() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    let output = trial.regrant(9, true);
    assert_eq!(output, "reconnecting > leader; lost (HeldByAnother); acquired 9");
}

#[test]
fn d04_grant_count_reveals_a_leader_in_between() {
    let term = |epoch, number, grants| Term { token: FencingToken::new(epoch, number), grants };
    let ours = term(1, 700, Some(4));
    assert!(!ours.another_term_before(term(1, 900, Some(5))), "the very next grant");
    assert!(ours.another_term_before(term(1, 900, Some(6))), "one grant in between");
    assert!(
        ours.another_term_before(term(1, 900, Some(4))),
        "a count that decreased proves nothing"
    );
    assert!(ours.another_term_before(term(2, 900, Some(5))), "a fail-over may have lost grants");
    assert!(!ours.another_term_before(term(2, 900, None)), "without a count nothing is known");
    assert!(!term(1, 700, None).another_term_before(term(1, 900, Some(5))));
}

#[test]
fn d04_the_window_damps_events_and_not_leadership() {
    let trial = Trial::at(ElectionState::Reconnecting, graceful());
    assert!(!trial.leads());
    assert_eq!((trial.election.deadline(), trial.election.fencing_token()), (None, None));
}

#[test]
fn d05_stop_in_the_window_is_a_loss_and_then_a_stop() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    let cause = Cause::Failed(broken("refused"));
    trial.feed(ElectionInput::ReacquireFailed { claim: trial.claim(), cause });
    let output = trial.feed(ElectionInput::StopRequested { timeout: None });
    assert_eq!(output, "[close]; reconnecting > stopped; lost (cut); stopped (Requested)");
}

#[test]
fn d05_stop_while_releasing_lets_the_release_finish_within_the_budget() {
    let config = ElectionConfig { step_down_timeout: secs(8), ..plain() };
    let mut trial = Trial::at(ElectionState::Releasing, config);
    assert_eq!(trial.feed(ElectionInput::StopRequested { timeout: Some(secs(3)) }), "");
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + secs(3)));
    trial.wait(secs(2));
    let output = trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    assert_eq!(output, "[close]; releasing > stopped; released; stopped (Requested)");
}

#[test]
fn d05_a_later_stop_does_not_loosen_the_bound() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    trial.feed(ElectionInput::ReleaseRequested { timeout: Some(secs(2)) });
    trial.feed(ElectionInput::StopRequested { timeout: Some(secs(60)) });
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + secs(2)));
}

#[test]
fn d06_a_failed_release_after_step_down_follows_again() {
    let mut trial = Trial::at(ElectionState::Releasing, plain());
    let cause = Cause::Failed(broken("reset"));
    let output = trial.feed(ElectionInput::ReleaseFailed { claim: trial.claim(), cause });
    assert_eq!(output, "[abort 1]; releasing > follower; error (reset); released");

    let mut trial = Trial::at(ElectionState::Releasing, once(plain()));
    let output = trial.feed(ElectionInput::StoreError { claim: None, failure: broken("reset") });
    assert_eq!(
        output,
        "[abort 1]; releasing > stopped; error (reset); released; stopped (TermOver)"
    );
}

#[test]
fn d06_releasing_what_is_not_held_is_a_loss() {
    let mut trial = Trial::at(ElectionState::Releasing, plain());
    let output =
        trial.feed(ElectionInput::ReleaseFailed { claim: trial.claim(), cause: Cause::NotHeld });
    assert_eq!(output, "[abort 1]; releasing > follower; lost (NotHeld)");

    let mut trial = Trial::at(ElectionState::Leader, plain());
    trial.feed(ElectionInput::StopRequested { timeout: None });
    let claim = trial.claim();
    let output = trial.feed(ElectionInput::ReleaseFailed { claim, cause: Cause::HeldByAnother });
    assert_eq!(output, "[abort 1]; releasing > stopped; lost (HeldByAnother); stopped (Requested)");
}

#[test]
fn d07_step_down_past_its_timeout_cuts_the_session_off() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    trial.feed(ElectionInput::ReleaseRequested { timeout: Some(secs(2)) });
    assert_eq!(trial.wait(Duration::from_millis(1_999)), "");
    let output = trial.wait(Duration::from_millis(1));
    assert_eq!(output, "[abort 1]; releasing > follower; error (TimedOut); released");
}

#[test]
fn d07_after_step_down_the_others_have_their_turn() {
    let config = ElectionConfig { cool_down: secs(30), ..plain() };
    let mut trial = Trial::at(ElectionState::Releasing, config);
    trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    assert_eq!(trial.wait(secs(29)), "");
    assert_eq!(
        trial.feed(ElectionInput::AcquireAttempt),
        "",
        "not even if the store reports that the key is free"
    );
    assert_eq!(trial.wait(secs(1)), "[claim 2]; follower > acquiring");
}

#[test]
fn d08_pauses_come_from_the_strategy_after_every_error() {
    use crate::retry::ExponentialBackoff;
    let retry = ExponentialBackoff { jitter: 0.0, ..ExponentialBackoff::default() };
    let mut trial = Trial::with_retry(plain(), retry);
    trial.bring_to(ElectionState::Acquiring);
    for pause in [1, 2, 4, 8, 16, 30, 30] {
        trial.feed(ElectionInput::StoreError { claim: None, failure: broken("refused") });
        assert_eq!(trial.election.state(), ElectionState::Follower);
        assert_eq!(trial.election.poll_timeout(), Some(trial.now + secs(pause)));
        trial.wait(secs(pause));
    }
    trial.grant(1);
    trial.feed(ElectionInput::StoreError { claim: None, failure: broken("refused") });
    assert_eq!(
        trial.election.poll_timeout(),
        Some(trial.now + secs(1)),
        "a grant resets the strategy"
    );
}

#[test]
fn d08_jitter_is_decided_by_the_seed() {
    use crate::retry::ExponentialBackoff;
    let mut trial = Trial::with_retry(plain(), ExponentialBackoff::default());
    trial.bring_to(ElectionState::Acquiring);
    let claim = trial.claim();
    trial.election.random = Random::new(7);
    trial.election.handle(ElectionInput::AcquireFailed { claim }, trial.now);
    let pause = secs(1).mul_f64(1.0 - 0.1 * Random::new(7).unit());
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + pause));
}

#[test]
fn d08_attempts_saturate() {
    use crate::retry::ExponentialBackoff;
    let retry = ExponentialBackoff { jitter: 0.0, ..ExponentialBackoff::default() };
    let mut trial = Trial::with_retry(plain(), retry);
    trial.bring_to(ElectionState::Acquiring);
    trial.election.attempt = u32::MAX - 1;
    for _ in 0..3 {
        let output = trial.feed(ElectionInput::AcquireFailed { claim: trial.claim() });
        assert_eq!(output, "acquiring > follower; failed 4294967295, again in 30s");
        trial.wait(secs(30));
    }
}

#[test]
fn d08_ten_thousand_retries_stay_within_bounds_and_apart() {
    use crate::retry::{DecorrelatedJitter, ExponentialBackoff};
    const RETRIES: usize = 10_000;
    /// Times of a follower's claims, in a history in which another participant always leads.
    fn claims(retry: impl Retry + 'static, seed: u64) -> Vec<Time> {
        let mut trial = Trial::with_retry(plain(), retry);
        trial.election.random = Random::new(seed);
        trial.bring_to(ElectionState::Acquiring);
        let mut claims = vec![trial.now];
        while claims.len() <= RETRIES {
            let claim = trial.claim();
            trial.election.handle(ElectionInput::AcquireFailed { claim }, trial.now);
            assert_eq!(trial.election.attempt as usize, claims.len(), "each attempt counts once");
            trial.now = trial.election.poll_timeout().expect("a follower always tries again");
            trial.election.handle_timeout(trial.now);
            assert_eq!(trial.election.state(), ElectionState::Acquiring);
            trial.outputs();
            claims.push(trial.now);
        }
        claims
    }
    fn pauses(claims: &[Time]) -> Vec<Duration> {
        claims.windows(2).map(|pair| pair[1].since(pair[0])).collect()
    }
    let backoff = ExponentialBackoff::default();
    let (one, two) = (claims(backoff, 1), claims(backoff, 2));
    for pauses in [pauses(&one), pauses(&two)] {
        assert!((Duration::from_millis(900)..=secs(1)).contains(&pauses[0]), "{:?}", pauses[0]);
        assert!(pauses[5..].iter().all(|pause| (secs(27)..=secs(30)).contains(pause)));
        let different: std::collections::BTreeSet<_> = pauses.iter().collect();
        assert!(different.len() > RETRIES * 9 / 10, "jittered: {}", different.len());
    }
    let together = one.iter().zip(&two).skip(1).filter(|(one, two)| one == two).count();
    assert_eq!(together, 0, "two that began at the same time never retry at the same time");
    let jitter = pauses(&claims(DecorrelatedJitter::default(), 3));
    assert!(jitter.iter().all(|pause| (secs(1)..=secs(30)).contains(pause)));
}

#[test]
fn d08_a_permanent_error_stops_with_that_error() {
    let failure = permanent("no such database");
    for state in [
        ElectionState::Follower,
        ElectionState::Acquiring,
        ElectionState::Leader,
        ElectionState::Reconnecting,
    ] {
        let mut trial = Trial::at(state, graceful());
        let output =
            trial.feed(ElectionInput::StoreError { claim: None, failure: failure.clone() });
        assert!(output.ends_with("stopped (no such database)"), "{output}");
        assert_eq!(output.contains("; lost ("), state >= ElectionState::Leader, "{output}");
        assert_eq!(trial.election.poll_timeout(), None, "no further attempt");
    }
    let mut trial = Trial::at(ElectionState::Releasing, plain());
    let output = trial.feed(ElectionInput::StoreError { claim: None, failure });
    assert!(output.ends_with("released; stopped (no such database)"), "{output}");
}

#[test]
fn d09_two_starts_are_one() {
    let mut trial = Trial::at(ElectionState::Follower, plain());
    assert_eq!(trial.feed(ElectionInput::Start), "");
    assert_eq!(trial.wait(Duration::ZERO), "[claim 1]; follower > acquiring");
    assert_eq!(trial.feed(ElectionInput::Start), "");
    trial.grant(1);
    assert_eq!(trial.feed(ElectionInput::Start), "");
}

#[test]
fn d09_shutdown_is_a_hard_bound_on_a_silent_link() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    assert_eq!(trial.wait(secs(5)), "[probe 1]", "the probe hangs");
    trial.feed(ElectionInput::StopRequested { timeout: Some(secs(1)) });
    let output = trial.wait(secs(1));
    assert_eq!(
        output,
        "[abort 1]; releasing > stopped; error (TimedOut); released; stopped (Requested)"
    );
}

#[test]
fn d10_a_strategy_that_answers_none_stops() {
    let mut trial = Trial::with_retry(plain(), GivesUp);
    trial.bring_to(ElectionState::Acquiring);
    let output = trial.feed(ElectionInput::AcquireFailed { claim: trial.claim() });
    assert_eq!(output, "[close]; acquiring > stopped; failed 1; stopped (GaveUp)");
}

#[test]
fn d10_a_strategy_that_answers_none_stops_after_the_loss() {
    let mut trial = Trial::with_retry(plain(), GivesUp);
    trial.bring_to(ElectionState::Leader);
    let output = trial.wait(LEASE);
    let end = "leader > stopped; error (Deadline); lost (Deadline); stopped (GaveUp)";
    assert!(output.ends_with(end), "{output}");

    let mut trial = Trial::with_retry(graceful(), GivesUp);
    trial.bring_to(ElectionState::Reconnecting);
    let output = trial.wait(secs(8));
    assert_eq!(output, "[abort 2]; reconnecting > stopped; lost (cut); stopped (GaveUp)");
}

#[test]
fn d10_a_stop_interrupts_every_wait() {
    for state in [ElectionState::Follower, ElectionState::Acquiring, ElectionState::Reconnecting] {
        let mut trial = Trial::at(state, graceful());
        let output = trial.feed(ElectionInput::StopRequested { timeout: None });
        assert!(output.ends_with("stopped (Requested)"), "{output}");
    }
    let mut trial = Trial::at(ElectionState::Releasing, plain());
    trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    let output = trial.feed(ElectionInput::StopRequested { timeout: None });
    assert!(output.ends_with("stopped (Requested)"), "also a cool-down: {output}");
}
