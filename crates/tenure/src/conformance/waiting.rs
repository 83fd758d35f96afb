//! Waiting for a hold: in order, with wake-ups, in two phases, and within the timeout.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::{Fixture, always, cases, pushes};
use crate::ErrorKind;
use crate::store::{Answer, Capabilities, Claim, Handoff, QueueKind};

cases! {
    a_wait_ends_at_its_timeout: "a waiter whose timeout is over stops waiting and leaves the queue", always;
    release_wakes_the_next: "a release wakes the next waiter without waiting for a poll", pushes;
    first_come_first_served: "waiters are granted in the order of their arrival", is_fifo;
    vanished_waiter_does_not_block_the_queue: "a waiter that dies without leaving the queue does not block it", is_queue;
    no_barging: "a try does not overtake waiters in the queue", is_fifo;
    two_phases: "an enqueued claim is granted and renewed before its owner waits for it", always;
    two_phases_time_out: "a wait for an enqueued claim ends at its timeout, and the claim leaves the queue", always;
    a_pending_that_is_dropped_leaves: "dropping an enqueued claim leaves the queue or frees the lock", always;
    a_waiter_asks_for_hand_off: "a holder is notified of a waiter, by future and by callback", hands_off;
}

fn is_fifo(can: &Capabilities) -> Option<&'static str> {
    (can.queue != QueueKind::Fifo).then_some("the store has no FIFO queue")
}

fn is_queue(can: &Capabilities) -> Option<&'static str> {
    (can.queue == QueueKind::None).then_some("the store has no queue")
}

fn hands_off(can: &Capabilities) -> Option<&'static str> {
    (can.handoff == Handoff::None).then_some("the store does not notify holders of waiters")
}

async fn a_wait_ends_at_its_timeout(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let began = scene.clock.now();
    let timeout = Duration::from_millis(150);
    let error = scene.lock(&scene.two).timeout(timeout).acquire().await.expect_err("it is held");
    let took = scene.clock.now().since(began);
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(took >= timeout, "gave up after {took:?}");
    assert!(took < timeout + Duration::from_secs(3), "gave up only after {took:?}");
    scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
    guard.release().await.expect("released");
}

async fn release_wakes_the_next(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let waiter = tokio::spawn(scene.lock(&scene.two).acquire());
    if scene.can().queue == QueueKind::None {
        tokio::time::sleep(Duration::from_millis(50)).await;
    } else {
        scene.wait_until("a waiter", |state| state.waiters.len() == 1).await;
    }
    let began = scene.clock.now();
    guard.release().await.expect("released");
    drop(waiter.await.expect("no panic").expect("granted"));
    let took = scene.clock.now().since(began);
    assert!(took < Duration::from_millis(700), "woken after {took:?}: that was a poll");
}

async fn first_come_first_served(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let order = Arc::new(AtomicU32::new(0));
    let mut waiters = tokio::task::JoinSet::new();
    for place in 0..5 {
        let client = if place % 2 == 0 { &scene.one } else { &scene.two };
        let (request, order) = (scene.lock(client), Arc::clone(&order));
        waiters.spawn(async move {
            let guard = request.acquire().await.expect("granted");
            assert_eq!(order.fetch_add(1, Ordering::SeqCst), place, "granted out of order");
            guard.release().await.expect("released");
        });
        let queued = place as usize + 1;
        scene.wait_until("one more waiter", |state| state.waiters.len() == queued).await;
    }
    guard.release().await.expect("released");
    while let Some(waiter) = waiters.join_next().await {
        waiter.expect("granted in order");
    }
    assert_eq!(order.load(Ordering::SeqCst), 5);
}

async fn vanished_waiter_does_not_block_the_queue(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let claim = Claim { queue: true, ..scene.claim(1) };
    let answer = scene.two.store().claim(&claim, scene.limit()).await.expect("an answer");
    let Answer::Queued(place) = answer else { panic!("not queued: {answer:?}") };
    drop(place);
    guard.release().await.expect("released");
    let began = scene.clock.now();
    drop(scene.acquire(&scene.one).await);
    let took = scene.clock.now().since(began);
    let bound = scene.ttl() * 2 + Duration::from_secs(5);
    assert!(took < bound, "a dead waiter blocked the queue for {took:?}");
}

async fn no_barging(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let pending = scene.lock(&scene.two).enqueue().await.expect("queued");
    guard.release().await.expect("released");
    let barging = scene.lock(&scene.one).try_acquire().await.expect_err("a waiter is next");
    assert_eq!(barging.kind(), ErrorKind::Held);
    pending.wait().await.expect("granted").release().await.expect("released");
}

async fn two_phases(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let pending = scene.lock(&scene.two).enqueue().await.expect("enqueued");
    guard.release().await.expect("released");
    scene.wait_until("a grant before the wait", |state| state.holders.len() == 1).await;
    tokio::time::sleep(scene.ttl() * 2).await;
    assert_eq!(scene.state().await.holders.len(), 1, "kept renewed");
    let guard = pending.wait().await.expect("granted");
    assert!(guard.is_held());
    guard.release().await.expect("released");

    let pending = scene.lock(&scene.one).enqueue().await.expect("granted at once");
    pending.wait().await.expect("granted").release().await.expect("released");
}

async fn two_phases_time_out(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let timeout = Duration::from_millis(100);
    let pending = scene.lock(&scene.two).timeout(timeout).enqueue().await.expect("enqueued");
    tokio::time::sleep(timeout * 2).await;
    let began = scene.clock.now();
    let error = pending.wait().await.expect_err("it is held");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let took = scene.clock.now().since(began);
    assert!(took >= timeout, "the timeout counts from the wait, not from the enqueue: {took:?}");
    scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
    guard.release().await.expect("released");
}

async fn a_pending_that_is_dropped_leaves(scene: Fixture) {
    drop(scene.lock(&scene.one).enqueue().await.expect("granted"));
    scene.wait_until_free().await;
    let guard = scene.acquire(&scene.one).await;
    drop(scene.lock(&scene.two).enqueue().await.expect("queued"));
    scene.wait_until("an empty queue", |state| state.waiters.is_empty()).await;
    guard.release().await.expect("released");
    scene.wait_until_free().await;
}

async fn a_waiter_asks_for_hand_off(scene: Fixture) {
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    let request = scene.lock(&scene.one).on_handoff_requested(move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let guard = request.acquire().await.expect("free");
    let early = tokio::time::timeout(Duration::from_millis(50), guard.handoff_requested()).await;
    assert!(early.is_err(), "no waiter yet");
    let pending = scene.lock(&scene.two).enqueue().await.expect("enqueued");
    guard.handoff_requested().await;
    assert!(guard.is_held(), "a request is not a loss");
    // The callback runs on a task of its own, possibly later.
    while asked.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    guard.release().await.expect("released");
    let next = pending.wait().await.expect("handed over");

    let crowd = scene.lock(&scene.one).enqueue().await.expect("enqueued");
    next.handoff_requested().await;
    drop((next, crowd));
    scene.wait_until_free().await;
    assert_eq!(asked.load(Ordering::SeqCst), 1, "the callback is called once");
}
