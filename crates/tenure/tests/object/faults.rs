//! What the plain algorithm gets wrong, row by row, and replies that never come.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::json;
use tenure::{Client, ErrorKind, Guard, LockRequest, Loss};

use crate::fake::{Fake, Fault, Op};

const TTL: Duration = Duration::from_millis(1_200);
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) async fn client(fake: &Fake) -> Client {
    Client::connect(&fake.store("p")).await.expect("a good URL")
}

pub(crate) fn lock(client: &Client) -> LockRequest {
    client.lock("k").ttl(TTL).timeout(PATIENCE)
}

async fn held(client: &Client) -> Guard {
    lock(client).acquire().await.expect("free")
}

/// Waits until `done`.
pub(crate) async fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..4_000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what} did not come about");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_of_the_store_that_is_far_from_ours_changes_nothing() {
    for skew in [-90, 90, 600] {
        let fake = Fake::quick();
        fake.set(|manner| manner.skew = skew);
        let (one, two) = (client(&fake).await, client(&fake).await);
        let guard = held(&one).await;
        let refused = lock(&two).try_acquire().await.expect_err("held");
        assert_eq!(refused.kind(), ErrorKind::Held);
        let expires = fake.object("p/k").expect("there")["expiresAt"].as_f64().expect("a number");
        let left = expires - fake.now();
        assert!((0.0..=1.3).contains(&left), "the end is told in the store's time: {left}");
        guard.release().await.expect("ours");
    }
}

/// A waiter of the plain format writes in the middle of a renewal: the renewal finds another version, reads, keeps the
/// mark and renews.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_registers_during_a_renewal_is_seen_and_the_renewal_is_made() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let guard = held(&one).await;
    mark(&fake, "py", 5.0);
    guard.handoff_requested().await;
    tokio::time::sleep(TTL * 2).await;
    assert!(guard.is_held(), "renewed with the mark in the record");
    let record = fake.object("p/k").expect("there");
    assert!(record["fence"].is_u64() && record["leaseMs"] == 1_200, "{record}");
    guard.release().await.expect("ours");
}

/// A waiter of the plain format leaves its mark: only the four plain fields stay.
fn mark(fake: &Fake, waiter: &str, seconds: f64) {
    loop {
        let (record, generation) = fake.read("p/k");
        let record = record.expect("held");
        let marked = json!({
            "ownerId": record["ownerId"], "expiresAt": record["expiresAt"],
            "waitingOwnerId": waiter, "waiterExpiresAt": fake.now() + seconds,
        });
        if fake.swap("p/k", generation, Some(&marked)) {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_registers_during_a_release_is_next() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let guard = lock(&one).ttl(PATIENCE).acquire().await.expect("free");
    mark(&fake, "py", 60.0);
    guard.release().await.expect("released at the second write");
    let record = fake.object("p/k").expect("a released record stays");
    assert_eq!((&record["expiresAt"], &record["waitingOwnerId"]), (&json!(0.0), &json!("py")));
    let error = lock(&one).try_acquire().await.expect_err("the waiter's alone");
    assert_eq!(error.kind(), ErrorKind::Held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_leaves_the_number_and_not_nothing() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let guard = held(&one).await;
    let token = guard.fencing_token();
    guard.release().await.expect("ours");
    assert_eq!(fake.object("p/k").expect("stays")["fence"], token.number());
    let again = held(&one).await;
    assert_eq!(again.fencing_token().number(), token.number() + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_gives_up_leaves_the_place() {
    let fake = Fake::quick();
    let (one, two) = (client(&fake).await, client(&fake).await);
    let guard = held(&one).await;
    let given_up = lock(&two).timeout(Duration::from_millis(150)).acquire().await;
    assert_eq!(given_up.expect_err("held").kind(), ErrorKind::Timeout);
    until("an empty place", || !fake.names().contains(&"p/k.bell".to_owned())).await;
    let pending = lock(&two).enqueue().await.expect("the place is free");
    guard.release().await.expect("ours");
    drop(pending.wait().await.expect("next"));
}

/// The reply to each kind of write is lost after it was done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_is_lost_after_the_write_changes_nothing() {
    let fake = Fake::quick();
    let (one, two) = (client(&fake).await, client(&fake).await);
    for fault in [Fault::DropReply, Fault::Fail(503), Fault::Fail(500)] {
        // Create or take over.
        fake.next(Op::Write, "p/k", fault);
        let guard = lock(&one).try_acquire().await.expect("granted, whatever was heard");
        assert!(guard.is_held() && fake.is_quiet());
        let before = fake.object("p/k").expect("held")["fence"].clone();
        assert_eq!(before, guard.fencing_token().number(), "granted once");
        // Renew.
        fake.next(Op::Write, "p/k", fault);
        until("a renewal", || fake.is_quiet()).await;
        tokio::time::sleep(TTL).await;
        assert!(guard.is_held(), "a renewal that landed unheard");
        // The bell.
        fake.next(Op::Write, "p/k.bell", fault);
        let pending = lock(&two).enqueue().await.expect("queued");
        guard.handoff_requested().await;
        // The grant to the waiter.
        fake.next(Op::Write, "p/k", fault);
        guard.release().await.expect("released, whatever was heard");
        let next = pending.wait().await.expect("granted");
        assert_eq!(next.fencing_token().number(), before.as_u64().expect("a number") + 1);
        // Release.
        fake.next(Op::Write, "p/k", fault);
        next.release().await.expect("released, whatever was heard");
        assert!(fake.is_quiet());
        until("a free lock", || fake.object("p/k").expect("stays")["expiresAt"] == 0.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_that_fail_are_told_and_tried_again_until_the_deadline() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let failed = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&failed);
    let request = lock(&one).on_renewal_error(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let guard = request.acquire().await.expect("free");
    // The write and the look after it, within one renewal.
    fake.next(Op::Write, "p/k", Fault::Refuse(503));
    fake.next(Op::Read, "p/k", Fault::Refuse(503));
    until("a failed renewal", || failed.load(Ordering::SeqCst) > 0).await;
    tokio::time::sleep(TTL).await;
    assert!(guard.is_held(), "one failed renewal is no loss");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_writes_are_contention_and_no_failure() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    fake.next(Op::Write, "p/k", Fault::Refuse(429));
    let guard = held(&one).await;
    let failed = Arc::new(AtomicU32::new(0));
    guard.release().await.expect("ours");
    let count = Arc::clone(&failed);
    let request = lock(&one).ttl(Duration::from_secs(12)).on_renewal_error(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let guard = request.acquire().await.expect("free");
    fake.next(Op::Write, "p/k", Fault::Refuse(429));
    until("a renewal that was too early", || fake.is_quiet()).await;
    guard.release().await.expect("ours");
    assert_eq!(failed.load(Ordering::SeqCst), 0, "no failed renewal");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_or_overwritten_object_is_reported_lost_within_one_renewal() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let ttl = Duration::from_secs(3);
    for deed in 0..4 {
        let guard = lock(&one).ttl(ttl).acquire().await.expect("free");
        match deed {
            0 => fake.remove("p/k"),
            1 => fake.put("p/k", "not a lock"),
            2 => {
                let record = json!({"ownerId": "py", "expiresAt": fake.now() + 2.0});
                fake.put("p/k", record.to_string());
            }
            _ => fake.put("p/k", json!({"ownerId": "", "expiresAt": 0}).to_string()),
        }
        // A renewal every third of the ttl, and a moment for it.
        let lost = tokio::time::timeout(ttl / 3 + ttl / 8, guard.lost()).await;
        let lost = lost.expect("within one renewal");
        assert_eq!(lost.reason, Loss::Taken, "{deed}");
        fake.remove("p/k");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_write_is_unlike_every_other() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let mut nonces = Vec::new();
    for _ in 0..3 {
        let guard = held(&one).await;
        nonces.push(fake.object("p/k").expect("held")["nonce"].to_string());
        guard.release().await.expect("ours");
        nonces.push(fake.object("p/k").expect("stays")["nonce"].to_string());
    }
    nonces.sort();
    nonces.dedup();
    assert_eq!(nonces.len(), 6, "{nonces:?}");
}

/// A creation is not confirmed in time, and lands after the store was read without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_lands_late_is_settled_by_the_next_one() {
    for millis in [250, 400, 700] {
        let fake = Fake::quick();
        let one = client(&fake).await;
        fake.next(Op::Write, "p/k", Fault::Delay(millis));
        let guard = held(&one).await;
        let record = fake.object("p/k").expect("held");
        until("the late write", || !fake.is_delaying()).await;
        assert!(guard.is_held(), "whatever landed is ours");
        let later = fake.object("p/k").expect("held");
        assert_eq!(later["ownerId"], record["ownerId"]);
        assert_eq!(later["fence"], guard.fencing_token().number(), "granted once");
        guard.release().await.expect("ours");
    }
}

/// A waiter is gone while the write is on its way by which it takes the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_leaves_in_the_middle_of_its_write_leaves_nothing() {
    let plain = json!({"ownerId": "py", "expiresAt": 9e9});
    let with_bell = json!({"ownerId": "us", "expiresAt": 9e9, "leaseMs": 60_000, "fence": 1});
    for (millis, owner) in [(300, &plain), (1_500, &plain), (300, &with_bell)] {
        let fake = Fake::quick();
        let one = client(&fake).await;
        fake.put("p/k", owner.to_string());
        let waiting = tokio::spawn(lock(&one).ttl(PATIENCE).acquire());
        let named = || {
            let record = fake.object("p/k");
            record.is_some_and(|record| record["waitingOwnerId"].is_string())
                || fake.object("p/k.bell").is_some()
        };
        until("our mark", named).await;
        fake.next(Op::Write, "p/k", Fault::Delay(millis));
        fake.remove("p/k");
        until("a write on its way", || fake.is_quiet()).await;
        waiting.abort();
        until("the write", || !fake.is_delaying()).await;
        let free = || fake.object("p/k").is_none_or(|record| record["expiresAt"] == 0.0);
        until("a free lock", free).await;
    }
}

/// An owner that read the bell before its waiter cleared it grants the lock to a waiter that is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_crosses_the_departure_of_its_waiter_is_released() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    // A waiter that leaves waits for such a grant for as long as it polls, up to a limit.
    let url = fake.store("p").replace("poll=20ms", "poll=1s");
    let two = Client::connect(&url).await.expect("a good URL");
    let guard = lock(&one).ttl(PATIENCE).acquire().await.expect("free");
    let waiting = tokio::spawn(lock(&two).ttl(PATIENCE).acquire());
    until("a bell", || fake.object("p/k.bell").is_some()).await;
    fake.next(Op::Write, "p/k", Fault::Delay(50));
    let released = tokio::spawn(guard.release());
    until("a write on its way", || fake.is_quiet()).await;
    waiting.abort();
    released.await.expect("no panic").expect("ours");
    let free = || fake.object("p/k").is_some_and(|record| record["expiresAt"] == 0.0);
    until("a free lock", free).await;
}

/// Google promises of generations that they differ, not that they grow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_grow_although_generations_fall() {
    let fake = Fake::quick();
    fake.fall();
    let (one, two) = (client(&fake).await, client(&fake).await);
    let guard = held(&one).await;
    let (first, before) = (guard.fencing_token().number(), fake.read("p/k").1);
    let pending = lock(&two).enqueue().await.expect("queued");
    guard.handoff_requested().await;
    guard.release().await.expect("ours");
    let next = pending.wait().await.expect("handed over");
    assert_eq!(next.fencing_token().number(), first + 1);
    next.release().await.expect("ours");
    assert_eq!(held(&one).await.fencing_token().number(), first + 2);
    assert!(fake.read("p/k").1 < before, "the generations did fall");
}

/// A waiter whose mark is gone makes it again: at the bell, after another's that has ended, and in the record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_is_displaced_registers_again() {
    let fake = Fake::quick();
    let (one, two) = (client(&fake).await, client(&fake).await);
    let guard = held(&one).await;
    let waiting = tokio::spawn(lock(&two).acquire());
    let rings =
        || fake.object("p/k.bell").and_then(|bell| bell["waiterId"].as_str().map(str::to_owned));
    until("a bell", || rings().is_some()).await;
    let ours = rings();
    fake.remove("p/k.bell");
    until("the bell again", || rings() == ours).await;
    let other = |life: u32| json!({"waiterId": "other", "leaseMs": life, "lifeMs": life});
    fake.put("p/k.bell", other(60_000).to_string());
    fake.seen();
    let looks = AtomicU32::new(0);
    let look = |(op, name, _): &(Op, String, u16)| *op == Op::Read && name == "p/k.bell";
    until("several looks at the bell", || {
        let seen = fake.seen().iter().filter(|seen| look(seen)).count();
        looks.fetch_add(u32::try_from(seen).expect("few"), Ordering::SeqCst) > 5
    })
    .await;
    assert_eq!(rings().as_deref(), Some("other"), "as long as another has it, it is the other's");
    fake.put("p/k.bell", other(500).to_string());
    until("the place again", || rings() == ours).await;
    // From here on the owner is one of the plain format, and writes over the mark in its record.
    let plain =
        || fake.put("p/k", json!({"ownerId": "py", "expiresAt": fake.now() + 60.0}).to_string());
    let named = || {
        fake.object("p/k").and_then(|record| record["waitingOwnerId"].as_str().map(str::to_owned))
    };
    for _ in 0..2 {
        plain();
        until("our mark", || named().is_some() && named() == ours).await;
    }
    fake.remove("p/k");
    drop(waiting.await.expect("no panic").expect("granted"));
    drop(guard);
}
