use super::*;
use crate::lease::LeaseTerms;

/// A ttl of 6 s: margin 1 s, renewal every 2 s, requests within 1.5 s.
const TTL: Duration = Duration::from_secs(6);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn limit(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn lease() -> Lease {
    Lease::new(LeaseTerms::new(TTL)).unwrap()
}

fn granted() -> Granted {
    Granted { sent: at(0), deadline: at(5_000), handoff_requested: false }
}

fn keeper() -> Keeper {
    Keeper::new(lease(), granted(), None, at(10))
}

fn commands(keeper: &mut Keeper) -> Vec<KeeperCommand> {
    std::iter::from_fn(|| keeper.poll_command()).collect()
}

/// Advances to the keeper's next timer.
fn step(keeper: &mut Keeper) -> (Time, Vec<KeeperCommand>) {
    let now = keeper.poll_timeout().expect("the keeper has a timer");
    keeper.handle_timeout(now);
    (now, commands(keeper))
}

fn feed(keeper: &mut Keeper, input: KeeperInput, now: Time) -> Vec<KeeperCommand> {
    keeper.handle(input, now);
    commands(keeper)
}

const RENEWED: KeeperInput = KeeperInput::Renewed { handoff_requested: false };
const RENEW: KeeperCommand = KeeperCommand::Renew { limit: Duration::from_millis(1_500) };
const RELEASE: KeeperCommand = KeeperCommand::Release { limit: Duration::from_millis(1_500) };

#[test]
fn renews_every_third_and_counts_from_the_request() {
    let mut keeper = keeper();
    assert_eq!(step(&mut keeper), (at(2_000), vec![RENEW]));
    assert_eq!(feed(&mut keeper, RENEWED, at(2_900)), []);
    assert_eq!(keeper.deadline(), at(7_000), "2 s + 6 s - 1 s, not from the reply at 2.9 s");
    assert_eq!(step(&mut keeper), (at(4_000), vec![RENEW]));
}

#[test]
fn a_renewal_without_a_clear_answer_moves_nothing_and_is_tried_again() {
    let mut keeper = keeper();
    step(&mut keeper);
    assert_eq!(feed(&mut keeper, KeeperInput::RenewFailed, at(3_500)), []);
    assert_eq!(keeper.deadline(), at(5_000));
    assert_eq!(step(&mut keeper), (at(3_750), vec![KeeperCommand::Renew { limit: limit(1_250) }]));
    assert_eq!(feed(&mut keeper, RENEWED, at(3_800)), []);
    assert_eq!(keeper.deadline(), at(8_750));
}

#[test]
fn lost_comes_at_the_deadline_while_a_renewal_hangs_and_what_landed_is_given_back() {
    let mut keeper = keeper();
    step(&mut keeper);
    assert_eq!(step(&mut keeper), (at(5_000), vec![KeeperCommand::Lost(Loss::Expired)]));
    assert_eq!(keeper.poll_timeout(), None, "waits for the renewal in flight");
    assert_eq!(feed(&mut keeper, RENEWED, at(5_400)), [RELEASE]);
    assert_eq!(keeper.deadline(), at(5_000), "a lost hold is not restored");
    let done = KeeperCommand::Done(HoldEnd::Lost(Loss::Expired));
    assert_eq!(feed(&mut keeper, KeeperInput::Released, at(5_500)), [done]);
}

#[test]
fn a_reply_that_is_seen_after_the_deadline_does_not_revive_the_hold() {
    let mut keeper = keeper();
    step(&mut keeper);
    let seen = feed(&mut keeper, RENEWED, at(5_000));
    assert_eq!(seen, [KeeperCommand::Lost(Loss::Expired), RELEASE]);
}

#[test]
fn a_refusal_is_loss_at_once() {
    let mut keeper = keeper();
    step(&mut keeper);
    let end = [KeeperCommand::Lost(Loss::Taken), KeeperCommand::Done(HoldEnd::Lost(Loss::Taken))];
    assert_eq!(feed(&mut keeper, KeeperInput::Refused, at(2_100)), end);
    assert_eq!(keeper.poll_timeout(), None);
}

#[test]
fn a_broken_connection_is_loss_at_once() {
    let mut keeper = keeper();
    let seen = feed(&mut keeper, KeeperInput::HoldEnded(Loss::Disconnected), at(300));
    let gone = Loss::Disconnected;
    assert_eq!(seen, [KeeperCommand::Lost(gone), KeeperCommand::Done(HoldEnd::Lost(gone))]);
}

#[test]
fn a_release_waits_for_the_renewal_under_way() {
    let mut keeper = keeper();
    step(&mut keeper);
    assert_eq!(feed(&mut keeper, KeeperInput::Release, at(2_100)), []);
    assert_eq!(feed(&mut keeper, RENEWED, at(2_200)), [RELEASE]);
    let done = KeeperCommand::Done(HoldEnd::Released);
    assert_eq!(feed(&mut keeper, KeeperInput::Released, at(2_300)), [done]);
}

#[test]
fn an_unclear_release_is_repeated_and_a_refusal_after_it_means_released() {
    let mut keeper = keeper();
    assert_eq!(feed(&mut keeper, KeeperInput::Release, at(100)), [RELEASE]);
    assert_eq!(feed(&mut keeper, KeeperInput::ReleaseFailed, at(1_600)), []);
    assert_eq!(step(&mut keeper), (at(1_850), vec![RELEASE]));
    assert_eq!(
        feed(&mut keeper, KeeperInput::Refused, at(1_900)),
        [KeeperCommand::Done(HoldEnd::Released)]
    );
}

#[test]
fn news_of_the_end_after_an_unclear_release_means_released() {
    for loss in [Loss::Taken, Loss::Disconnected, Loss::Expired] {
        let mut keeper = keeper();
        feed(&mut keeper, KeeperInput::Release, at(100));
        feed(&mut keeper, KeeperInput::ReleaseFailed, at(1_600));
        let seen = feed(&mut keeper, KeeperInput::HoldEnded(loss), at(1_700));
        assert_eq!(seen, [KeeperCommand::Done(HoldEnd::Released)], "{loss:?}");
    }
}

#[test]
fn a_release_that_is_refused_at_first_tells_of_the_loss() {
    let mut keeper = keeper();
    feed(&mut keeper, KeeperInput::Release, at(100));
    let done = KeeperCommand::Done(HoldEnd::Lost(Loss::Taken));
    assert_eq!(feed(&mut keeper, KeeperInput::Refused, at(150)), [done]);
}

#[test]
fn a_release_that_is_never_answered_ends_with_the_lease() {
    let mut keeper = keeper();
    assert_eq!(feed(&mut keeper, KeeperInput::Release, at(100)), [RELEASE]);
    let mut now = at(100);
    let mut tries = 1;
    let end = loop {
        now = now + limit(1_500);
        keeper.handle(KeeperInput::ReleaseFailed, now);
        match keeper.poll_command() {
            Some(KeeperCommand::Done(end)) => break end,
            other => assert_eq!(other, None),
        }
        now = step(&mut keeper).0;
        tries += 1;
    };
    assert_eq!(end, HoldEnd::Unknown { until: at(8_500) });
    assert_eq!(tries, 5);
}

#[test]
fn a_waiter_is_told_once_from_whatever_source() {
    let mut keeper = keeper();
    assert_eq!(
        feed(&mut keeper, KeeperInput::HandoffRequested, at(100)),
        [KeeperCommand::HandoffRequested]
    );
    assert_eq!(feed(&mut keeper, KeeperInput::HandoffRequested, at(200)), []);
    step(&mut keeper);
    assert_eq!(feed(&mut keeper, KeeperInput::Renewed { handoff_requested: true }, at(2_100)), []);
    let crowded = Granted { handoff_requested: true, ..granted() };
    let mut keeper = Keeper::new(lease(), crowded, None, at(10));
    assert_eq!(commands(&mut keeper), [KeeperCommand::HandoffRequested]);
}

#[test]
fn looks_for_waiters_where_the_store_cannot_push_and_stops_when_one_is_seen() {
    let look = KeeperCommand::CheckHandoff { limit: limit(500) };
    let mut keeper = Keeper::new(lease(), granted(), Some(limit(500)), at(0));
    assert_eq!(step(&mut keeper), (at(500), vec![look]));
    assert_eq!(feed(&mut keeper, KeeperInput::HandoffCheckFailed, at(600)), []);
    assert_eq!(step(&mut keeper), (at(1_100), vec![look]));
    assert_eq!(
        feed(&mut keeper, KeeperInput::HandoffChecked { handoff_requested: true }, at(1_200)),
        [KeeperCommand::HandoffRequested]
    );
    assert_eq!(keeper.poll_timeout(), Some(at(2_000)));
}

#[test]
fn max_hold_ends_the_best_kept_hold() {
    let terms = LeaseTerms { max_hold: Some(limit(3_000)), ..LeaseTerms::new(TTL) };
    let mut keeper = Keeper::new(Lease::new(terms).unwrap(), granted(), None, at(0));
    assert_eq!(keeper.deadline(), at(3_000));
    step(&mut keeper);
    feed(&mut keeper, RENEWED, at(2_010));
    assert_eq!(step(&mut keeper), (at(3_000), vec![KeeperCommand::Lost(Loss::MaxHold), RELEASE]));
}

#[test]
fn without_keep_alive_nothing_is_renewed() {
    let terms = LeaseTerms { keep_alive: None, ..LeaseTerms::new(TTL) };
    let mut keeper = Keeper::new(Lease::new(terms).unwrap(), granted(), None, at(0));
    assert_eq!(step(&mut keeper), (at(5_000), vec![KeeperCommand::Lost(Loss::Expired), RELEASE]));
}

#[test]
fn a_hold_without_a_lease_is_probed_and_has_no_deadline() {
    let forever = Granted { deadline: Time::MAX, ..granted() };
    let mut keeper = Keeper::new(lease(), forever, None, at(0));
    assert_eq!(step(&mut keeper), (at(2_000), vec![RENEW]));
    feed(&mut keeper, RENEWED, at(2_010));
    assert_eq!(keeper.deadline(), Time::MAX);
    assert_eq!(step(&mut keeper).0, at(4_000));
}

#[test]
fn a_forgotten_hold_is_left_alone() {
    let mut keeper = keeper();
    step(&mut keeper);
    assert_eq!(feed(&mut keeper, KeeperInput::Detach, at(2_100)), []);
    assert_eq!(feed(&mut keeper, RENEWED, at(2_200)), [KeeperCommand::Done(HoldEnd::Detached)]);
    assert_eq!(keeper.poll_timeout(), None);
}
