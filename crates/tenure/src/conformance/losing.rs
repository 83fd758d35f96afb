//! Loss of a hold: in time, with a reason, and before another client acquires the lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::outcome::grant;
use super::{Fault, Fixture, Op, Outcome, cases};
use crate::store::{Claim, Mode};
use crate::{Client, ErrorKind, FencingToken, LockRequest, Loss};

cases! {
    a_hold_that_is_not_renewed_is_lost_before_another_has_it: "without renewal or release, the loss is reported before the next grant, and the next grant follows soon after the ttl", [LEASE];
    a_dead_holder_is_freed: "a holder that dies without a release blocks the lock no longer than its ttl", [];
    a_dead_reader_is_freed: "a reader that dies without a release blocks a writer no longer than its ttl", [SHARED];
    a_dead_slot_holder_is_freed: "the slot of a holder that dies without a release is free after its ttl", [SEMAPHORE];
    a_silent_holder_is_freed: "a live holder that does not renew blocks the lock no longer than its ttl, and no later renewal is accepted once another client held it", [LEASE];
    an_evicted_holder_learns_of_it: "a hold that an operator breaks is lost at once, and the lock is free", [EVICT];
    an_evicted_slot_is_free: "an operator can break the hold of a slot, and the other slots stay held", [EVICT, SEMAPHORE];
    eviction_needs_the_token: "an eviction with another token changes nothing", [EVICT];
    releasing_a_lost_hold_leaves_the_next_holder_unaffected: "the release of a lost hold reports the loss and does not affect the next holder", [EVICT];
    lost_does_not_wait_for_a_request_that_hangs: "while a renewal hangs, the loss is still reported at the deadline", [LEASE];
    work_is_dropped_when_the_hold_is_lost: "Guard::run drops its work when the hold is lost", [EVICT];
    ending_comes_before_the_end: "without renewal, Guard::ending resolves stop_grace before the deadline", [LEASE];
}

async fn a_hold_that_is_not_renewed_is_lost_before_another_has_it(scene: Fixture) {
    let guard =
        scene.lock(&scene.one).keep_alive(false).acquire().await.succeeds("LockRequest::acquire");
    let granted = scene.clock.now();
    // After the loss the keeper tries to release the hold. Without this fault, that release would free the lock even on
    // a store that never ends a lease, and the case would pass.
    scene.faults.always(Op::Release, Fault::LoseRequest);
    let lost_at = async {
        let lost = guard.lost().await;
        assert_eq!(lost.reason, Loss::Expired);
        assert!(!guard.is_held());
        scene.clock.now()
    };
    let next = async {
        let next = scene.acquire(&scene.two).await;
        (scene.clock.now(), next.fencing_token())
    };
    let (lost_at, (next_at, token)) = tokio::join!(lost_at, next);
    assert!(lost_at <= next_at, "lost at {lost_at:?}, the next grant at {next_at:?}");
    scene.check_order(guard.fencing_token(), token);
    assert!(lost_at.since(granted) <= scene.ttl(), "reported as lost only after the ttl");
    let (took, bound) = (next_at.since(granted), scene.ttl() * 2 + Duration::from_secs(5));
    assert!(took < bound, "the store kept the lease for {took:?}");
}

async fn a_dead_holder_is_freed(scene: Fixture) {
    is_freed_of(&scene, Mode::Exclusive, scene.lock(&scene.one)).await;
}

async fn a_dead_reader_is_freed(scene: Fixture) {
    is_freed_of(&scene, Mode::Shared, scene.lock(&scene.one)).await;
}

async fn a_dead_slot_holder_is_freed(scene: Fixture) {
    let next = scene.one.semaphore(scene.key(), 1).ttl(scene.ttl()).timeout(scene.max_wait());
    is_freed_of(&scene, Mode::Slot { limit: 1 }, next).await;
}

/// Makes a hold of this mode whose holder dies, and then the next request.
async fn is_freed_of(scene: &Fixture, mode: Mode, next: LockRequest) {
    drop(grant(&**scene.two.store(), &Claim { mode, ..scene.claim(1) }).await);
    let began = scene.clock.now();
    drop(next.acquire().await.succeeds("LockRequest::acquire after the death of the holder"));
    let took = scene.clock.now().since(began);
    let bound = scene.ttl() * 2 + Duration::from_secs(5);
    assert!(took < bound, "a dead holder was kept for {took:?}, with a ttl of {:?}", scene.ttl());
}

async fn a_silent_holder_is_freed(scene: Fixture) {
    let store = scene.two.store();
    let mut silent = grant(&**store, &scene.claim(1)).await;
    let began = scene.clock.now();
    let next = scene.acquire(&scene.one).await;
    let took = scene.clock.now().since(began);
    let bound = scene.ttl() * 2 + Duration::from_secs(5);
    assert!(took < bound, "a holder that did not renew blocked the lock for {took:?}");
    scene.check_order(silent.token, next.fencing_token());
    let refusals = [ErrorKind::NotHeld, ErrorKind::Lost];
    let renewed = silent.hold.renew(scene.ttl(), scene.limit()).await;
    renewed.fails_with(&refusals, "Hold::renew of an expired hold, while its successor holds");
    next.release().await.succeeds("Guard::release of the successor");
    let renewed = silent.hold.renew(scene.ttl(), scene.limit()).await;
    renewed.fails_with(&refusals, "Hold::renew of an expired hold, after its successor's release");
    assert!(scene.state().await.holders.is_empty(), "a renewal made an expired hold live again");
}

async fn an_evicted_holder_learns_of_it(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let (store, key) = (scene.two.store(), scene.key());
    store.evict(&key, guard.fencing_token(), "a test").await.succeeds("Store::evict");
    let lost = guard.lost().await;
    assert!(matches!(lost.reason, Loss::Evicted | Loss::Taken), "{lost}");
    assert!(!guard.is_held() && guard.remaining().is_zero());
    assert!(lost.to_string().contains(key.as_str()), "{lost}");
    let next = scene.acquire(&scene.two).await;
    assert!(next.fencing_token() > lost.token, "tokens grow over an eviction");
}

async fn an_evicted_slot_is_free(scene: Fixture) {
    let slot = |client: &Client| {
        client.semaphore(scene.key(), 2).ttl(scene.ttl()).timeout(scene.max_wait())
    };
    let evicted = slot(&scene.one).acquire().await.succeeds("LockRequest::acquire");
    let kept = slot(&scene.one).acquire().await.succeeds("LockRequest::acquire");
    let (store, token) = (scene.two.store(), evicted.fencing_token());
    store.evict(&scene.key(), token, "a test").await.succeeds("Store::evict of a slot");
    let lost = evicted.lost().await;
    assert!(matches!(lost.reason, Loss::Evicted | Loss::Taken), "{lost}");
    let next = slot(&scene.two).acquire().await.succeeds("LockRequest::acquire of the free slot");
    next.release().await.succeeds("Guard::release");
    kept.release().await.succeeds("Guard::release of the other slot");
}

async fn eviction_needs_the_token(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let other = FencingToken::from_u128(guard.fencing_token().as_u128() ^ 1);
    let evicted = scene.two.store().evict(&scene.key(), other, "a test").await;
    evicted.fails(ErrorKind::NotHeld, "Store::evict with another number");
    let far = FencingToken::new(guard.fencing_token().epoch() ^ 1, guard.fencing_token().number());
    let evicted = scene.two.store().evict(&scene.key(), far, "a test").await;
    evicted.fails(ErrorKind::NotHeld, "Store::evict with another epoch");
    guard.release().await.succeeds("Guard::release");
}

async fn releasing_a_lost_hold_leaves_the_next_holder_unaffected(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let store = scene.two.store();
    store.evict(&scene.key(), guard.fencing_token(), "a test").await.succeeds("Store::evict");
    let next = scene.acquire(&scene.two).await;
    guard.release().await.fails(ErrorKind::Lost, "Guard::release of a lost hold");
    let state = scene.state().await;
    assert_eq!(state.holders.first().map(|holder| holder.token), Some(next.fencing_token()));
    next.release().await.succeeds("Guard::release");
}

async fn lost_does_not_wait_for_a_request_that_hangs(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let began = scene.clock.now();
    scene.faults.always(Op::Renew, Fault::Hang);
    scene.faults.always(Op::Release, Fault::Hang);
    let lost = guard.lost().await;
    let took = scene.clock.now().since(began);
    assert_eq!(lost.reason, Loss::Expired);
    assert!(took <= scene.ttl(), "lost came {took:?} after the last renewal at the latest");
    scene.faults.heal();
    drop(guard);
    scene.wait_until_free().await;
}

async fn work_is_dropped_when_the_hold_is_lost(scene: Fixture) {
    struct Work(Arc<AtomicU32>);
    impl Drop for Work {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicU32::new(0));
    let guard = scene.acquire(&scene.one).await;
    assert_eq!(guard.run(async { 7 }).await.succeeds("Guard::run"), 7);
    let work = Work(Arc::clone(&dropped));
    let endless = guard.run(async move {
        let _work = work;
        std::future::pending::<()>().await;
    });
    let evict = async {
        let store = scene.two.store();
        store.evict(&scene.key(), guard.fencing_token(), "a test").await.succeeds("Store::evict");
    };
    let (ended, ()) = tokio::join!(endless, evict);
    ended.fails(ErrorKind::Lost, "Guard::run of a lost hold");
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
}

async fn ending_comes_before_the_end(scene: Fixture) {
    let grace = scene.ttl() / 6;
    let request = scene.lock(&scene.one).stop_grace(grace).keep_alive(false);
    let guard = request.acquire().await.succeeds("LockRequest::acquire");
    guard.ending().await;
    assert!(guard.is_held(), "time is left to stop");
    guard.lost().await;
    guard.ending().await;
}
