//! Waiting for a hold: in order, with wake-ups, in two phases, and within the timeout.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::outcome::{enqueue, grant};
use super::{Fixture, Op, Outcome, cases};
use crate::ErrorKind;
use crate::store::{KeyState, QueueKind, Waited};

cases! {
    a_wait_ends_at_its_timeout: "a waiter whose timeout is over stops waiting and leaves the queue", [];
    release_wakes_the_next: "a release wakes the next waiter without waiting for a poll", [PUSH];
    first_come_first_served: "waiters are granted in the order of their arrival", [FIFO];
    vanished_waiter_does_not_block_the_queue: "a waiter that dies without leaving the queue does not block it", [QUEUE];
    a_wait_returns_at_its_limit: "Place::wait returns when its limit has passed, and the place is kept", [QUEUE];
    an_abandoned_place_is_gone: "after Place::abandon, the claim has no place, and the next claim is granted without delay", [QUEUE];
    abandoning_releases_a_grant: "Place::abandon releases a grant that has arrived meanwhile", [QUEUE];
    no_barging: "a try does not overtake waiters in the queue", [FIFO];
    two_phases: "an enqueued claim is granted and renewed before its owner waits for it", [];
    two_phases_time_out: "a wait for an enqueued claim ends at its timeout, and the claim leaves the queue", [];
    a_pending_that_is_dropped_leaves: "dropping an enqueued claim leaves the queue or frees the lock", [];
    a_waiter_asks_for_hand_off: "a holder is notified of a waiter, by future and by callback", [HANDOFF];
}

async fn a_wait_ends_at_its_timeout(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let began = scene.clock.now();
    let timeout = Duration::from_millis(150);
    let acquired = scene.lock(&scene.two).timeout(timeout).acquire().await;
    let took = scene.clock.now().since(began);
    acquired.fails(ErrorKind::Timeout, "LockRequest::acquire of a held lock");
    assert!(took >= timeout, "gave up after {took:?}");
    assert!(took < timeout + Duration::from_secs(3), "gave up only after {took:?}");
    scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
    guard.release().await.succeeds("Guard::release");
}

async fn release_wakes_the_next(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let (client, requests) = scene.counted(&scene.two);
    let waiter = tokio::spawn(scene.lock(&client).acquire());
    if scene.can().queue == QueueKind::None {
        scene.wait_for("a waiter that watches", || requests.sent(Op::Changed) > 0).await;
    } else {
        scene.wait_until("a waiter", |state| state.waiters.len() == 1).await;
    }
    let began = scene.clock.now();
    guard.release().await.succeeds("Guard::release");
    drop(waiter.await.expect("no panic").succeeds("LockRequest::acquire"));
    let took = scene.clock.now().since(began);
    assert!(took < Duration::from_millis(700), "woken after {took:?}: that was a poll");
}

async fn first_come_first_served(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let order = Arc::new(AtomicU32::new(0));
    let mut waiters = tokio::task::JoinSet::new();
    for place in 0..5 {
        let client = if place % 2 == 0 { &scene.one } else { &scene.two };
        // A store may let waiters queue again once per ttl, to prove that they live: the case is shorter than that.
        let request = scene.lock(client).ttl(scene.ttl() * 20);
        let order = Arc::clone(&order);
        waiters.spawn(async move {
            let guard = request.acquire().await.succeeds("LockRequest::acquire");
            assert_eq!(order.fetch_add(1, Ordering::SeqCst), place, "granted out of order");
            guard.release().await.succeeds("Guard::release");
        });
        let queued = place as usize + 1;
        scene.wait_until("one more waiter", |state| state.waiters.len() == queued).await;
    }
    guard.release().await.succeeds("Guard::release");
    while let Some(waiter) = waiters.join_next().await {
        waiter.expect("granted in order");
    }
    assert_eq!(order.load(Ordering::SeqCst), 5);
}

async fn vanished_waiter_does_not_block_the_queue(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    drop(enqueue(&**scene.two.store(), &scene.claim(1)).await);
    guard.release().await.succeeds("Guard::release");
    let began = scene.clock.now();
    drop(scene.acquire(&scene.one).await);
    let took = scene.clock.now().since(began);
    let bound = scene.ttl() * 2 + Duration::from_secs(5);
    assert!(took < bound, "a dead waiter blocked the queue for {took:?}");
}

async fn a_wait_returns_at_its_limit(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let mut place = enqueue(&**scene.two.store(), &scene.claim(1)).await;
    let limit = Duration::from_millis(100);
    for _ in 0..2 {
        let began = scene.clock.now();
        let waited = tokio::time::timeout(limit + SLOW_MACHINE, place.wait(limit)).await;
        let took = scene.clock.now().since(began);
        let Ok(waited) = waited else { panic!("Place::wait with limit {limit:?} took {took:?}") };
        let waited = waited.succeeds("Place::wait");
        let kept = matches!(waited, Waited::StillQueued { .. });
        assert!(kept, "expected StillQueued from Place::wait, got {waited:?}");
    }
    place.abandon(scene.limit()).await.succeeds("Place::abandon");
    guard.release().await.succeeds("Guard::release");
}

/// Allowance for a request on a loaded machine.
const SLOW_MACHINE: Duration = Duration::from_secs(10);

async fn an_abandoned_place_is_gone(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    // Leases so long that their end cannot be taken for the effect of the call.
    let [gone, next] = [1, 2].map(|nth| scene.long_claim(nth));
    let store = scene.two.store();
    let mut place = enqueue(&**store, &gone).await;
    place.abandon(scene.limit()).await.succeeds("Place::abandon");
    let gone = |state: &KeyState| state.waiters.is_empty();
    scene.wait_within(SLOW_MACHINE, "an empty queue after Place::abandon", gone).await;
    place.abandon(scene.limit()).await.may_fail(ErrorKind::NotHeld, "a second Place::abandon");
    guard.release().await.succeeds("Guard::release");
    let mut next = grant(&**store, &next).await;
    next.hold.release(scene.limit()).await.succeeds("Hold::release");
}

async fn abandoning_releases_a_grant(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let [gone, next] = [1, 2].map(|nth| scene.long_claim(nth));
    let store = scene.two.store();
    let mut place = enqueue(&**store, &gone).await;
    // After a release, the next waiter holds the lock already, on a store that hands it over by itself.
    guard.release().await.succeeds("Guard::release");
    place.abandon(scene.limit()).await.may_fail(ErrorKind::NotHeld, "Place::abandon");
    let free = |state: &KeyState| !state.is_in_use();
    scene.wait_within(SLOW_MACHINE, "a free key after Place::abandon", free).await;
    let mut next = grant(&**store, &next).await;
    next.hold.release(scene.limit()).await.succeeds("Hold::release");
}

async fn no_barging(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let pending = scene.lock(&scene.two).enqueue().await.succeeds("LockRequest::enqueue");
    guard.release().await.succeeds("Guard::release");
    let barging = scene.lock(&scene.one).try_acquire().await;
    barging.fails(ErrorKind::Held, "LockRequest::try_acquire past a waiter");
    pending.wait().await.succeeds("Pending::wait").release().await.succeeds("Guard::release");
}

async fn two_phases(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let pending = scene.lock(&scene.two).enqueue().await.succeeds("LockRequest::enqueue");
    guard.release().await.succeeds("Guard::release");
    scene.wait_until("a grant before the wait", |state| state.holders.len() == 1).await;
    tokio::time::sleep(scene.ttl() * 2).await;
    assert_eq!(scene.state().await.holders.len(), 1, "kept renewed");
    let guard = pending.wait().await.succeeds("Pending::wait");
    assert!(guard.is_held());
    guard.release().await.succeeds("Guard::release");

    let pending = scene.lock(&scene.one).enqueue().await.succeeds("LockRequest::enqueue");
    pending.wait().await.succeeds("Pending::wait").release().await.succeeds("Guard::release");
}

async fn two_phases_time_out(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let timeout = Duration::from_millis(100);
    let pending =
        scene.lock(&scene.two).timeout(timeout).enqueue().await.succeeds("LockRequest::enqueue");
    tokio::time::sleep(timeout * 2).await;
    let began = scene.clock.now();
    pending.wait().await.fails(ErrorKind::Timeout, "Pending::wait for a held lock");
    let took = scene.clock.now().since(began);
    assert!(took >= timeout, "the timeout counts from the wait, not from the enqueue: {took:?}");
    scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
    guard.release().await.succeeds("Guard::release");
}

async fn a_pending_that_is_dropped_leaves(scene: Fixture) {
    drop(scene.lock(&scene.one).enqueue().await.succeeds("LockRequest::enqueue"));
    scene.wait_until_free().await;
    let guard = scene.acquire(&scene.one).await;
    drop(scene.lock(&scene.two).enqueue().await.succeeds("LockRequest::enqueue"));
    scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
    guard.release().await.succeeds("Guard::release");
    scene.wait_until_free().await;
}

async fn a_waiter_asks_for_hand_off(scene: Fixture) {
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    let request = scene.lock(&scene.one).on_handoff_requested(move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let guard = request.acquire().await.succeeds("LockRequest::acquire");
    let early = tokio::time::timeout(Duration::from_millis(50), guard.handoff_requested()).await;
    assert!(early.is_err(), "no waiter yet");
    let pending = scene.lock(&scene.two).enqueue().await.succeeds("LockRequest::enqueue");
    guard.handoff_requested().await;
    assert!(guard.is_held(), "a request is not a loss");
    // The callback runs on a task of its own, possibly later.
    while asked.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    guard.release().await.succeeds("Guard::release");
    let next = pending.wait().await.succeeds("Pending::wait");

    let crowd = scene.lock(&scene.one).enqueue().await.succeeds("LockRequest::enqueue");
    next.handoff_requested().await;
    drop((next, crowd));
    scene.wait_until_free().await;
    assert_eq!(asked.load(Ordering::SeqCst), 1, "the callback is called once");
}
