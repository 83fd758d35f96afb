//! Limits, expiry of idle keys, and views.

use super::*;

#[test]
fn keys_in_use_are_limited_and_idle_ones_do_not_count() {
    let mut table = with(TableConfig { max_keys: 2, ..TableConfig::default() });
    let ann = table.connect();
    table.claim(b"a", exclusive(ann), at(0)).grant();
    let grant = table.claim(b"b", slot(ann, 1), at(0)).grant();
    let refused = ClaimAnswer::Refused(Refusal::MaxKeys);
    assert_eq!(table.claim(b"c", exclusive(ann), at(0)), refused);
    assert_eq!(table.claim(b"a", slot(ann, 1), at(0)), refused, "another space, another key");
    table.claim(b"a", exclusive(ann), at(0)).place();
    table.release(KeySpace::Semaphore, b"b", grant.token, at(0)).unwrap();
    table.claim(b"c", exclusive(ann), at(0)).grant();
    assert_eq!(table.claim(b"b", slot(ann, 1), at(0)), refused, "known, but idle");
    assert_eq!(table.sizes().idle_keys, 1);
}

#[test]
fn waiters_are_limited_for_each_key() {
    let mut table = with(TableConfig { max_waiters_per_key: 1, ..TableConfig::default() });
    let ann = table.connect();
    table.claim(KEY, exclusive(ann), at(0)).grant();
    table.claim(KEY, exclusive(ann), at(0)).place();
    let refused = Refusal::MaxWaiters;
    assert_eq!(table.claim(KEY, exclusive(ann), at(0)), ClaimAnswer::Refused(refused));
    assert_eq!(table.enqueue(KEY, exclusive(ann), at(0)), Enqueued::Refused(refused));
    assert_eq!(table.redeem(ann, KeySpace::Lock, KEY, at(0)), Redeemed::NotEnqueued);
}

#[test]
fn the_first_user_of_a_semaphore_fixes_its_limit_while_it_is_used() {
    let mut table = table();
    let ann = table.connect();
    let grant = table.claim(KEY, slot(ann, 2), at(0)).grant();
    let refused = Refusal::LimitMismatch;
    assert_eq!(table.claim(KEY, slot(ann, 3), at(0)), ClaimAnswer::Refused(refused));
    assert_eq!(table.enqueue(KEY, slot(ann, 1), at(0)), Enqueued::Refused(refused));
    table.release(KeySpace::Semaphore, KEY, grant.token, at(0)).unwrap();
    table.claim(KEY, slot(ann, 3), at(0)).grant();
    assert_eq!(table.inspect(KeySpace::Semaphore, KEY, 9, at(0)).unwrap().summary.limit, Some(3));
}

#[test]
fn a_semaphore_without_slots_has_one() {
    let mut table = table();
    let ann = table.connect();
    table.claim(KEY, slot(ann, 0), at(0)).grant();
    table.claim(KEY, slot(ann, 1), at(0)).place();
}

#[test]
fn an_idle_key_is_forgotten_in_time() {
    let mut table = table();
    let ann = table.connect();
    let grant = table.claim(KEY, exclusive(ann), at(0)).grant();
    table.release_key(grant, at(3));
    table.handle_timeout(at(62));
    assert_eq!(table.sizes().idle_keys, 1);
    assert_eq!(table.poll_timeout(), Some(at(63)));
    table.handle_timeout(at(63));
    assert_eq!(table.sizes().idle_keys, 0);
    assert_eq!(table.poll_timeout(), None);
    assert_eq!(table.inspect(KeySpace::Lock, KEY, 9, at(63)), None);
}

#[test]
fn of_too_many_idle_keys_the_longest_unused_goes() {
    let mut table = with(TableConfig { max_idle_keys: 2, ..TableConfig::default() });
    let ann = table.connect();
    for (key, now) in [(b"a", 1), (b"b", 2), (b"a", 3), (b"c", 4)] {
        let grant = table.claim(key, exclusive(ann), at(now)).grant();
        table.release(KeySpace::Lock, key, grant.token, at(now)).unwrap();
    }
    let known = table.list(KeySpace::Lock, b"", None, 9, at(5));
    let known: Vec<_> = known.iter().map(|summary| (&*summary.key, summary.idle_since)).collect();
    assert_eq!(known, [(&b"a"[..], Some(at(3))), (b"c", Some(at(4)))]);
    table.check();
}

#[test]
fn a_view_shows_holders_and_waiters_in_order_and_no_more_than_asked() {
    let mut table = table();
    let (ann, bob) = (table.connect(), table.connect());
    for now in 0..3 {
        table.claim(KEY, slot(ann, 3), at(now)).grant();
    }
    let places = [3, 4].map(|now| table.claim(KEY, slot(bob, 3), at(now)).place());
    let mode = Mode::Slot { limit: 3 };
    let view = table.inspect(KeySpace::Semaphore, KEY, 1, at(5)).unwrap();
    let (granted, ends) = (at(0), at(10));
    let first = Holder { number: 1, mode, owner: Some(ann), granted, lease: LEASE, ends };
    assert_eq!(view.holders, [first]);
    assert_eq!(view.waiters, [Waiter { place: places[0], owner: bob, mode, since: at(3) }]);
    assert_eq!((view.summary.holders, view.summary.waiters), (3, 2));
    assert_eq!(view.summary.first, Some(first));
    let all = table.inspect(KeySpace::Semaphore, KEY, 9, at(5)).unwrap();
    assert_eq!(all.holders.iter().map(|holder| holder.number).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(all.waiters[1].place, places[1]);
}

#[test]
fn keys_are_listed_in_order_by_prefix_and_page() {
    let mut table = table();
    let ann = table.connect();
    for key in ["job/9", "job/10", "web", "job/1", "job"] {
        table.claim(key.as_bytes(), exclusive(ann), at(0)).grant();
    }
    table.claim(b"job/2", slot(ann, 1), at(0)).grant();
    let mut page = |after: Option<&str>| -> Vec<String> {
        let page = table.list(KeySpace::Lock, b"job/", after.map(str::as_bytes), 2, at(0));
        page.iter().map(|summary| String::from_utf8(summary.key.to_vec()).unwrap()).collect()
    };
    assert_eq!(page(None), ["job/1", "job/10"]);
    assert_eq!(page(Some("job/10")), ["job/9"]);
    assert_eq!(page(Some("job/9")), [""; 0]);
}

#[test]
fn holds_can_be_written_down_and_put_back() {
    let mut table = table();
    let ann = table.connect();
    table.claim(b"a", exclusive(ann), at(0)).grant();
    table.claim(b"b", shared(ann), at(0)).grant();
    table.claim(b"b", shared(ann), at(1)).grant();
    table.claim(b"a", slot(ann, 2), at(2)).grant();
    table.disconnect(ann, OnDisconnect::KeepHolds, at(2));
    let mut copy = super::table();
    for HoldSnapshot { key, mode, token, ends, owner: _ } in table.holds() {
        copy.restore(key, mode, token, ends, at(2)).unwrap();
    }
    assert_eq!(copy.sizes().holds, 4);
    assert!(table.holds().eq(copy.holds()));
    copy.check();
}
