//! Decisions on a record, and take-over by observation.

use super::*;
use crate::record::WriteFate;

const LEASE: Duration = Duration::from_millis(600);

fn ask(claim: u128, mode: Mode) -> RecordClaim<'static, &'static str> {
    RecordClaim { id: claim, mode, lease: LEASE, by: &"me" }
}

fn no_holder(_: &RecordHolder<&'static str>) -> bool {
    false
}

fn granted(
    record: &CasRecord<&'static str>,
    claim: u128,
    mode: Mode,
    version: u64,
) -> CasRecord<&'static str> {
    match record.claim(&ask(claim, mode), version, no_holder) {
        RecordDecision::Write(next) => next,
        other => panic!("not granted: {other:?}"),
    }
}

fn renewal(attempted: u64) -> Renewal {
    Renewal { number: None, attempted, lease: LEASE, held_for: LEASE }
}

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

#[test]
fn a_free_key_is_granted_and_a_held_one_is_not() {
    let held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    assert_eq!(held.holders.len(), 1);
    let busy = held.claim(&ask(2, Mode::Exclusive), 5, no_holder);
    assert!(matches!(busy, RecordDecision::Contended(holder) if holder.claim == 1), "{busy:?}");
    let again = held.claim(&ask(1, Mode::Exclusive), 5, no_holder);
    assert!(
        matches!(again, RecordDecision::AlreadyGranted(_)),
        "the same claim is the same hold: {again:?}"
    );
}

#[test]
fn the_number_of_a_grant_is_the_version_it_was_written_as() {
    let held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    assert_eq!(held.holders[0].number(7), 7);
    let renewed = held.renew(1, 7, renewal(0)).expect("held");
    assert_eq!(renewed.holders[0].number(8), 7, "a renewal is not a grant");
    assert_eq!(renewed.holders[0].renewal_count, 1);
    let again = renewed.renew(1, 8, renewal(0)).expect("held");
    assert_eq!((again.holders[0].number(9), again.fence), (7, 7));
    let free = held.release(1, 7).expect("held");
    assert_eq!((free.fence, free.holders.len()), (7, 0), "a free record keeps the fence");
}

#[test]
fn renew_and_release_of_a_record_held_by_another_fail() {
    let held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    assert_eq!(held.renew(2, 7, renewal(0)), None);
    assert_eq!(held.release(2, 7), None);
}

#[test]
fn a_renewal_count_that_cannot_be_raised_ends_the_hold() {
    let mut held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    assert_eq!(held.renew(1, 7, renewal(u64::MAX)), None);
    held.holders[0].renewal_count = u64::MAX;
    assert_eq!(held.renew(1, 7, renewal(0)), None);
    assert!(held.release(1, 7).is_some());
}

#[test]
fn a_holder_that_is_over_is_taken_over_and_fenced() {
    let held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    let RecordDecision::Write(next) = held.claim(&ask(2, Mode::Exclusive), 7, |_| true) else {
        panic!("not granted")
    };
    assert_eq!(next.holders.iter().map(|holder| holder.claim).collect::<Vec<_>>(), [2]);
    assert_eq!(next.fence, 7);
}

#[test]
fn readers_share_and_writers_do_not() {
    let one = granted(&CasRecord::default(), 1, Mode::Shared, 0);
    let two = granted(&one, 2, Mode::Shared, 4);
    assert_eq!(two.holders.iter().map(|holder| holder.number(5)).collect::<Vec<_>>(), [4, 5]);
    assert!(matches!(
        two.claim(&ask(3, Mode::Exclusive), 5, no_holder),
        RecordDecision::Contended(_)
    ));
    let writer = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    assert!(matches!(
        writer.claim(&ask(3, Mode::Shared), 5, no_holder),
        RecordDecision::Contended(_)
    ));
}

#[test]
fn a_semaphore_has_its_slots_and_one_size() {
    let slot = Mode::Slot { limit: 2 };
    let two = granted(&granted(&CasRecord::default(), 1, slot, 0), 2, slot, 1);
    assert!(matches!(two.claim(&ask(3, slot), 2, no_holder), RecordDecision::Contended(_)));
    let other = two.claim(&ask(3, Mode::Slot { limit: 9 }), 2, no_holder);
    assert_eq!(other, RecordDecision::LimitMismatch(2));
    let one = two.release(1, 2).expect("held");
    assert!(matches!(one.claim(&ask(3, slot), 3, no_holder), RecordDecision::Write(_)));
    let free = one.release(2, 3).expect("held");
    assert!(matches!(
        free.claim(&ask(3, Mode::Slot { limit: 9 }), 4, no_holder),
        RecordDecision::Write(_)
    ));
}

#[test]
fn a_hold_is_over_when_its_beat_stood_still_for_lease_and_margin() {
    let held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    let mut watched = HolderObservations::default();
    watched.observe(&held, 1, at(0), at(10));
    assert!(!watched.may_take_over(1, at(709)) && watched.may_take_over(1, at(710)));
    let renewed = held.renew(1, 1, renewal(0)).expect("held");
    watched.observe(&renewed, 1, at(500), at(510));
    assert!(!watched.may_take_over(1, at(1_209)) && watched.may_take_over(1, at(1_210)));
    assert_eq!(watched.next_takeover(at(600)), at(1_210));
    assert!(!watched.may_take_over(2, at(9_999)), "a hold that was not seen cannot be taken over");
}

#[test]
fn one_of_several_holders_is_watched_by_itself() {
    let one = granted(&CasRecord::default(), 1, Mode::Shared, 0);
    let two = granted(&one, 2, Mode::Shared, 1);
    let mut watched = HolderObservations::default();
    watched.observe(&two, 1, at(0), at(0));
    // The second holder renews, which rewrites the record; the first is silent.
    watched.observe(&two.renew(2, 2, renewal(0)).expect("held"), 1, at(500), at(500));
    assert!(watched.may_take_over(1, at(700)) && !watched.may_take_over(2, at(700)));
}

#[test]
fn a_hold_without_a_lease_is_never_over() {
    let mut held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    held.holders[0].lease = None;
    let mut watched = HolderObservations::default();
    watched.observe(&held, 1, at(0), at(0));
    assert!(!watched.may_take_over(1, at(u32::MAX.into())));
}

#[test]
fn an_unwatched_record_is_abandoned_after_three_leases_and_30_seconds() {
    let moment = Duration::from_nanos(1);
    for (lease_ms, after_ms) in [(200, 30_600), (600, 31_800), (15_000, 75_000), (60_000, 210_000)]
    {
        let (lease, after) = (Duration::from_millis(lease_ms), Duration::from_millis(after_ms));
        assert_eq!(abandoned_after(lease), after);
        assert!(!is_abandoned(after.saturating_sub(moment), lease, Rules::ALL));
        assert!(!is_abandoned(after, lease, Rules::ALL), "not at the boundary of {after:?}");
        assert!(is_abandoned(after + moment, lease, Rules::ALL));
    }
    // The rule that the simulator removes.
    let trusting = Rules { distrust_store_clocks: false, ..Rules::ALL };
    assert!(!is_abandoned(LEASE, LEASE, trusting) && is_abandoned(LEASE + moment, LEASE, trusting));
}

#[test]
fn the_age_of_a_live_record_stays_below_that_however_the_clocks_of_a_store_differ() {
    // A renewal that took effect just before the holder's deadline, a new leader that is 15 s ahead, and a challenger
    // whose clock gains a sixth on the store's for as long as it extrapolates.
    for lease in [200, 3_000, 15_000, 40_000].map(Duration::from_millis) {
        let age = lease + Duration::from_secs(15) + StoreTime::MAX_AGE / 6;
        assert!(!is_abandoned(age, lease, Rules::ALL), "{lease:?}");
    }
}

#[test]
fn the_time_of_a_store_is_counted_on_for_a_minute() {
    let reported = StoreTime::new(5_000_000_000, at(1_000));
    assert_eq!(reported.at(at(1_000)), 5_000_000_000);
    assert_eq!(reported.at(at(3_500)), 7_500_000_000);
    assert_eq!(reported.at(at(0)), 5_000_000_000, "a lower bound");
    assert!(!reported.is_stale(at(61_000)) && reported.is_stale(at(61_001)));
}

#[test]
fn a_later_read_shows_the_fate_of_a_write_without_a_reply() {
    let free = CasRecord::default();
    let held = granted(&free, 1, Mode::Exclusive, 0);
    assert_eq!(held.fate_of_grant(1, 5, 4), WriteFate::Landed);
    assert_eq!(held.fate_of_grant(2, 5, 4), WriteFate::Refused, "another client was quicker");
    assert_eq!(free.fate_of_grant(1, 4, 4), WriteFate::Unsettled, "it may still land");
    assert_eq!(free.fate_of_grant(1, 3, 4), WriteFate::Unsettled, "the stream went back");
    let renewed = held.renew(1, 5, renewal(0)).unwrap();
    assert_eq!(renewed.fate_of_change(1, Some(1), 6, 5), WriteFate::Landed);
    // The second attempt was sent later. If the first one lands, the record does not show a renewal that young.
    let again = held.renew(1, 5, renewal(1)).unwrap();
    let count = again.holder(1).map(|holder| holder.renewal_count);
    assert_eq!(renewed.fate_of_change(1, count, 6, 5), WriteFate::Refused, "the first landed");
    assert_eq!(held.fate_of_change(1, Some(1), 5, 5), WriteFate::Unsettled);
    assert_eq!(held.fate_of_change(1, Some(1), 4, 5), WriteFate::Unsettled, "the stream went back");
    assert_eq!(free.fate_of_change(1, Some(1), 4, 5), WriteFate::Refused, "and the hold is gone");
    assert_eq!(held.fate_of_change(1, Some(1), 6, 5), WriteFate::Refused, "another holder wrote");
    assert_eq!(held.fate_of_change(2, Some(1), 6, 5), WriteFate::Refused, "the hold is gone");
    assert_eq!(free.fate_of_change(1, None, 6, 5), WriteFate::Landed, "it is released");
    assert_eq!(held.fate_of_change(1, None, 5, 5), WriteFate::Unsettled);
    assert_eq!(held.fate_of_change(1, None, 6, 5), WriteFate::Refused);
}

#[test]
fn a_claim_that_is_granted_again_is_observed_anew() {
    let mut watched = HolderObservations::default();
    let held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    watched.observe(&held, 5, at(0), at(0));
    assert_eq!(watched.takeover_at(1), at(700));
    let free = held.release(1, 5).expect("held");
    let again = granted(&free, 1, Mode::Exclusive, 6);
    watched.observe(&again, 7, at(600), at(600));
    assert_eq!(watched.takeover_at(1), at(1_300), "the release was not read");
    let rewritten = again.rewritten(7, |_| true);
    watched.observe(&rewritten, 8, at(650), at(650));
    assert_eq!(watched.takeover_at(1), at(1_300), "the same grant, now with its number");
}

#[test]
fn a_renewal_of_a_grant_does_not_renew_an_earlier_one() {
    let held = granted(&CasRecord::default(), 1, Mode::Exclusive, 0);
    let of = |number| Renewal { number: Some(number), ..renewal(0) };
    let renewed = held.renew(1, 5, of(5)).expect("the grant");
    assert!(renewed.renew(1, 6, of(5)).is_some());
    assert_eq!(renewed.renew(1, 6, of(9)), None, "grant 9 is lost, and 5 is back");
}
