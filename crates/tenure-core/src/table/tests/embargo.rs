//! Embargo: a table that may have lost holds grants nothing until they must have expired.

use super::*;

#[test]
fn nothing_is_granted_before_the_quiet_is_over() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    table.embargo_until(at(20));
    let first = table.claim(KEY, exclusive(ann), at(1)).place();
    let second = table.claim(b"other", exclusive(bob), at(2)).place();
    let third = table.claim(KEY, shared(bob), at(3)).place();
    assert_eq!(
        table.claim(b"new", TableClaim { queue: false, ..exclusive(ann) }, at(4)),
        ClaimAnswer::Contended
    );
    table.check();
    assert_eq!(table.sizes().keys, 2, "a key without waiters is not in use");
    assert_eq!(table.poll_timeout(), Some(at(20)));
    table.handle_timeout(at(19));
    assert_eq!(table.events(), []);
    assert_eq!((table.waiters_ahead(first), table.waiters_ahead(third)), (Some(0), Some(1)));

    table.handle_timeout(at(20));
    table.check();
    let turns = table.turns().into_iter().map(|(place, grant)| (place, grant.token.number()));
    let expected = [(first, 1), (second, 2)];
    assert_eq!(turns.collect::<Vec<_>>(), expected, "the third waiter waits for the first holder");
    table.claim(b"new", exclusive(ann), at(21)).grant();
}

#[test]
fn any_operation_after_the_quiet_ends_it() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    table.embargo_until(at(20));
    let place = table.claim(KEY, exclusive(ann), at(1)).place();
    table.claim(KEY, exclusive(bob), at(20)).place();
    assert_eq!(table.turns()[0].0, place);
}

#[test]
fn an_embargo_is_extended_and_never_shortened() {
    let mut table = table();
    table.embargo_until(at(20));
    table.embargo_until(at(10));
    assert_eq!(table.poll_timeout(), Some(at(20)));
    table.embargo_until(at(30));
    assert_eq!(table.poll_timeout(), Some(at(30)));
}

#[test]
fn restored_hold_stays_valid_through_the_embargo() {
    let mut table = table();
    let ann = table.connect();
    table.embargo_until(at(20));
    let token = LockToken::new(7, 7);
    assert_eq!(table.restore(KEY, Mode::Exclusive, token, at(5), at(1)), Ok(()));
    assert_eq!(table.restore(KEY, Mode::Exclusive, token, at(5), at(1)), Err(RestoreConflict));
    let place = table.claim(KEY, exclusive(ann), at(2)).place();
    assert!(table.renew(KeySpace::Lock, KEY, token, LEASE, at(3)).is_ok());
    assert_eq!(table.release(KeySpace::Lock, KEY, token, at(4)), Ok(()));
    table.check();
    assert_eq!(table.events(), [], "released, and not granted before the embargo ends");
    table.handle_timeout(at(20));
    assert_eq!(table.turns()[0].0, place);
}

#[test]
fn a_semaphore_that_is_waited_for_keeps_its_limit() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    table.embargo_until(at(20));
    table.claim(KEY, slot(ann, 2), at(1)).place();
    let other = table.claim(KEY, slot(bob, 3), at(2));
    assert_eq!(other, ClaimAnswer::Refused(Refusal::LimitMismatch));
}

#[test]
fn an_owner_that_leaves_in_the_quiet_leaves_nothing() {
    let mut table = table();
    let ann = table.connect();
    table.embargo_until(at(20));
    table.claim(KEY, exclusive(ann), at(1)).place();
    table.claim(KEY, exclusive(ann), at(1)).place();
    table.enqueue(b"other", exclusive(ann), at(1));
    table.disconnect(ann, OnDisconnect::Release, at(2));
    table.check();
    assert_eq!(table.sizes(), TableSizes { idle_keys: 2, ..TableSizes::default() });
    table.handle_timeout(at(20));
    assert_eq!(table.events(), []);
}
