//! Shared locks and semaphores.

use super::{Fixture, Outcome, cases};
use crate::{Client, ErrorKind, LockRequest};

cases! {
    readers_share_and_writers_do_not: "several readers hold a lock at once; a writer holds it alone", [SHARED];
    readers_do_not_starve_a_writer: "a reader that arrives after a waiting writer waits behind it", [SHARED, FIFO];
    a_semaphore_has_its_slots: "a semaphore has as many holders as slots, and the next client waits", [SEMAPHORE];
    a_semaphore_has_one_size: "a claim with another number of slots is refused while the semaphore is in use", [SEMAPHORE];
    a_semaphore_is_no_lock: "a semaphore and a lock with the same key are independent", [SEMAPHORE];
    zero_slots_are_refused: "a semaphore without slots is refused", [SEMAPHORE];
}

async fn readers_share_and_writers_do_not(scene: Fixture) {
    let one = scene.lock(&scene.one).shared().acquire().await.succeeds("LockRequest::acquire");
    let two = scene.lock(&scene.two).shared().acquire().await.succeeds("LockRequest::acquire");
    let write = || scene.lock(&scene.two).try_acquire();
    write().await.fails(ErrorKind::Held, "LockRequest::try_acquire while two readers hold");
    one.release().await.succeeds("Guard::release");
    write().await.fails(ErrorKind::Held, "LockRequest::try_acquire while a reader holds");
    two.release().await.succeeds("Guard::release");
    let writer = write().await.succeeds("LockRequest::try_acquire");
    let read = scene.lock(&scene.one).shared().try_acquire();
    read.await.fails(ErrorKind::Held, "a shared LockRequest::try_acquire while a writer holds");
    writer.release().await.succeeds("Guard::release");
}

async fn readers_do_not_starve_a_writer(scene: Fixture) {
    let reader = scene.lock(&scene.one).shared().acquire().await.succeeds("LockRequest::acquire");
    let writer = scene.lock(&scene.two).enqueue().await.succeeds("LockRequest::enqueue");
    let late = scene.lock(&scene.one).shared().enqueue().await.succeeds("LockRequest::enqueue");
    scene.wait_until("two waiters", |state| state.waiters.len() == 2).await;
    reader.release().await.succeeds("Guard::release");
    let writer = writer.wait().await.succeeds("Pending::wait");
    assert_eq!(scene.state().await.holders.len(), 1);
    writer.release().await.succeeds("Guard::release");
    late.wait().await.succeeds("Pending::wait").release().await.succeeds("Guard::release");
}

fn slots(scene: &Fixture, client: &Client, slots: u32) -> LockRequest {
    client.semaphore(scene.key(), slots).ttl(scene.ttl()).timeout(scene.max_wait())
}

async fn a_semaphore_has_its_slots(scene: Fixture) {
    let mut held = Vec::new();
    for slot in 0..3 {
        let client = if slot % 2 == 0 { &scene.one } else { &scene.two };
        held.push(
            slots(&scene, client, 3).try_acquire().await.succeeds("LockRequest::try_acquire"),
        );
    }
    let full = slots(&scene, &scene.two, 3).try_acquire().await;
    full.fails(ErrorKind::Held, "LockRequest::try_acquire without a free slot");
    let pending = slots(&scene, &scene.two, 3).enqueue().await.succeeds("LockRequest::enqueue");
    held.remove(1).release().await.succeeds("Guard::release");
    let next = pending.wait().await.succeeds("Pending::wait");
    let newest = held.iter().map(crate::Guard::fencing_token).max().expect("two are held");
    scene.check_order(newest, next.fencing_token());
    let full = slots(&scene, &scene.one, 3).try_acquire().await;
    full.fails(ErrorKind::Held, "LockRequest::try_acquire without a free slot");
}

async fn a_semaphore_has_one_size(scene: Fixture) {
    let held = slots(&scene, &scene.one, 2).acquire().await.succeeds("LockRequest::acquire");
    let other = slots(&scene, &scene.two, 3).acquire().await;
    other.fails(ErrorKind::Invalid, "LockRequest::acquire with another number of slots");
    held.release().await.succeeds("Guard::release");
    let resized = slots(&scene, &scene.two, 3).acquire().await;
    drop(resized.succeeds("LockRequest::acquire of an unused semaphore"));
}

async fn a_semaphore_is_no_lock(scene: Fixture) {
    let lock = scene.acquire(&scene.one).await;
    let slot =
        slots(&scene, &scene.two, 1).try_acquire().await.succeeds("LockRequest::try_acquire");
    lock.release().await.succeeds("Guard::release");
    slot.release().await.succeeds("Guard::release");
}

async fn zero_slots_are_refused(scene: Fixture) {
    let acquired = slots(&scene, &scene.one, 0).acquire().await;
    acquired.fails(ErrorKind::Invalid, "LockRequest::acquire without slots");
}
