//! Decisions on a record, and take-over by watching it.

use super::*;

const LEASE: Duration = Duration::from_millis(600);

fn ask(claim: u128, mode: Mode) -> Ask<'static, &'static str> {
    Ask { claim, mode, lease: LEASE, by: &"me" }
}

fn nobody(_: &Holder<&'static str>) -> bool {
    false
}

fn granted(
    record: &Record<&'static str>,
    claim: u128,
    mode: Mode,
    version: u64,
) -> Record<&'static str> {
    match record.claim(&ask(claim, mode), version, nobody) {
        Claimed::Write(next) => next,
        other => panic!("not granted: {other:?}"),
    }
}

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

#[test]
fn a_free_key_is_granted_and_a_held_one_is_not() {
    let held = granted(&Record::default(), 1, Mode::Exclusive, 0);
    assert_eq!(held.holders.len(), 1);
    let busy = held.claim(&ask(2, Mode::Exclusive), 5, nobody);
    assert!(matches!(busy, Claimed::Busy(holder) if holder.claim == 1), "{busy:?}");
    let again = held.claim(&ask(1, Mode::Exclusive), 5, nobody);
    assert!(matches!(again, Claimed::Before(_)), "the same claim is the same hold: {again:?}");
}

#[test]
fn the_number_of_a_grant_is_the_version_it_was_written_as() {
    let held = granted(&Record::default(), 1, Mode::Exclusive, 0);
    assert_eq!(held.holders[0].number(7), 7);
    let renewed = held.renew(1, 7, LEASE, LEASE).expect("held");
    assert_eq!(renewed.holders[0].number(8), 7, "a renewal is no grant");
    assert_eq!(renewed.holders[0].beat, 1);
    let again = renewed.renew(1, 8, LEASE, LEASE).expect("held");
    assert_eq!((again.holders[0].number(9), again.fence), (7, 7));
    let free = held.release(1, 7).expect("held");
    assert_eq!((free.fence, free.holders.len()), (7, 0), "a free record keeps the fence");
}

#[test]
fn what_is_not_held_is_neither_renewed_nor_released() {
    let held = granted(&Record::default(), 1, Mode::Exclusive, 0);
    assert_eq!(held.renew(2, 7, LEASE, LEASE), None);
    assert_eq!(held.release(2, 7), None);
}

#[test]
fn a_holder_that_is_over_is_taken_over_and_fenced() {
    let held = granted(&Record::default(), 1, Mode::Exclusive, 0);
    let Claimed::Write(next) = held.claim(&ask(2, Mode::Exclusive), 7, |_| true) else {
        panic!("not granted")
    };
    assert_eq!(next.holders.iter().map(|holder| holder.claim).collect::<Vec<_>>(), [2]);
    assert_eq!(next.fence, 7);
}

#[test]
fn readers_share_and_writers_do_not() {
    let one = granted(&Record::default(), 1, Mode::Shared, 0);
    let two = granted(&one, 2, Mode::Shared, 4);
    assert_eq!(two.holders.iter().map(|holder| holder.number(5)).collect::<Vec<_>>(), [4, 5]);
    assert!(matches!(two.claim(&ask(3, Mode::Exclusive), 5, nobody), Claimed::Busy(_)));
    let writer = granted(&Record::default(), 1, Mode::Exclusive, 0);
    assert!(matches!(writer.claim(&ask(3, Mode::Shared), 5, nobody), Claimed::Busy(_)));
}

#[test]
fn a_semaphore_has_its_slots_and_one_size() {
    let slot = Mode::Slot { limit: 2 };
    let two = granted(&granted(&Record::default(), 1, slot, 0), 2, slot, 1);
    assert!(matches!(two.claim(&ask(3, slot), 2, nobody), Claimed::Busy(_)));
    let other = two.claim(&ask(3, Mode::Slot { limit: 9 }), 2, nobody);
    assert_eq!(other, Claimed::OtherSize(2));
    let one = two.release(1, 2).expect("held");
    assert!(matches!(one.claim(&ask(3, slot), 3, nobody), Claimed::Write(_)));
    let free = one.release(2, 3).expect("held");
    assert!(matches!(free.claim(&ask(3, Mode::Slot { limit: 9 }), 4, nobody), Claimed::Write(_)));
}

#[test]
fn a_hold_is_over_when_its_beat_stood_still_for_lease_and_margin() {
    let held = granted(&Record::default(), 1, Mode::Exclusive, 0);
    let mut watched = Watched::default();
    watched.see(&held, at(0), at(10));
    assert!(!watched.over(1, at(709)) && watched.over(1, at(710)));
    let renewed = held.renew(1, 1, LEASE, LEASE).expect("held");
    watched.see(&renewed, at(500), at(510));
    assert!(!watched.over(1, at(1_209)) && watched.over(1, at(1_210)));
    assert_eq!(watched.next(at(600)), at(1_210));
    assert!(!watched.over(2, at(9_999)), "what was not seen is not over");
}

#[test]
fn one_of_several_holders_is_watched_by_itself() {
    let one = granted(&Record::default(), 1, Mode::Shared, 0);
    let two = granted(&one, 2, Mode::Shared, 1);
    let mut watched = Watched::default();
    watched.see(&two, at(0), at(0));
    // The second renews, which rewrites the record; the first is silent.
    watched.see(&two.renew(2, 2, LEASE, LEASE).expect("held"), at(500), at(500));
    assert!(watched.over(1, at(700)) && !watched.over(2, at(700)));
}

#[test]
fn a_hold_without_a_lease_is_never_over() {
    let mut held = granted(&Record::default(), 1, Mode::Exclusive, 0);
    held.holders[0].lease = None;
    let mut watched = Watched::default();
    watched.see(&held, at(0), at(0));
    assert!(!watched.over(1, at(u32::MAX.into())));
}
