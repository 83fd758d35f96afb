//! Loss of a hold: in time, with a reason, and before another client acquires the lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::{Fault, Fixture, Op, always, cases, evicts, has_lease};
use crate::store::Answer;
use crate::{ErrorKind, FencingToken, Loss};

cases! {
    a_hold_that_is_not_renewed_is_lost_before_another_has_it: "without renewal or release, the loss is reported before the next grant, and the next grant follows soon after the ttl", has_lease;
    a_dead_holder_is_freed: "a holder that dies without a release blocks the lock no longer than its ttl", always;
    a_silent_holder_is_freed: "a live holder that does not renew blocks the lock no longer than its ttl, and a later renewal is refused", has_lease;
    an_evicted_holder_learns_of_it: "a hold that an operator breaks is lost at once, and the lock is free", evicts;
    eviction_needs_the_token: "an eviction with another token changes nothing", evicts;
    releasing_a_lost_hold_leaves_the_next_holder_unaffected: "the release of a lost hold reports the loss and does not affect the next holder", evicts;
    lost_does_not_wait_for_a_request_that_hangs: "while a renewal hangs, the loss is still reported at the deadline", has_lease;
    work_is_dropped_when_the_hold_is_lost: "Guard::run drops its work when the hold is lost", evicts;
    ending_comes_before_the_end: "without renewal, Guard::ending resolves stop_grace before the deadline", has_lease;
}

async fn a_hold_that_is_not_renewed_is_lost_before_another_has_it(scene: Fixture) {
    let guard = scene.lock(&scene.one).keep_alive(false).acquire().await.expect("free");
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
    let store = scene.two.store();
    let answer = store.claim(&scene.claim(1), scene.limit()).await.expect("an answer");
    let Answer::Granted(grant) = answer else { panic!("not granted: {answer:?}") };
    drop(grant);
    let began = scene.clock.now();
    drop(scene.acquire(&scene.one).await);
    let took = scene.clock.now().since(began);
    let bound = scene.ttl() * 2 + Duration::from_secs(5);
    assert!(took < bound, "a dead holder blocked the lock for {took:?}");
}

async fn a_silent_holder_is_freed(scene: Fixture) {
    let store = scene.two.store();
    let answer = store.claim(&scene.claim(1), scene.limit()).await.expect("an answer");
    let Answer::Granted(mut silent) = answer else { panic!("not granted: {answer:?}") };
    let began = scene.clock.now();
    let next = scene.acquire(&scene.one).await;
    let took = scene.clock.now().since(began);
    let bound = scene.ttl() * 2 + Duration::from_secs(5);
    assert!(took < bound, "a holder that did not renew blocked the lock for {took:?}");
    scene.check_order(silent.token, next.fencing_token());
    let refused = silent.hold.renew(scene.ttl(), scene.limit()).await.expect_err("another's now");
    assert!(refused.is_refusal(), "{refused}");
    next.release().await.expect("the next holder still had it");
}

async fn an_evicted_holder_learns_of_it(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let (store, key) = (scene.two.store(), scene.key());
    store.evict(&key, guard.fencing_token(), "a test").await.expect("evicted");
    let lost = guard.lost().await;
    assert!(matches!(lost.reason, Loss::Evicted | Loss::Taken), "{lost}");
    assert!(!guard.is_held() && guard.remaining().is_zero());
    assert!(lost.to_string().contains(key.as_str()), "{lost}");
    let next = scene.acquire(&scene.two).await;
    assert!(next.fencing_token() > lost.token, "tokens grow over an eviction");
}

async fn eviction_needs_the_token(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let other = FencingToken::from_u128(guard.fencing_token().as_u128() ^ 1);
    let error = scene.two.store().evict(&scene.key(), other, "a test").await.expect_err("not it");
    assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}");
    let far = FencingToken::new(guard.fencing_token().epoch() ^ 1, guard.fencing_token().number());
    let error = scene.two.store().evict(&scene.key(), far, "a test").await.expect_err("not it");
    assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}");
    guard.release().await.expect("still held");
}

async fn releasing_a_lost_hold_leaves_the_next_holder_unaffected(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let store = scene.two.store();
    store.evict(&scene.key(), guard.fencing_token(), "a test").await.expect("evicted");
    let next = scene.acquire(&scene.two).await;
    let error = guard.release().await.expect_err("it was lost");
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    let state = scene.state().await;
    assert_eq!(state.holders.first().map(|holder| holder.token), Some(next.fencing_token()));
    next.release().await.expect("the next holder still had it");
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
    assert_eq!(guard.run(async { 7 }).await.expect("held"), 7);
    let work = Work(Arc::clone(&dropped));
    let endless = guard.run(async move {
        let _work = work;
        std::future::pending::<()>().await;
    });
    let evict = async {
        let store = scene.two.store();
        store.evict(&scene.key(), guard.fencing_token(), "a test").await.expect("evicted");
    };
    let (ended, ()) = tokio::join!(endless, evict);
    assert_eq!(ended.expect_err("lost").kind(), ErrorKind::Lost);
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
}

async fn ending_comes_before_the_end(scene: Fixture) {
    let grace = scene.ttl() / 6;
    let request = scene.lock(&scene.one).stop_grace(grace).keep_alive(false);
    let guard = request.acquire().await.expect("free");
    guard.ending().await;
    assert!(guard.is_held(), "time is left to stop");
    guard.lost().await;
    guard.ending().await;
}
