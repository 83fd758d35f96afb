//! Two-phase claims, and abandoned claims.

use super::*;

#[test]
fn a_claim_granted_at_once_is_redeemed_once_with_a_fresh_lease() {
    let mut table = table();
    let ann = table.connect();
    let first = table.enqueue(KEY, exclusive(ann), at(0)).grant();
    assert_eq!(table.enqueue(KEY, exclusive(ann), at(1)), Enqueued::AlreadyEnqueued);
    let grant = table.redeem(ann, KeySpace::Lock, KEY, at(4)).grant();
    assert_eq!((grant.token, grant.ends), (first.token, at(14)));
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(4)), Redeemed::NotEnqueued);
    assert_eq!(table.events(), []);
}

#[test]
fn a_claim_that_waits_is_told_of_its_turn_and_then_redeemed() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    let held = table.claim(KEY, exclusive(ann), at(0)).grant();
    let place = table.enqueue(KEY, exclusive(bob), at(0)).place();
    assert_eq!(table.redeem(bob, KeySpace::Lock, KEY, at(1)).place(), place);
    table.release_key(held, at(2));
    let [(turn, granted)] = table.turns()[..] else { panic!() };
    assert_eq!(turn, place);
    assert_eq!(table.enqueue(KEY, exclusive(bob), at(3)), Enqueued::AlreadyEnqueued);
    let grant = table.redeem(bob, KeySpace::Lock, KEY, at(5)).grant();
    assert_eq!((granted.ends, grant.token, grant.ends), (at(12), granted.token, at(15)));
}

#[test]
fn a_claim_belongs_to_one_owner_one_key_and_one_space() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    table.enqueue(KEY, exclusive(ann), at(0)).grant();
    assert_eq!(table.redeem(bob, KeySpace::Lock, KEY, at(0)), Redeemed::NotEnqueued);
    assert_eq!(table.redeem(ann, KeySpace::Lock, b"other", at(0)), Redeemed::NotEnqueued);
    assert_eq!(table.redeem(ann, KeySpace::Semaphore, KEY, at(0)), Redeemed::NotEnqueued);
    table.enqueue(KEY, slot(ann, 1), at(0)).grant();
    table.enqueue(b"other", exclusive(ann), at(0)).grant();
}

#[test]
fn a_grant_that_ran_out_is_said_once_and_never_given_as_held() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    let lost = table.enqueue(KEY, exclusive(ann), at(0)).grant();
    let bobs = table.claim(KEY, exclusive(bob), at(10)).grant();
    assert_eq!(table.events(), [ended(Ending::Expired, ann, lost)]);
    assert_eq!(table.enqueue(KEY, exclusive(ann), at(11)), Enqueued::AlreadyEnqueued);
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(11)), Redeemed::LeaseExpired);
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(11)), Redeemed::NotEnqueued);
    table.release_key(bobs, at(12));
}

#[test]
fn a_key_is_in_use_until_its_owner_heard_that_the_grant_ran_out() {
    let mut table = table();
    let ann = table.connect();
    table.enqueue(KEY, exclusive(ann), at(0)).grant();
    table.handle_timeout(at(1000));
    assert_eq!((table.sizes().keys, table.sizes().idle_keys), (1, 0));
    table.redeem(ann, KeySpace::Lock, KEY, at(1000));
    assert_eq!((table.sizes().keys, table.sizes().idle_keys), (0, 1));
    table.check();
}

#[test]
fn releasing_by_token_settles_the_claim() {
    let mut table = table();
    let ann = table.connect();
    let grant = table.enqueue(KEY, exclusive(ann), at(0)).grant();
    table.release_key(grant, at(1));
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(1)), Redeemed::NotEnqueued);
    table.enqueue(KEY, exclusive(ann), at(1)).grant();
}

#[test]
fn an_abandoned_place_leaves_the_queue_and_is_gone() {
    let mut table = table();
    let ann = table.connect();
    let grant = table.claim(KEY, exclusive(ann), at(0)).grant();
    let places = [(); 3].map(|()| table.claim(KEY, exclusive(ann), at(0)).place());
    assert!(table.abandon(places[1], at(1)));
    assert!(!table.abandon(places[1], at(1)));
    assert_eq!(places.map(|place| table.waiters_ahead(place)), [Some(0), None, Some(1)]);
    table.release_key(grant, at(1));
    assert_eq!(table.turns()[0].0, places[0]);
}

#[test]
fn a_writer_that_gives_up_lets_the_readers_behind_it_pass() {
    let mut table = table();
    let ann = table.connect();
    table.claim(KEY, shared(ann), at(0)).grant();
    let writer = table.claim(KEY, exclusive(ann), at(0)).place();
    let readers = [(); 2].map(|()| table.claim(KEY, shared(ann), at(0)).place());
    table.abandon(writer, at(1));
    assert_eq!(table.turns().iter().map(|turn| turn.0).collect::<Vec<_>>(), readers);
}

#[test]
fn a_grant_that_raced_an_abandon_goes_to_the_next() {
    let mut table = table();
    let (ann, bob, cy) = (table.connect(), table.connect(), table.connect());
    let held = table.claim(KEY, exclusive(ann), at(0)).grant();
    let bobs = table.enqueue(KEY, exclusive(bob), at(0)).place();
    let cys = table.claim(KEY, exclusive(cy), at(0)).place();
    table.release_key(held, at(1));
    let (_, raced) = table.turns()[0];
    assert!(table.abandon(bobs, at(2)));
    let [given_back, TableEvent::Granted { place: Some(place), .. }] = &table.events()[..] else {
        panic!()
    };
    assert_eq!((given_back, place), (&ended(Ending::Abandoned, bob, raced), &cys));
    assert_eq!(table.redeem(bob, KeySpace::Lock, KEY, at(2)), Redeemed::NotEnqueued);
}

#[test]
fn a_granted_place_of_one_phase_is_gone() {
    let mut table = table();
    let ann = table.connect();
    let held = table.claim(KEY, exclusive(ann), at(0)).grant();
    let place = table.claim(KEY, exclusive(ann), at(0)).place();
    table.release_key(held, at(1));
    assert!(!table.abandon(place, at(1)));
    assert_eq!((table.waiters_ahead(place), table.sizes().holds), (None, 1));
}

#[test]
fn a_claim_whose_grant_was_evicted_has_lapsed() {
    let mut table = table();
    let ann = table.connect();
    let grant = table.enqueue(KEY, shared(ann), at(0)).grant();
    table.evict(KeySpace::Lock, KEY, grant.token.number(), at(1)).unwrap();
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(1)), Redeemed::LeaseExpired);
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(1)), Redeemed::NotEnqueued);
}
