//! Cases beyond the list and the decisions: late answers, restarts, unclear errors and the order of timers.

use super::*;

#[test]
fn a_grant_that_overtakes_a_stop_is_given_back() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let (claim, grant) = (trial.claim(), trial.offer(1));
    trial.feed(ElectionInput::StopRequested { timeout: None });
    assert_eq!(trial.feed(ElectionInput::AcquireSucceeded { claim, grant }), "[release unused 1]");
    assert_eq!(trial.election.state(), ElectionState::Stopped);
    assert!(!trial.leads());
}

#[test]
fn a_grant_that_overtakes_a_step_down_is_given_back() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let (claim, grant) = (trial.claim(), trial.offer(1));
    let output = trial.feed(ElectionInput::ReleaseRequested { timeout: None });
    assert_eq!(output, "[abort 1]; acquiring > follower");
    assert_eq!(trial.feed(ElectionInput::AcquireSucceeded { claim, grant }), "[release unused 1]");
    assert_eq!(trial.wait(secs(4)), "", "the cool-down");
    assert_eq!(trial.wait(secs(1)), "[claim 2]; follower > acquiring");
}

#[test]
fn a_grant_that_misses_the_grace_window_is_given_back() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    let claim = trial.claim();
    trial.wait(secs(8));
    let grant = trial.offer(2);
    let late = ElectionInput::ReacquireSucceeded { claim, grant, another_held: false };
    assert_eq!(trial.feed(late), "[release unused 2]");
    assert_eq!(trial.election.state(), ElectionState::Follower);
}

#[test]
fn a_grant_of_an_earlier_claim_is_not_taken_for_the_current_one() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let (claim, grant) = (trial.claim(), trial.offer(1));
    trial.feed(ElectionInput::StoreError { claim: Some(claim), failure: unclear("no answer") });
    trial.wait(PAUSE);
    assert_eq!(trial.election.state(), ElectionState::Acquiring);
    assert_eq!(trial.feed(ElectionInput::AcquireSucceeded { claim, grant }), "[release unused 1]");
    assert!(!trial.leads());
    assert_eq!(trial.grant(2), "acquiring > leader; acquired 2");
}

#[test]
fn a_grant_told_twice_is_kept() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    assert_eq!(trial.grant(1), "");
    assert!(trial.leads());
}

#[test]
fn a_grant_past_its_deadline_is_given_back() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let (claim, grant) = (trial.claim(), trial.offer(1));
    trial.now = trial.now + LEASE;
    let output = trial.feed(ElectionInput::AcquireSucceeded { claim, grant });
    assert_eq!(output, "[release unused 1]; acquiring > follower; failed 1, again in 2s");

    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    let claim = trial.claim();
    let grant = ElectionGrant { deadline: trial.now, ..trial.offer(2) };
    let output =
        trial.feed(ElectionInput::ReacquireSucceeded { claim, grant, another_held: false });
    assert_eq!(output, "[release unused 2]");
    assert_eq!(trial.wait(PAUSE), "[reacquire 3]", "the window is still open");
}

#[test]
fn a_proof_of_an_earlier_hold_does_not_extend_this_one() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    let earlier = trial.claim();
    trial.feed(ElectionInput::StoreError { claim: Some(earlier), failure: broken("cut") });
    trial.wait(PAUSE);
    trial.grant(2);
    let deadline = trial.election.deadline();
    let late = ElectionInput::HealthOk { claim: earlier, deadline: trial.now + secs(500) };
    assert_eq!(trial.feed(late), "");
    assert_eq!(trial.election.deadline(), deadline);
    assert_eq!(
        trial.feed(ElectionInput::HealthFailed { claim: earlier, cause: Cause::NotHeld }),
        ""
    );
    let late = ElectionInput::StoreError { claim: Some(earlier), failure: permanent("late") };
    assert_eq!(trial.feed(late), "");
    assert!(trial.leads());
}

#[test]
fn a_shorter_deadline_does_not_take_back_what_was_proved() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    let before = trial.election.deadline();
    trial.feed(ElectionInput::HealthOk { claim: trial.claim(), deadline: trial.now + secs(1) });
    assert_eq!(trial.election.deadline(), before);
}

#[test]
fn an_unclear_error_leaves_the_deadline_and_asks_again() {
    let mut trial = Trial::at(ElectionState::Leader, graceful());
    trial.wait(secs(5));
    let claim = Some(trial.claim());
    let deadline = trial.election.deadline();
    let output = trial.feed(ElectionInput::StoreError { claim, failure: unclear("no answer") });
    assert_eq!(output, "error (no answer)");
    assert_eq!(trial.election.deadline(), deadline);
    assert_eq!(
        trial.wait(Duration::from_millis(1_250)),
        "[probe 1]",
        "a quarter of the remaining time"
    );
    assert!(trial.leads());
}

#[test]
fn unclear_errors_up_to_the_deadline_ask_a_bounded_number_of_times() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    let mut asked = 0;
    while let Some(due) = trial.election.poll_timeout() {
        trial.now = trial.now.max(due);
        trial.election.handle_timeout(trial.now);
        let output = trial.outputs();
        if output != "[probe 1]" {
            assert!(output.ends_with("lost (Deadline)"), "{output}");
            break;
        }
        asked += 1;
        let claim = Some(trial.claim());
        trial.feed(ElectionInput::StoreError { claim, failure: unclear("refused") });
    }
    assert!((4..40).contains(&asked), "{asked}");
}

#[test]
fn an_unclear_error_without_a_deadline_ends_the_hold() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    let grant = ElectionGrant { deadline: Time::MAX, ..trial.offer(1) };
    trial.feed(ElectionInput::AcquireSucceeded { claim: trial.claim(), grant });
    let output =
        trial.feed(ElectionInput::StoreError { claim: None, failure: unclear("no answer") });
    assert_eq!(output, "[abort 1]; leader > follower; error (no answer); lost (no answer)");
}

#[test]
fn a_deadline_that_passes_during_the_release_is_a_loss() {
    let config = ElectionConfig { step_down_timeout: secs(60), ..plain() };
    let mut trial = Trial::at(ElectionState::Releasing, config);
    let output = trial.wait(LEASE);
    assert_eq!(output, "[abort 1]; releasing > follower; error (Deadline); lost (Deadline)");
}

#[test]
fn a_check_answered_during_the_release_changes_nothing() {
    let mut trial = Trial::at(ElectionState::Releasing, plain());
    let claim = trial.claim();
    assert_eq!(trial.feed(ElectionInput::HealthOk { claim, deadline: trial.now + secs(500) }), "");
    assert!(!trial.leads());
}

#[test]
fn step_down_within_the_window_is_a_loss_and_cools_down() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    let output = trial.feed(ElectionInput::ReleaseRequested { timeout: None });
    assert_eq!(output, "[abort 2]; reconnecting > follower; lost (cut)");
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + secs(5)));
}

#[test]
fn step_down_of_a_follower_postpones_its_next_claim() {
    let mut trial = Trial::at(ElectionState::Follower, plain());
    assert_eq!(trial.feed(ElectionInput::ReleaseRequested { timeout: None }), "");
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + secs(5)));

    let config = ElectionConfig { cool_down: secs(1), ..plain() };
    let mut trial = Trial::at(ElectionState::Acquiring, config);
    trial.feed(ElectionInput::AcquireFailed { claim: trial.claim() });
    trial.feed(ElectionInput::ReleaseRequested { timeout: None });
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + PAUSE), "never brings it forward");
}

#[test]
fn a_pause_never_undercuts_a_cool_down() {
    let config = ElectionConfig { cool_down: secs(30), ..plain() };
    let mut trial = Trial::at(ElectionState::Follower, config);
    trial.feed(ElectionInput::ReleaseRequested { timeout: None });
    trial.feed(ElectionInput::StoreError { claim: None, failure: broken("reset") });
    assert_eq!(trial.election.poll_timeout(), Some(trial.now + secs(30)));
}

#[test]
fn word_from_the_store_cuts_a_pause_short() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    trial.feed(ElectionInput::AcquireFailed { claim: trial.claim() });
    trial.wait(secs(1));
    assert_eq!(trial.feed(ElectionInput::AcquireAttempt), "[claim 2]; follower > acquiring");
    assert_eq!(trial.wait(secs(60)), "", "the timer of the pause is gone");
}

#[test]
fn word_from_the_store_cuts_a_pause_within_the_window_short() {
    let mut trial = Trial::at(ElectionState::Reconnecting, graceful());
    let cause = Cause::Failed(broken("refused"));
    trial.feed(ElectionInput::ReacquireFailed { claim: trial.claim(), cause });
    assert_eq!(trial.feed(ElectionInput::AcquireAttempt), "[reacquire 3]");
    assert_eq!(trial.feed(ElectionInput::AcquireAttempt), "", "one claim at a time");
    let window = trial.now + secs(8);
    assert_eq!(trial.election.poll_timeout(), Some(window), "the timer of the pause is gone");
}

#[test]
fn a_stop_before_a_due_claim_sends_no_claim() {
    let mut trial = Trial::at(ElectionState::Follower, plain());
    let output = trial.feed(ElectionInput::StopRequested { timeout: None });
    assert!(!output.contains("claim"), "{output}");
}

#[test]
fn a_run_can_be_started_again_after_it_stopped() {
    let config = ElectionConfig { cool_down: secs(30), ..once(plain()) };
    let mut trial = Trial::at(ElectionState::Releasing, config);
    let old = trial.claim();
    trial.feed(ElectionInput::ReleaseSucceeded { claim: old });
    assert_eq!(trial.feed(ElectionInput::Start), "stopped > follower");
    assert_eq!(trial.wait(Duration::ZERO), "[claim 2]; follower > acquiring");
    let grant = trial.offer(1);
    assert_eq!(
        trial.feed(ElectionInput::AcquireSucceeded { claim: old, grant }),
        "[release unused 1]"
    );
    assert_eq!(trial.grant(2), "acquiring > leader; acquired 2");
}

#[test]
fn a_restart_forgets_the_failures_and_the_shutdown_of_the_run_before() {
    let mut trial = Trial::at(ElectionState::Acquiring, plain());
    trial.feed(ElectionInput::AcquireFailed { claim: trial.claim() });
    trial.wait(PAUSE);
    trial.grant(1);
    trial.feed(ElectionInput::StopRequested { timeout: None });
    trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    trial.bring_to(ElectionState::Acquiring);
    let output = trial.feed(ElectionInput::AcquireFailed { claim: trial.claim() });
    assert_eq!(output, "acquiring > follower; failed 1, again in 2s");
    trial.wait(PAUSE);
    trial.grant(2);
    trial.feed(ElectionInput::ReleaseRequested { timeout: None });
    let output = trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    assert_eq!(output, "releasing > follower; released");
}

#[test]
fn a_start_during_the_last_release_is_not_kept_for_later() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    trial.feed(ElectionInput::StopRequested { timeout: None });
    assert_eq!(trial.feed(ElectionInput::Start), "");
    trial.feed(ElectionInput::ReleaseSucceeded { claim: trial.claim() });
    assert_eq!(trial.election.state(), ElectionState::Stopped);
    assert_eq!(trial.election.poll_timeout(), None);
}

#[test]
fn after_a_suspension_the_deadline_speaks_first() {
    let mut trial = Trial::at(ElectionState::Leader, plain());
    trial.now = trial.now + secs(3_600);
    trial.election.handle_timeout(trial.now);
    let output = trial.outputs();
    assert_eq!(output, "[abort 1]; leader > follower; error (Deadline); lost (Deadline)");
}

#[test]
fn the_strategy_sees_attempt_elapsed_time_and_error() {
    #[derive(Debug, Default)]
    struct Curious;

    impl Retry for Curious {
        fn next_delay(&mut self, context: &RetryContext<'_>, _random: f64) -> Option<Duration> {
            let error = context.last_error.map(ToString::to_string);
            match context.attempt {
                1 => assert_eq!((context.elapsed, error), (Duration::ZERO, None)),
                _ => assert_eq!((context.elapsed, error.as_deref()), (secs(3), Some("late"))),
            }
            Some(secs(3))
        }

        fn reset(&mut self) {}
    }

    let mut trial = Trial::with_retry(plain(), Curious);
    trial.bring_to(ElectionState::Acquiring);
    trial.feed(ElectionInput::AcquireFailed { claim: trial.claim() });
    trial.wait(secs(3));
    let output = trial.feed(ElectionInput::StoreError { claim: None, failure: broken("late") });
    assert!(output.contains("error (late)"), "{output}");
}

#[test]
fn times_past_the_end_of_time_are_never() {
    let config = ElectionConfig {
        health_interval: Duration::MAX,
        reconnect_grace: Some(Duration::MAX),
        cool_down: Duration::MAX,
        step_down_timeout: Duration::MAX,
        shutdown_timeout: Duration::MAX,
        ..plain()
    };
    for state in ElectionState::ALL {
        let mut trial = Trial::at(state, config);
        trial.wait(secs(3_600));
    }
}
