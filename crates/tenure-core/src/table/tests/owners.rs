//! Holds of owners that disconnect or are evicted, and holds restored after a restart.

use super::*;

#[test]
fn disconnect_hands_holds_to_the_next_waiter_and_removes_places() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    let held = table.claim(KEY, exclusive(ann), at(0)).grant();
    table.claim(KEY, exclusive(ann), at(0)).place();
    table.enqueue(KEY, exclusive(ann), at(0)).place();
    let bobs = table.claim(KEY, exclusive(bob), at(0)).place();
    table.disconnect(ann, OnDisconnect::Release, at(1));
    let [left, TableEvent::Granted { place: Some(place), .. }] = &table.events()[..] else {
        panic!()
    };
    assert_eq!(
        (left, place),
        (&ended(Ending::Disconnected, ann, held), &bobs),
        "not to the same owner"
    );
    assert_eq!(table.sizes(), TableSizes { keys: 1, holds: 1, owners: 1, ..TableSizes::default() });
}

#[test]
fn leaving_the_queue_can_let_others_pass() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    table.claim(KEY, shared(bob), at(0)).grant();
    table.claim(KEY, exclusive(ann), at(0)).place();
    let bobs = table.claim(KEY, shared(bob), at(0)).place();
    table.disconnect(ann, OnDisconnect::Release, at(1));
    assert_eq!(table.turns()[0].0, bobs);
}

#[test]
fn holds_may_outlive_their_owner() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    let first = table.claim(KEY, exclusive(ann), at(0)).grant();
    let second = table.claim(b"b", exclusive(ann), at(0)).grant();
    table.claim(KEY, exclusive(bob), at(0)).place();
    table.disconnect(ann, OnDisconnect::KeepHolds, at(1));
    assert_eq!(table.events(), []);
    table.release(KeySpace::Lock, b"b", second.token, at(2)).unwrap();
    table.handle_timeout(at(10));
    assert_eq!(table.events()[0], ended(Ending::Expired, None, first));
}

#[test]
fn a_hold_that_was_taken_from_its_owner_stays_when_that_leaves() {
    let mut table = table();
    let ann = table.connect();
    let left = table.claim(KEY, exclusive(ann), at(0)).grant();
    let kept = table.claim(b"b", exclusive(ann), at(0)).grant();
    table.detach(KeySpace::Lock, KEY, left.token, at(1)).unwrap();
    assert_eq!(table.detach(KeySpace::Lock, b"b", left.token, at(1)), Err(NotHeld));
    table.disconnect(ann, OnDisconnect::Release, at(2));
    let [TableEvent::Ended { token, how: Ending::Disconnected, .. }] = table.events()[..] else {
        panic!("one hold ends with its owner")
    };
    assert_eq!(token, kept.token);
    table.handle_timeout(at(10));
    assert_eq!(table.events(), [ended(Ending::Expired, None, left)]);
}

#[test]
fn a_claim_dies_with_its_owner_also_where_the_hold_stays() {
    let mut table = table();
    let ann = table.connect();
    table.enqueue(KEY, exclusive(ann), at(0)).grant();
    table.disconnect(ann, OnDisconnect::KeepHolds, at(1));
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(1)), Redeemed::NotEnqueued);
    table.handle_timeout(at(10));
    assert_eq!(table.sizes(), TableSizes { idle_keys: 1, ..TableSizes::default() });
}

#[test]
fn disconnected_owner_stays_unknown_after_its_slot_is_reused() {
    let mut table = table();
    let ann = table.connect();
    let held = table.claim(KEY, exclusive(ann), at(0)).grant();
    let anns = table.claim(KEY, exclusive(ann), at(0)).place();
    table.disconnect(ann, OnDisconnect::Release, at(0));
    let bob = table.connect();
    assert_ne!(ann, bob);
    table.enqueue(KEY, exclusive(bob), at(0)).grant();
    let bobs = table.claim(KEY, exclusive(bob), at(0)).place();
    table.events();

    let unknown = Refusal::UnknownOwner;
    assert_eq!(table.claim(b"b", exclusive(ann), at(1)), ClaimAnswer::Refused(unknown));
    assert_eq!(table.enqueue(b"b", exclusive(ann), at(1)), Enqueued::Refused(unknown));
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(1)), Redeemed::NotEnqueued);
    assert_eq!(table.release(KeySpace::Lock, KEY, held.token, at(1)), Err(NotHeld));
    assert!(!table.abandon(anns, at(1)));
    table.disconnect(ann, OnDisconnect::Release, at(1));
    assert_eq!(table.events(), []);
    assert_eq!(table.waiters_ahead(bobs), Some(0));
}

#[test]
fn many_holds_end_in_the_order_of_their_grants() {
    let mut table = table();
    let ann = table.connect();
    let keys: Vec<_> = (0..20_u8).map(|n| [n]).collect();
    let grants: Vec<_> =
        keys.iter().map(|key| table.claim(key, exclusive(ann), at(0)).grant()).collect();
    for n in [3, 4, 11] {
        table.release(KeySpace::Lock, &keys[n], grants[n].token, at(0)).unwrap();
        table.claim(&keys[n], exclusive(ann), at(0)).grant();
    }
    table.disconnect(ann, OnDisconnect::Release, at(0));
    let numbers = table.events().into_iter().map(|event| match event {
        TableEvent::Ended { token, .. } => token.number(),
        other => panic!("{other:?}"),
    });
    let expected = (1..=23).filter(|n| ![4, 5, 12].contains(n));
    assert!(numbers.eq(expected));
}

#[test]
fn eviction_takes_the_number_tells_the_holder_and_passes_on() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    let held = table.claim(KEY, exclusive(ann), at(0)).grant();
    let bobs = table.claim(KEY, exclusive(bob), at(0)).place();
    assert_eq!(table.evict(KeySpace::Lock, KEY, 77, at(1)), Err(NotHeld));
    assert_eq!(table.evict(KeySpace::Lock, KEY, held.token.number(), at(1)), Ok(Some(ann)));
    let [evicted, TableEvent::Granted { place: Some(place), .. }] = &table.events()[..] else {
        panic!()
    };
    assert_eq!((evicted, place), (&ended(Ending::Evicted, ann, held), &bobs));
}

#[test]
fn a_restored_hold_keeps_others_out_until_it_is_over() {
    let mut table = with(TableConfig { max_keys: 0, ..TableConfig::default() });
    let token = LockToken::new(900, 7);
    table.restore(KEY, Mode::Exclusive, token, at(8), at(5)).unwrap();
    let ann = table.connect();
    table.claim(KEY, exclusive(ann), at(6)).place();
    assert_eq!(
        table.renew(KeySpace::Lock, KEY, token, LEASE, at(7)),
        Ok(Renewed { ends: at(17), waiters: 1 })
    );
    assert_eq!(table.release(KeySpace::Lock, KEY, token, at(8)), Ok(()));
    assert_eq!(table.turns().len(), 1);
}

#[test]
fn a_restored_hold_that_contradicts_another_is_refused() {
    let mut table = table();
    let restore = |table: &mut Table, mode, number| {
        table.restore(KEY, mode, LockToken::new(number, 0), at(9), at(0))
    };
    assert_eq!(restore(&mut table, Mode::Shared, 1), Ok(()));
    assert_eq!(restore(&mut table, Mode::Shared, 2), Ok(()));
    assert_eq!(restore(&mut table, Mode::Shared, 2), Err(RestoreConflict), "twice");
    assert_eq!(restore(&mut table, Mode::Exclusive, 3), Err(RestoreConflict));
    assert_eq!(restore(&mut table, Mode::Slot { limit: 1 }, 4), Ok(()));
    assert_eq!(
        restore(&mut table, Mode::Slot { limit: 2 }, 5),
        Err(RestoreConflict),
        "another limit"
    );
    assert_eq!(restore(&mut table, Mode::Slot { limit: 1 }, 6), Err(RestoreConflict), "no slot");
    table.check();
}

#[test]
fn holders_are_notified_when_a_waiter_queues() {
    let mut table = with(TableConfig { notify_holders: true, ..TableConfig::default() });
    let (ann, bob) = (table.connect(), table.connect());
    let requested = |owner, space, grant: Grant| TableEvent::HandoffRequested {
        owner,
        space,
        key: KEY.into(),
        token: grant.token,
    };
    let one = table.claim(KEY, shared(ann), at(0)).grant();
    let two = table.claim(KEY, shared(bob), at(0)).grant();
    table.claim(KEY, exclusive(bob), at(1)).place();
    table.claim(KEY, exclusive(bob), at(1)).place();
    let space = KeySpace::Lock;
    assert_eq!(
        table.events(),
        [requested(ann, space, one), requested(bob, space, two)],
        "once each"
    );

    let oldest = table.claim(KEY, slot(ann, 2), at(0)).grant();
    table.claim(KEY, slot(bob, 2), at(0)).grant();
    table.claim(KEY, slot(bob, 2), at(0)).place();
    assert_eq!(table.events(), [requested(ann, KeySpace::Semaphore, oldest)], "one slot is enough");
}

#[test]
fn holders_are_not_told_unless_asked_to() {
    let mut table = table();
    let ann = table.connect();
    table.claim(KEY, exclusive(ann), at(0)).grant();
    table.claim(KEY, exclusive(ann), at(0)).place();
    assert_eq!(table.events(), []);
}
