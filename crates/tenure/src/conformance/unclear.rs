//! Unavailable stores, and requests with unknown outcome.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::{CaseOutcome, Fault, Fixture, Op, Outcome, cases};
use crate::store::QueueKind;
use crate::{ErrorKind, Loss};

cases! {
    an_unavailable_store_differs_from_a_held_lock: "an acquire on an unavailable store ends at its timeout with Unavailable, not with Timeout", [];
    a_short_outage_loses_nothing: "a hold outlives an outage shorter than its lease, and failed renewals are reported", [LEASE];
    a_long_outage_is_a_loss: "a hold that cannot be renewed is lost at its deadline", [LEASE];
    a_claim_whose_reply_is_lost_is_found_again: "a grant whose reply was lost is found by repeating the claim", [];
    a_claim_that_is_lost_is_sent_again: "a claim that did not reach the store is sent again", [];
    a_place_whose_wait_fails_is_found_again: "a wait that fails loses neither the place nor the grant", [];
    an_unknown_outcome_is_no_plain_failure: "an acquire that times out with an unknown outcome reports Unknown, and a hold it was granted is released", [];
    a_renewal_whose_reply_is_lost_changes_nothing: "a renewal whose reply was lost does not end the hold", [LEASE];
    a_release_whose_reply_is_lost_is_a_release: "a release succeeds even if its reply or its first request was lost", [];
}

async fn an_unavailable_store_differs_from_a_held_lock(scene: Fixture) {
    scene.faults.set_down(true);
    let request = || scene.lock(&scene.one).timeout(Duration::from_millis(200));
    request().acquire().await.fails(ErrorKind::Unavailable, "LockRequest::acquire");
    request().try_acquire().await.fails(ErrorKind::Unavailable, "LockRequest::try_acquire");
    let failed = scene.faults.ended(Op::Claim);
    let later = tokio::spawn(scene.lock(&scene.one).acquire());
    scene.wait_for("a failed claim", || scene.faults.ended(Op::Claim) > failed).await;
    scene.faults.heal();
    drop(later.await.expect("no panic").succeeds("LockRequest::acquire after an outage"));
}

async fn a_short_outage_loses_nothing(scene: Fixture) {
    let failures = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&failures);
    let request = scene.lock(&scene.one).on_renewal_error(move |error| {
        // A slow renewal that was in flight before the outage has an unknown outcome and does not prove the outage.
        if error.kind() != ErrorKind::Unknown {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let guard = request.acquire().await.succeeds("LockRequest::acquire");
    scene.faults.set_down(true);
    while failures.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    scene.faults.heal();
    tokio::time::sleep(scene.ttl() * 2).await;
    assert!(guard.is_held(), "renewed again after the outage");
    guard.release().await.succeeds("Guard::release");
}

async fn a_long_outage_is_a_loss(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    scene.faults.set_down(true);
    let lost = guard.lost().await;
    assert_eq!(lost.reason, Loss::Expired);
    guard.release().await.fails(ErrorKind::Lost, "Guard::release of a lost hold");
    drop(scene.acquire(&scene.two).await);
}

async fn a_claim_whose_reply_is_lost_is_found_again(scene: Fixture) {
    scene.faults.next(Op::Claim, Fault::LoseReply);
    let guard = scene.acquire(&scene.one).await;
    let state = scene.state().await;
    assert_eq!(state.holders.len(), 1, "granted once: {state:?}");
    if scene.can().identities {
        assert_eq!(state.holders[0].token, guard.fencing_token());
    }
    guard.release().await.succeeds("Guard::release");
    scene.wait_until("no holder", |state| state.holders.is_empty()).await;
}

async fn a_claim_that_is_lost_is_sent_again(scene: Fixture) {
    scene.faults.next(Op::Claim, Fault::LoseRequest);
    let guard = scene.acquire(&scene.one).await;
    assert!(guard.is_held());
    guard.release().await.succeeds("Guard::release");
}

async fn a_place_whose_wait_fails_is_found_again(scene: Fixture) {
    let held = scene.acquire(&scene.two).await;
    scene.faults.next(Op::Wait, Fault::LoseRequest);
    scene.faults.next(Op::Wait, Fault::LoseReply);
    let waiter = tokio::spawn(scene.lock(&scene.one).acquire());
    if scene.can().queue == QueueKind::None {
        // There is no place to wait in.
        scene.wait_for("a claim", || scene.faults.ended(Op::Claim) > 0).await;
    } else {
        scene.wait_for("two waits with faults", || scene.faults.unused() == 0).await;
    }
    held.release().await.succeeds("Guard::release");
    let guard = waiter.await.expect("no panic").succeeds("LockRequest::acquire");
    assert_eq!(scene.state().await.holders.len(), 1);
    guard.release().await.succeeds("Guard::release");
}

async fn an_unknown_outcome_is_no_plain_failure(scene: Fixture) -> CaseOutcome {
    scene.faults.always(Op::Claim, Fault::LoseReply);
    let request = scene.lock(&scene.one).timeout(Duration::from_millis(100));
    let acquired = request.acquire().await;
    let error = acquired.fails(ErrorKind::Unknown, "LockRequest::acquire without a reply");
    let until = error.may_be_held_for().expect("the error says for how long");
    assert!(until <= scene.ttl() * 3, "{until:?}");
    scene.faults.heal();
    scene.wait_until_free().await;
    CaseOutcome::Passed
}

async fn a_renewal_whose_reply_is_lost_changes_nothing(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    scene.faults.next(Op::Renew, Fault::LoseReply);
    tokio::time::sleep(scene.ttl() * 2).await;
    assert!(guard.is_held());
    guard.release().await.succeeds("Guard::release");
}

async fn a_release_whose_reply_is_lost_is_a_release(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    scene.faults.next(Op::Release, Fault::LoseReply);
    guard.release().await.succeeds("Guard::release");
    scene.wait_until("no holder", |state| state.holders.is_empty()).await;
    let guard = scene.acquire(&scene.one).await;
    scene.faults.next(Op::Release, Fault::LoseRequest);
    guard.release().await.succeeds("Guard::release");
    scene.wait_until("no holder", |state| state.holders.is_empty()).await;
}
