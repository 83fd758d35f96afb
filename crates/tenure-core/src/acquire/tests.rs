use super::*;
use crate::Rules;
use crate::lease::LeaseTerms;
use crate::retry::FixedInterval;

/// A ttl of 6 s: margin 1 s, requests within 1.5 s, 250 ms between attempts to settle.
const TTL: Duration = Duration::from_secs(6);
const LIMIT: Duration = Duration::from_millis(1_500);

const CLAIM: AcquireCommand = AcquireCommand::Claim { limit: LIMIT, queue: true };
const TRY: AcquireCommand = AcquireCommand::Claim { limit: LIMIT, queue: false };
const CONFIRM: AcquireCommand = AcquireCommand::Confirm { limit: LIMIT };
const RELEASE: AcquireCommand = AcquireCommand::Release { limit: LIMIT };
const ABANDON: AcquireCommand = AcquireCommand::Abandon { limit: LIMIT };
const CONTENDED: AcquireInput = AcquireInput::Contended { retry_after: None };
const UNANSWERED: AcquireInput = AcquireInput::Failed(RequestFailure::Unknown);
const DOWN: AcquireInput = AcquireInput::Failed(RequestFailure::Transient);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn lease() -> Lease {
    Lease::new(LeaseTerms::new(TTL)).unwrap()
}

fn terms() -> AcquireOptions {
    AcquireOptions {
        lease: lease(),
        try_once: false,
        until: None,
        retry: Box::new(FixedInterval { interval: Duration::from_millis(200) }),
        fallback_interval: None,
        seed: 1,
    }
}

fn patient(ms: u64) -> AcquireOptions {
    AcquireOptions { until: Some(at(ms)), ..terms() }
}

/// Starts at time 0 and removes the first claim.
fn start(terms: AcquireOptions) -> Acquire {
    let mut acquire = Acquire::new(terms, at(0));
    assert!(matches!(acquire.poll_command(), Some(AcquireCommand::Claim { .. })));
    acquire
}

fn commands(acquire: &mut Acquire) -> Vec<AcquireCommand> {
    std::iter::from_fn(|| acquire.poll_command()).collect()
}

fn feed(acquire: &mut Acquire, input: AcquireInput, now: Time) -> Vec<AcquireCommand> {
    acquire.handle(input, now);
    commands(acquire)
}

fn step(acquire: &mut Acquire) -> (Time, Vec<AcquireCommand>) {
    let now = acquire.poll_timeout().expect("the machine has a timer");
    acquire.handle_timeout(now);
    (now, commands(acquire))
}

fn ends(answer: AcquireAnswer) -> Vec<AcquireCommand> {
    vec![AcquireCommand::Answer(answer), AcquireCommand::Finish]
}

fn acquired(sent: u64) -> Vec<AcquireCommand> {
    ends(AcquireAnswer::Acquired { sent: at(sent), deadline: at(sent + 5_000) })
}

#[test]
fn a_free_lock_is_granted_by_one_request_and_counts_from_it() {
    let mut acquire = start(terms());
    assert_eq!(
        feed(&mut acquire, AcquireInput::Granted(LeaseStart::FromRequest), at(700)),
        acquired(0)
    );
}

#[test]
fn a_session_store_grants_without_a_deadline() {
    let mut acquire = start(terms());
    let seen = feed(&mut acquire, AcquireInput::Granted(LeaseStart::NoLease), at(10));
    assert_eq!(seen, ends(AcquireAnswer::Acquired { sent: at(0), deadline: Time::MAX }));
}

#[test]
fn a_grant_out_of_a_wait_counts_from_its_confirmation() {
    let mut acquire = start(terms());
    let wait = AcquireCommand::Wait { limit: Duration::from_secs(30) };
    assert_eq!(feed(&mut acquire, AcquireInput::Queued, at(10)), [wait]);
    assert_eq!(feed(&mut acquire, AcquireInput::StillQueued, at(30_010)), [wait]);
    assert_eq!(
        feed(&mut acquire, AcquireInput::Granted(LeaseStart::FromRequest), at(40_000)),
        [CONFIRM]
    );
    assert_eq!(feed(&mut acquire, AcquireInput::Confirmed, at(40_300)), acquired(40_000));
}

#[test]
fn a_grant_out_of_a_wait_that_says_since_when_counts_from_then() {
    let queued = || {
        let mut acquire = start(terms());
        feed(&mut acquire, AcquireInput::Queued, at(10));
        acquire
    };
    let since = AcquireInput::Granted(LeaseStart::Since(at(4_000)));
    assert_eq!(feed(&mut queued(), since, at(4_200)), acquired(4_000));
    assert_eq!(feed(&mut queued(), since, at(9_000)), [RELEASE], "past its own deadline");
    let mut gone = queued();
    gone.handle(AcquireInput::Cancel, at(4_100));
    assert_eq!(commands(&mut gone), [ABANDON]);
}

#[test]
fn a_confirmation_without_a_clear_answer_is_repeated() {
    let mut acquire = start(terms());
    assert_eq!(
        feed(&mut acquire, AcquireInput::Granted(LeaseStart::FromConfirm), at(100)),
        [CONFIRM]
    );
    assert_eq!(feed(&mut acquire, UNANSWERED, at(1_600)), []);
    assert_eq!(step(&mut acquire), (at(1_850), vec![CONFIRM]));
    assert_eq!(feed(&mut acquire, AcquireInput::Confirmed, at(1_900)), acquired(1_850));
}

#[test]
fn a_grant_that_was_gone_before_its_confirmation_is_claimed_again() {
    let mut acquire = start(terms());
    feed(&mut acquire, AcquireInput::Granted(LeaseStart::FromConfirm), at(100));
    assert_eq!(feed(&mut acquire, AcquireInput::Refused, at(200)), [AcquireCommand::Watch]);
    assert_eq!(step(&mut acquire), (at(400), vec![CLAIM]));
}

#[test]
fn a_grant_past_its_own_deadline_is_released_not_returned() {
    let mut acquire = start(terms());
    assert_eq!(
        feed(&mut acquire, AcquireInput::Granted(LeaseStart::FromRequest), at(5_000)),
        [RELEASE]
    );
    assert_eq!(feed(&mut acquire, AcquireInput::Released, at(5_010)), [AcquireCommand::Watch]);
    assert_eq!(step(&mut acquire), (at(5_210), vec![CLAIM]));
}

#[test]
fn a_try_claims_once_without_a_place() {
    let once = || AcquireOptions { try_once: true, ..terms() };
    let mut acquire = Acquire::new(once(), at(0));
    assert_eq!(commands(&mut acquire), [TRY]);
    assert_eq!(feed(&mut acquire, CONTENDED, at(10)), ends(AcquireAnswer::Contended));
    let mut acquire = start(once());
    assert_eq!(feed(&mut acquire, DOWN, at(10)), ends(AcquireAnswer::Failed));
    let mut acquire = start(once());
    assert_eq!(feed(&mut acquire, AcquireInput::Queued, at(10)), [ABANDON]);
    assert_eq!(feed(&mut acquire, AcquireInput::Released, at(20)), ends(AcquireAnswer::Contended));
}

#[test]
fn a_busy_key_is_claimed_again_after_the_pause_or_at_once_when_it_changes() {
    let mut acquire = start(patient(10_000));
    assert_eq!(feed(&mut acquire, CONTENDED, at(10)), [AcquireCommand::Watch]);
    assert_eq!(step(&mut acquire), (at(210), vec![CLAIM]));
    let slower = AcquireInput::Contended { retry_after: Some(Duration::from_secs(1)) };
    assert_eq!(feed(&mut acquire, slower, at(220)), [AcquireCommand::Watch]);
    assert_eq!(acquire.poll_timeout(), Some(at(1_220)));
    assert_eq!(feed(&mut acquire, AcquireInput::Changed, at(300)), [CLAIM]);
}

#[test]
fn a_pause_of_nothing_is_no_pause() {
    let retry = Box::new(FixedInterval { interval: Duration::ZERO });
    let mut acquire = start(AcquireOptions { retry, ..terms() });
    assert_eq!(feed(&mut acquire, CONTENDED, at(10)), [CLAIM]);
    let mut acquire = start(patient(10));
    assert_eq!(feed(&mut acquire, AcquireInput::Queued, at(9)).len(), 1);
    assert_eq!(feed(&mut acquire, AcquireInput::StillQueued, at(10)), [ABANDON]);
}

#[test]
fn a_store_that_pushes_is_asked_again_only_at_the_backstop() {
    let backstop = Some(Duration::from_secs(1));
    let mut acquire = start(AcquireOptions { fallback_interval: backstop, ..terms() });
    feed(&mut acquire, CONTENDED, at(0));
    let (next, claim) = step(&mut acquire);
    assert!((at(750)..=at(1_250)).contains(&next), "{next:?}");
    assert_eq!(claim, [CLAIM]);
}

#[test]
fn time_running_out_while_waiting_gives_the_place_up_first() {
    let mut acquire = start(patient(1_000));
    let wait = AcquireCommand::Wait { limit: Duration::from_millis(990) };
    assert_eq!(feed(&mut acquire, AcquireInput::Queued, at(10)), [wait]);
    assert_eq!(step(&mut acquire), (at(1_000), vec![ABANDON]));
    assert_eq!(
        feed(&mut acquire, AcquireInput::Released, at(1_005)),
        ends(AcquireAnswer::TimedOut)
    );
}

#[test]
fn time_running_out_between_claims_is_a_plain_timeout() {
    let mut acquire = start(patient(150));
    feed(&mut acquire, CONTENDED, at(10));
    assert_eq!(step(&mut acquire), (at(150), ends(AcquireAnswer::TimedOut)));
}

#[test]
fn a_clear_answer_shortly_after_the_timeout_still_counts() {
    let mut acquire = start(patient(100));
    acquire.handle_timeout(at(100));
    assert_eq!(commands(&mut acquire), []);
    let mut late = start(patient(100));
    assert_eq!(
        feed(&mut late, AcquireInput::Granted(LeaseStart::FromRequest), at(130)),
        acquired(0)
    );
    assert_eq!(feed(&mut acquire, AcquireInput::Queued, at(130)), [ABANDON]);
    assert_eq!(feed(&mut acquire, AcquireInput::Released, at(140)), ends(AcquireAnswer::TimedOut));
}

#[test]
fn a_claim_of_unknown_outcome_is_repeated_and_what_it_got_is_confirmed() {
    let mut acquire = start(patient(20_000));
    assert_eq!(feed(&mut acquire, UNANSWERED, at(1_500)), []);
    assert_eq!(step(&mut acquire), (at(1_750), vec![CLAIM]));
    let seen = feed(&mut acquire, AcquireInput::Granted(LeaseStart::FromRequest), at(1_800));
    assert_eq!(seen, [CONFIRM], "the lease may have begun with the first attempt");
    assert_eq!(feed(&mut acquire, AcquireInput::Confirmed, at(1_850)), acquired(1_800));
}

#[test]
fn a_caller_whose_time_is_up_learns_that_the_outcome_is_unknown_and_what_landed_is_given_back() {
    let mut acquire = start(patient(500));
    let unknown = AcquireCommand::Answer(AcquireAnswer::Unknown { until: at(17_000) });
    assert_eq!(step(&mut acquire), (at(1_500), vec![unknown]));
    assert_eq!(feed(&mut acquire, UNANSWERED, at(1_500)), []);
    assert_eq!(step(&mut acquire), (at(1_750), vec![TRY]));
    assert_eq!(feed(&mut acquire, CONTENDED, at(1_800)), [AcquireCommand::Finish]);

    let mut acquire = start(patient(500));
    feed(&mut acquire, UNANSWERED, at(400));
    assert_eq!(
        step(&mut acquire),
        (at(650), vec![TRY]),
        "no new place after the caller's time limit"
    );
    let unknown = AcquireCommand::Answer(AcquireAnswer::Unknown { until: at(17_000) });
    assert_eq!(step(&mut acquire), (at(1_500), vec![unknown]));
    assert_eq!(
        feed(&mut acquire, AcquireInput::Granted(LeaseStart::FromRequest), at(1_600)),
        [RELEASE]
    );
    assert_eq!(feed(&mut acquire, AcquireInput::Released, at(1_700)), [AcquireCommand::Finish]);
}

#[test]
fn finding_out_ends_when_the_store_has_let_go_by_itself() {
    let mut acquire = start(patient(500));
    feed(&mut acquire, UNANSWERED, at(400));
    let mut tries = Vec::new();
    let mut reported = Time::ZERO;
    let end = loop {
        let (now, asked) = step(&mut acquire);
        if asked == [TRY] {
            tries.push(now);
            acquire.handle(UNANSWERED, now + Duration::from_millis(10));
            if commands(&mut acquire) == [AcquireCommand::Finish] {
                break now;
            }
        } else if let [AcquireCommand::Answer(AcquireAnswer::Unknown { until })] = asked[..] {
            reported = until;
        }
    };
    assert!(
        lease().settled_at(end) <= reported,
        "the last attempt may be held longer than was reported"
    );
    let last_for_the_caller = *tries.iter().rfind(|sent| **sent < at(1_500)).unwrap();
    let settled = lease().settled_at(last_for_the_caller);
    assert!(end < settled && end + Duration::from_millis(300) > settled, "{end:?} {settled:?}");
}

#[test]
fn an_unreachable_store_is_tried_again_until_the_caller_has_had_enough() {
    let mut acquire = start(patient(500));
    assert_eq!(feed(&mut acquire, DOWN, at(10)), [AcquireCommand::Watch]);
    assert!(acquire.is_failing());
    assert_eq!(step(&mut acquire), (at(210), vec![CLAIM]));
    feed(&mut acquire, DOWN, at(400));
    assert_eq!(step(&mut acquire), (at(500), ends(AcquireAnswer::TimedOut)));
}

#[test]
fn a_permanent_failure_ends_it() {
    let mut acquire = start(terms());
    let denied = AcquireInput::Failed(RequestFailure::Permanent);
    assert_eq!(feed(&mut acquire, denied, at(10)), ends(AcquireAnswer::Failed));
}

#[test]
fn a_permanent_failure_after_an_unheard_claim_is_no_plain_failure() {
    let mut acquire = start(terms());
    feed(&mut acquire, UNANSWERED, at(100));
    step(&mut acquire);
    feed(&mut acquire, AcquireInput::Failed(RequestFailure::Permanent), at(400));
    let (_, first) = step(&mut acquire);
    assert_eq!(first, [TRY]);
    let (now, answer) = step(&mut acquire);
    assert_eq!(now, at(1_400));
    assert!(
        matches!(answer[..], [AcquireCommand::Answer(AcquireAnswer::Unknown { .. })]),
        "{answer:?}"
    );
}

#[test]
fn a_strategy_that_gives_up_ends_it() {
    #[derive(Debug)]
    struct NeverRetries;
    impl Retry for NeverRetries {
        fn next_delay(&mut self, _: &RetryContext<'_>, _: f64) -> Option<Duration> {
            None
        }
        fn reset(&mut self) {}
    }
    let mut acquire = start(AcquireOptions { retry: Box::new(NeverRetries), ..terms() });
    assert_eq!(feed(&mut acquire, CONTENDED, at(10)), ends(AcquireAnswer::GaveUp));
    let mut acquire = start(AcquireOptions { retry: Box::new(NeverRetries), ..terms() });
    assert_eq!(feed(&mut acquire, DOWN, at(10)), ends(AcquireAnswer::Failed));
}

#[test]
fn the_strategy_is_shown_the_error() {
    #[derive(Debug)]
    struct UntilDenied;
    impl Retry for UntilDenied {
        fn next_delay(&mut self, context: &RetryContext<'_>, _: f64) -> Option<Duration> {
            let text = context.last_error?.to_string();
            (text != "denied").then_some(Duration::from_millis(1))
        }
        fn reset(&mut self) {}
    }
    let mut acquire = start(AcquireOptions { retry: Box::new(UntilDenied), ..terms() });
    acquire.handle_failure(RequestFailure::Transient, &std::io::Error::other("down"), at(1));
    assert_eq!(commands(&mut acquire), [AcquireCommand::Watch]);
    step(&mut acquire);
    acquire.handle_failure(RequestFailure::Transient, &std::io::Error::other("denied"), at(3));
    assert_eq!(commands(&mut acquire), ends(AcquireAnswer::Failed));
}

#[test]
fn cancelled_acquire_leaves_no_place_and_no_hold() {
    let gone = |inputs: &[AcquireInput]| {
        let mut acquire = start(terms());
        for input in inputs {
            acquire.handle(*input, at(10));
        }
        commands(&mut acquire);
        feed(&mut acquire, AcquireInput::Cancel, at(20))
    };
    assert_eq!(gone(&[AcquireInput::Queued]), [ABANDON]);
    assert_eq!(gone(&[CONTENDED]), [AcquireCommand::Finish]);
    assert_eq!(gone(&[]), [], "the claim is in flight");
    assert_eq!(gone(&[AcquireInput::Granted(LeaseStart::FromConfirm), UNANSWERED]), [RELEASE]);

    let mut acquire = start(terms());
    feed(&mut acquire, AcquireInput::Cancel, at(20));
    assert_eq!(
        feed(&mut acquire, AcquireInput::Granted(LeaseStart::FromRequest), at(30)),
        [RELEASE]
    );
    assert_eq!(feed(&mut acquire, AcquireInput::Released, at(40)), [AcquireCommand::Finish]);
}

#[test]
fn a_place_that_is_gone_or_unheard_of_is_claimed_again() {
    for (input, failing) in [(AcquireInput::PlaceLost, false), (UNANSWERED, true)] {
        let mut acquire = start(terms());
        feed(&mut acquire, AcquireInput::Queued, at(10));
        assert_eq!(feed(&mut acquire, input, at(20)), [AcquireCommand::Watch]);
        assert_eq!(acquire.is_failing(), failing);
        assert_eq!(step(&mut acquire), (at(220), vec![CLAIM]));
    }
}

#[test]
fn enqueued_claim_waits_without_timeout_until_a_deadline_is_set() {
    let mut acquire = start(terms());
    feed(&mut acquire, AcquireInput::Queued, at(10));
    assert_eq!(acquire.poll_timeout(), None);
    assert_eq!(feed(&mut acquire, AcquireInput::WaitUntil(Some(at(900))), at(100)), []);
    assert_eq!(step(&mut acquire), (at(900), vec![ABANDON]));
}

/// Random answers to every request, for many seeds: the caller gets one answer, no request is issued while one that
/// changes the store is in flight, and no grant is left behind.
#[test]
fn any_course_of_events_answers_once_and_leaves_nothing() {
    for seed in 0..20_000 {
        Course::new(seed).run();
    }
}

struct Course {
    seed: u64,
    random: Random,
    acquire: Acquire,
    now: Time,
    pending: Option<AcquireCommand>,
    answers: Vec<AcquireAnswer>,
    granted: bool,
    all_answered: bool,
    finished: bool,
}

impl Course {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let until = random.chance(0.7).then(|| at(random.below(20_000)));
        let terms = AcquireOptions {
            until,
            try_once: random.chance(0.2),
            fallback_interval: random.chance(0.5).then_some(Duration::from_secs(1)),
            seed,
            lease: lease().with_rules(Rules::ALL),
            ..terms()
        };
        let acquire = Acquire::new(terms, at(0));
        Self {
            seed,
            random,
            acquire,
            now: at(0),
            pending: None,
            answers: Vec::new(),
            granted: false,
            all_answered: true,
            finished: false,
        }
    }

    fn run(mut self) {
        for turn in 0..2_000 {
            self.take_commands();
            if self.finished {
                break;
            }
            // A caller without a timeout is cancelled at some point, or the run would not end.
            if turn > 40 && self.random.chance(0.2) {
                self.acquire.handle(AcquireInput::Cancel, self.now);
                continue;
            }
            self.advance();
        }
        assert!(self.finished, "seed {}: never finished", self.seed);
        assert!(self.answers.len() <= 1, "seed {}: {:?}", self.seed, self.answers);
        let acquired = matches!(self.answers[..], [AcquireAnswer::Acquired { .. }]);
        if self.all_answered {
            assert_eq!(self.granted, acquired, "seed {}: {:?}", self.seed, self.answers);
        }
    }

    fn take_commands(&mut self) {
        while let Some(command) = self.acquire.poll_command() {
            match command {
                AcquireCommand::Answer(answer) => self.answers.push(answer),
                AcquireCommand::Finish => self.finished = true,
                request => {
                    let cut = matches!(
                        self.pending,
                        None | Some(AcquireCommand::Wait { .. } | AcquireCommand::Watch)
                    );
                    assert!(cut, "seed {}: {request:?} during {:?}", self.seed, self.pending);
                    self.pending = Some(request);
                }
            }
        }
    }

    fn advance(&mut self) {
        let timer = self.acquire.poll_timeout();
        let reply = self.now + Duration::from_millis(self.random.below(2_000));
        let answered = self.pending.is_some_and(|pending| pending != AcquireCommand::Watch);
        match timer {
            Some(due) if !answered || due <= reply => {
                assert!(due >= self.now || answered, "seed {}: stuck at {due:?}", self.seed);
                self.now = due.max(self.now);
                self.acquire.handle_timeout(self.now);
            }
            _ if answered => {
                self.now = reply;
                let input = self.reply();
                self.pending = None;
                self.acquire.handle(input, self.now);
            }
            _ => self.acquire.handle(AcquireInput::Cancel, self.now),
        }
    }

    fn reply(&mut self) -> AcquireInput {
        let roll = self.random.below(10);
        let unanswered = roll == 0;
        self.all_answered &= !unanswered;
        match self.pending {
            _ if unanswered => UNANSWERED,
            Some(AcquireCommand::Claim { .. }) if self.granted => {
                AcquireInput::Granted(LeaseStart::FromRequest)
            }
            Some(AcquireCommand::Claim { .. }) => match roll {
                1..=3 => self.grant(LeaseStart::FromRequest),
                4 => self.grant(LeaseStart::FromConfirm),
                5 | 6 => AcquireInput::Queued,
                7 => DOWN,
                _ => CONTENDED,
            },
            Some(AcquireCommand::Wait { .. }) => match roll {
                1..=4 => self.grant(LeaseStart::FromConfirm),
                5 => AcquireInput::PlaceLost,
                _ => AcquireInput::StillQueued,
            },
            Some(AcquireCommand::Confirm { .. }) if roll > 2 => AcquireInput::Confirmed,
            Some(AcquireCommand::Confirm { .. }) => self.end(AcquireInput::Refused),
            Some(AcquireCommand::Release { .. } | AcquireCommand::Abandon { .. }) => {
                self.end(AcquireInput::Released)
            }
            other => unreachable!("{other:?}"),
        }
    }

    fn grant(&mut self, start: LeaseStart) -> AcquireInput {
        self.granted = true;
        AcquireInput::Granted(start)
    }

    fn end(&mut self, input: AcquireInput) -> AcquireInput {
        self.granted = false;
        input
    }
}

/// Found by the simulator: the claim had taken a place, which was granted after the caller got a plain failure.
#[test]
fn a_place_that_was_taken_unheard_is_not_settled_by_time() {
    let mut acquire = start(patient(20_000));
    assert_eq!(feed(&mut acquire, UNANSWERED, at(1_500)), []);
    assert_eq!(step(&mut acquire), (at(1_750), vec![CLAIM]));
    assert_eq!(
        feed(&mut acquire, DOWN, at(9_000)),
        [AcquireCommand::Watch],
        "a lease would be settled by now"
    );
    assert_eq!(step(&mut acquire), (at(9_200), vec![CLAIM]));
    assert_eq!(feed(&mut acquire, DOWN, at(20_000)), []);
    assert_eq!(step(&mut acquire), (at(20_250), vec![TRY]));
    let until = at(38_000);
    assert_eq!(
        step(&mut acquire),
        (at(21_000), vec![AcquireCommand::Answer(AcquireAnswer::Unknown { until })])
    );
    assert_eq!(feed(&mut acquire, AcquireInput::Queued, at(21_100)), [ABANDON]);
    assert_eq!(feed(&mut acquire, AcquireInput::Released, at(21_200)), [AcquireCommand::Finish]);
}

#[test]
fn a_try_whose_grant_is_not_confirmed_finds_the_key_contended() {
    for refused_at in [200, 2_000] {
        let mut acquire = start(AcquireOptions { try_once: true, ..terms() });
        let unconfirmed = AcquireInput::Granted(LeaseStart::FromConfirm);
        assert_eq!(feed(&mut acquire, unconfirmed, at(100)), [CONFIRM]);
        let answer = feed(&mut acquire, AcquireInput::Refused, at(refused_at));
        assert_eq!(answer, ends(AcquireAnswer::Contended), "refused after {refused_at} ms");
    }
}

/// The connection of a grant ended before it was confirmed. The store has kept the hold, and answers the repeated claim
/// with it.
#[test]
fn a_claim_that_was_granted_or_queued_before_is_confirmed() {
    let from_request = AcquireInput::Granted(LeaseStart::FromRequest);
    let unconfirmed = AcquireInput::Granted(LeaseStart::FromConfirm);
    for (before, refused) in
        [(unconfirmed, AcquireInput::Refused), (AcquireInput::Queued, AcquireInput::PlaceLost)]
    {
        let mut acquire = start(terms());
        assert_eq!(feed(&mut acquire, before, at(100)).len(), 1);
        assert_eq!(feed(&mut acquire, refused, at(200)), [AcquireCommand::Watch]);
        let (now, repeated) = step(&mut acquire);
        assert_eq!(repeated, [CLAIM], "{before:?}");
        assert_eq!(feed(&mut acquire, from_request, now), [CONFIRM], "{before:?}");
    }
    // Not so after a clear no.
    let mut acquire = start(terms());
    assert_eq!(feed(&mut acquire, CONTENDED, at(100)), [AcquireCommand::Watch]);
    let (now, _) = step(&mut acquire);
    assert!(matches!(feed(&mut acquire, from_request, now)[0], AcquireCommand::Answer(_)));
}

#[test]
fn a_try_takes_no_place_and_is_settled_by_time() {
    let mut acquire = start(AcquireOptions { try_once: true, ..terms() });
    assert_eq!(feed(&mut acquire, UNANSWERED, at(100)), []);
    assert_eq!(step(&mut acquire), (at(350), vec![TRY]));
    assert_eq!(feed(&mut acquire, DOWN, at(8_500)), ends(AcquireAnswer::Failed));
}

/// Found by the simulator: the place may be granted while the caller believes that nothing is held.
#[test]
fn a_wait_that_fails_for_good_gives_its_place_up_before_it_says_so() {
    let mut acquire = start(terms());
    feed(&mut acquire, AcquireInput::Queued, at(10));
    let denied = AcquireInput::Failed(RequestFailure::Permanent);
    assert_eq!(feed(&mut acquire, denied, at(20)), [ABANDON]);
    assert_eq!(feed(&mut acquire, AcquireInput::Released, at(30)), ends(AcquireAnswer::Failed));

    let mut acquire = start(terms());
    feed(&mut acquire, AcquireInput::Queued, at(10));
    feed(&mut acquire, denied, at(20));
    assert_eq!(feed(&mut acquire, UNANSWERED, at(30)), [], "the place may still exist");
    assert_eq!(step(&mut acquire), (at(280), vec![TRY]));
    assert_eq!(feed(&mut acquire, CONTENDED, at(300)), ends(AcquireAnswer::Failed));
}
