//! Grants: their order and time.

use super::*;

#[test]
fn a_free_key_is_granted_at_once() {
    let mut table = table();
    let ann = table.connect();
    let grant = table.claim(KEY, exclusive(ann), at(5)).grant();
    assert_eq!(grant, Grant { token: grant.token, lease: LEASE, ends: at(15), waiters: 0 });
    assert_eq!(table.events(), []);
}

#[test]
fn held_key_is_contended_for_claims_that_do_not_queue() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    table.claim(KEY, exclusive(ann), at(0)).grant();
    assert_eq!(
        table.claim(KEY, TableClaim { queue: false, ..exclusive(bob) }, at(0)),
        ClaimAnswer::Contended
    );
    assert_eq!(table.sizes().waiters, 0);
}

#[test]
fn waiters_get_their_turn_in_the_order_of_their_coming() {
    let mut table = table();
    let (ann, bob, cy) = (table.connect(), table.connect(), table.connect());
    let first = table.claim(KEY, exclusive(ann), at(0)).grant();
    let second = table.claim(KEY, exclusive(bob), at(1)).place();
    let third = table.claim(KEY, exclusive(cy), at(2)).place();
    table.release_key(first, at(3));
    let [(turn, grant)] = table.turns()[..] else { panic!() };
    assert_eq!((turn, grant.waiters, grant.ends), (second, 1, at(13)), "leased from the grant on");
    assert!(grant.token.number() > first.token.number());
    table.release_key(grant, at(4));
    assert_eq!(table.turns()[0].0, third);
}

#[test]
fn an_owner_that_asks_again_waits_behind_itself() {
    let mut table = table();
    let ann = table.connect();
    let first = table.claim(KEY, exclusive(ann), at(0)).grant();
    let place = table.claim(KEY, exclusive(ann), at(0)).place();
    table.release_key(first, at(1));
    assert_eq!(table.turns()[0].0, place);
}

#[test]
fn readers_share_and_a_waiting_writer_holds_later_readers_back() {
    let mut table = table();
    let ann = table.connect();
    let reading = [(); 2].map(|()| table.claim(KEY, shared(ann), at(0)).grant());
    let writer = table.claim(KEY, exclusive(ann), at(0)).place();
    let readers = [(); 2].map(|()| table.claim(KEY, shared(ann), at(0)).place());
    let last = table.claim(KEY, exclusive(ann), at(0)).place();
    table.release_key(reading[0], at(1));
    assert_eq!(table.turns(), [], "one reader still holds");
    table.release_key(reading[1], at(1));
    let [(turn, writing)] = table.turns()[..] else { panic!() };
    assert_eq!(turn, writer);
    table.release_key(writing, at(2));
    let together = table.turns();
    assert_eq!(together.iter().map(|turn| turn.0).collect::<Vec<_>>(), readers);
    assert_eq!(table.waiters_ahead(last), Some(0));
}

#[test]
fn a_semaphore_has_as_many_holders_as_slots() {
    let mut table = table();
    let ann = table.connect();
    let grants = [(); 3].map(|()| table.claim(KEY, slot(ann, 3), at(0)).grant());
    let place = table.claim(KEY, slot(ann, 3), at(0)).place();
    table.release(KeySpace::Semaphore, KEY, grants[1].token, at(1)).unwrap();
    assert_eq!(table.turns()[0].0, place);
    assert_eq!(table.sizes().holds, 3);
}

#[test]
fn free_slot_goes_to_the_first_waiter() {
    // The writer's lease has expired and the timer is late: a new reader must not overtake the waiter.
    let mut table = table();
    let ann = table.connect();
    table.claim(KEY, exclusive(ann), at(0)).grant();
    let place = table.claim(KEY, exclusive(ann), at(0)).place();
    table.claim(KEY, exclusive(ann), at(10)).place();
    assert!(
        matches!(table.events()[..], [_, TableEvent::Granted { place: Some(turn), .. }] if turn == place)
    );
}

#[test]
fn a_hold_is_over_when_its_lease_is_and_not_before() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    let grant = table.claim(KEY, exclusive(ann), at(0)).grant();
    let just_before = at(10) - Duration::from_nanos(1);
    table.handle_timeout(just_before);
    assert_eq!(
        table.claim(KEY, TableClaim { queue: false, ..exclusive(bob) }, just_before),
        ClaimAnswer::Contended
    );
    table.handle_timeout(at(10));
    assert_eq!(table.events(), [ended(Ending::Expired, ann, grant)]);
}

#[test]
fn a_late_timer_changes_no_answer() {
    let mut table = table();
    let ann = table.connect();
    let grant = table.claim(KEY, exclusive(ann), at(0)).grant();
    assert_eq!(table.renew(KeySpace::Lock, KEY, grant.token, LEASE, at(10)), Err(NotHeld));
    assert_eq!(table.release(KeySpace::Lock, KEY, grant.token, at(10)), Err(NotHeld));
    table.claim(KEY, exclusive(ann), at(10)).grant();
}

#[test]
fn holds_end_in_the_order_of_their_ends_and_then_of_their_grants() {
    let mut table = table();
    let ann = table.connect();
    let lease = |seconds| TableClaim { lease: Duration::from_secs(seconds), ..exclusive(ann) };
    let late = table.claim(b"late", lease(9), at(0)).grant();
    let one = table.claim(b"one", lease(5), at(0)).grant();
    let two = table.claim(b"two", TableClaim { mode: Mode::Shared, ..lease(5) }, at(0)).grant();
    let three = table.claim(b"three", lease(1), at(0)).grant();
    // Its alarm is at 1, its end at the same time as those of `one` and `two`.
    table.renew(KeySpace::Lock, b"three", three.token, Duration::from_secs(5), at(0)).unwrap();
    table.handle_timeout(at(20));
    let ended: Vec<_> = table
        .events()
        .into_iter()
        .map(|event| match event {
            TableEvent::Ended { token, how: Ending::Expired, .. } => token,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ended, [one.token, two.token, three.token, late.token]);
}

#[test]
fn renewing_lets_the_lease_begin_anew_longer_or_shorter() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    let grant = table.claim(KEY, exclusive(ann), at(0)).grant();
    table.claim(KEY, exclusive(bob), at(0)).place();
    let mut renew = |seconds, now| {
        table
            .renew(KeySpace::Lock, KEY, grant.token, Duration::from_secs(seconds), at(now))
            .unwrap()
    };
    assert_eq!(renew(20, 5), Renewed { ends: at(25), waiters: 1 });
    assert_eq!(renew(2, 6), Renewed { ends: at(8), waiters: 1 });
    assert_eq!(table.poll_timeout(), Some(at(8)));
    table.handle_timeout(at(8));
    assert_eq!(table.events().len(), 2, "ended, and granted to the next");
}

#[test]
fn a_timer_that_comes_early_is_set_anew() {
    let mut table = table();
    let ann = table.connect();
    let grant = table.claim(KEY, exclusive(ann), at(0)).grant();
    table.renew(KeySpace::Lock, KEY, grant.token, LEASE, at(5)).unwrap();
    table.handle_timeout(at(10));
    assert_eq!(table.events(), []);
    assert_eq!(table.poll_timeout(), Some(at(15)));
}

#[test]
fn only_the_whole_token_proves_a_hold_and_only_of_its_key() {
    let mut table = table();
    let ann = table.connect();
    let token = table.claim(KEY, exclusive(ann), at(0)).grant().token;
    table.claim(b"other", shared(ann), at(0)).grant();
    let guessed = LockToken::new(token.number(), 1);
    for (space, key, token) in [
        (KeySpace::Lock, KEY, guessed),
        (KeySpace::Lock, b"other", token),
        (KeySpace::Lock, b"unknown", token),
        (KeySpace::Semaphore, KEY, token),
    ] {
        assert_eq!(table.release(space, key, token, at(1)), Err(NotHeld));
        assert_eq!(table.renew(space, key, token, LEASE, at(1)), Err(NotHeld));
    }
    assert_eq!(table.release(KeySpace::Lock, KEY, token, at(1)), Ok(()));
    assert_eq!(table.release(KeySpace::Lock, KEY, token, at(1)), Err(NotHeld), "once");
}

#[test]
fn no_lease_is_too_short_or_too_long() {
    let mut table = table();
    let ann = table.connect();
    let now = Time::from_nanos(u64::MAX - 5);
    let forever = TableClaim { lease: Duration::MAX, ..exclusive(ann) };
    let grant = table.claim(KEY, forever, now).grant();
    assert_eq!(grant.ends, Time::MAX);
    assert_eq!(table.poll_timeout(), None);
    let at_once = TableClaim { lease: Duration::ZERO, ..exclusive(ann) };
    let places = [(); 3].map(|()| table.claim(KEY, at_once, now).place());
    table.release_key(grant, now);
    table.handle_timeout(now);
    let turns: Vec<_> = table.events();
    assert_eq!(turns.len(), 6, "three grants and three ends: {turns:?}");
    assert_eq!(table.waiters_ahead(places[2]), None);
}

#[test]
fn the_crowd_of_a_semaphore_is_not_searched() {
    // A linear search would take two billion steps.
    let mut table = table();
    let ann = table.connect();
    let limit = 1 << 16;
    let grants: Vec<_> =
        (0..limit).map(|_| table.claim(KEY, slot(ann, limit), at(0)).grant()).collect();
    for grant in &grants {
        table.renew(KeySpace::Semaphore, KEY, grant.token, LEASE, at(1)).unwrap();
    }
    for grant in &grants {
        table.release(KeySpace::Semaphore, KEY, grant.token, at(1)).unwrap();
    }
    assert_eq!(table.sizes().holds, 0);
}
