//! Shared locks and semaphores.

use super::{Fixture, cases};
use crate::store::{Capabilities, QueueKind};
use crate::{Client, ErrorKind, LockRequest};

cases! {
    readers_share_and_writers_do_not: "several readers hold a lock at once; a writer holds it alone", can_share;
    readers_do_not_starve_a_writer: "a reader that arrives after a waiting writer waits behind it", can_share_fairly;
    a_semaphore_has_its_slots: "a semaphore has as many holders as slots, and the next client waits", has_slots;
    a_semaphore_has_one_size: "a claim with another number of slots is refused while the semaphore is in use", has_slots;
    a_semaphore_is_no_lock: "a semaphore and a lock with the same key are independent", has_slots;
    zero_slots_are_refused: "a semaphore without slots is refused", has_slots;
}

fn can_share(can: &Capabilities) -> Option<&'static str> {
    (!can.shared).then_some("the store has no shared locks")
}

fn can_share_fairly(can: &Capabilities) -> Option<&'static str> {
    can_share(can).or((can.queue != QueueKind::Fifo).then_some("the store has no FIFO queue"))
}

fn has_slots(can: &Capabilities) -> Option<&'static str> {
    (!can.semaphore).then_some("the store has no semaphores")
}

async fn readers_share_and_writers_do_not(scene: Fixture) {
    let one = scene.lock(&scene.one).shared().acquire().await.expect("free");
    let two = scene.lock(&scene.two).shared().acquire().await.expect("shared");
    let write = || scene.lock(&scene.two).try_acquire();
    assert_eq!(write().await.expect_err("readers are in").kind(), ErrorKind::Held);
    one.release().await.expect("released");
    assert_eq!(write().await.expect_err("a reader is in").kind(), ErrorKind::Held);
    two.release().await.expect("released");
    let writer = write().await.expect("free");
    let read = scene.lock(&scene.one).shared().try_acquire();
    assert_eq!(read.await.expect_err("a writer is in").kind(), ErrorKind::Held);
    writer.release().await.expect("released");
}

async fn readers_do_not_starve_a_writer(scene: Fixture) {
    let reader = scene.lock(&scene.one).shared().acquire().await.expect("free");
    let writer = scene.lock(&scene.two).enqueue().await.expect("enqueued");
    let late = scene.lock(&scene.one).shared().enqueue().await.expect("enqueued");
    scene.wait_until("two waiters", |state| state.waiters.len() == 2).await;
    reader.release().await.expect("released");
    let writer = writer.wait().await.expect("the writer is next");
    assert_eq!(scene.state().await.holders.len(), 1);
    writer.release().await.expect("released");
    late.wait().await.expect("then the reader").release().await.expect("released");
}

fn slots(scene: &Fixture, client: &Client, slots: u32) -> LockRequest {
    client.semaphore(scene.key(), slots).ttl(scene.ttl()).timeout(scene.max_wait())
}

async fn a_semaphore_has_its_slots(scene: Fixture) {
    let mut held = Vec::new();
    for slot in 0..3 {
        let client = if slot % 2 == 0 { &scene.one } else { &scene.two };
        held.push(slots(&scene, client, 3).try_acquire().await.expect("a slot is free"));
    }
    let full = slots(&scene, &scene.two, 3).try_acquire().await.expect_err("no slot is free");
    assert_eq!(full.kind(), ErrorKind::Held, "{full}");
    let pending = slots(&scene, &scene.two, 3).enqueue().await.expect("enqueued");
    held.remove(1).release().await.expect("released");
    let next = pending.wait().await.expect("a slot came free");
    let newest = held.iter().map(crate::Guard::fencing_token).max().expect("two are held");
    scene.check_order(newest, next.fencing_token());
    let full = slots(&scene, &scene.one, 3).try_acquire().await.expect_err("full again");
    assert_eq!(full.kind(), ErrorKind::Held, "{full}");
}

async fn a_semaphore_has_one_size(scene: Fixture) {
    let held = slots(&scene, &scene.one, 2).acquire().await.expect("free");
    let other = slots(&scene, &scene.two, 3).acquire().await.expect_err("another size");
    assert_eq!(other.kind(), ErrorKind::Invalid, "{other}");
    held.release().await.expect("released");
    let resized = slots(&scene, &scene.two, 3).acquire().await;
    drop(resized.expect("the old size is no longer in use"));
}

async fn a_semaphore_is_no_lock(scene: Fixture) {
    let lock = scene.acquire(&scene.one).await;
    let slot = slots(&scene, &scene.two, 1).try_acquire().await.expect("independent of the lock");
    lock.release().await.expect("released");
    slot.release().await.expect("released");
}

async fn zero_slots_are_refused(scene: Fixture) {
    let error = slots(&scene, &scene.one, 0).acquire().await.expect_err("no slots");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}
