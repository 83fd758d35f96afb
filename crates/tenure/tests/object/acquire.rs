//! The ways to acquire: try, wait if no other client waits, wait for the place as well. The timeout covers all of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tenure::store::{Answer, Claim, Identity, LeaseStart, Mode};
use tenure::{Client, ErrorKind, Key};

use crate::fake::Fake;
use crate::faults::{client, lock, until};

const NAME: &str = "p/k";
const BELL: &str = "p/k.bell";

fn rings(fake: &Fake) -> Option<String> {
    fake.object(BELL)?["waiterId"].as_str().map(str::to_owned)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_is_contention_at_once_whether_the_lock_or_the_place_is_taken() {
    let fake = Fake::quick();
    let (one, two) = (client(&fake).await, client(&fake).await);
    let guard = lock(&one).id("the-first").acquire().await.expect("free");
    let waiting = tokio::spawn(lock(&two).acquire());
    for _ in 0..2 {
        let asked = Instant::now();
        let error = lock(&two).try_acquire().await.expect_err("held");
        assert!(asked.elapsed() < Duration::from_millis(300), "{:?}", asked.elapsed());
        assert_eq!(error.kind(), ErrorKind::Held, "{error}");
        assert!(error.kind().is_held_by_another() && error.to_string().contains("the-first"));
        assert!(lock(&two).try_run(async |_| ()).await.expect("no failure").is_none());
        until("a bell", || rings(&fake).is_some()).await;
    }
    // Released, and the waiter's alone.
    fake.put(NAME, json!({"ownerId": "py", "expiresAt": 0, "waitingOwnerId": "x", "waiterExpiresAt": fake.now() + 9.0}).to_string());
    let error = lock(&two).try_acquire().await.expect_err("awaited");
    assert_eq!(error.kind(), ErrorKind::Held, "{error}");
    drop((guard, waiting));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_write_of_a_release_makes_the_waiter_at_the_bell_the_owner() {
    let fake = Fake::quick();
    let guard = lock(&client(&fake).await).acquire().await.expect("free");
    // A waiter that does not poll: it cannot take the lock by itself.
    let bell = json!({"waiterId": "other", "leaseMs": 30_000, "lifeMs": 60_000});
    fake.put(BELL, bell.to_string());
    guard.release().await.expect("ours");
    let record = fake.object(NAME).expect("a record");
    assert_eq!(record["ownerId"], "other", "{record}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_claim_that_finds_its_grant_does_not_know_when_it_began() {
    let fake = Fake::quick();
    let store = Arc::clone(client(&fake).await.store());
    let claim = Claim::new(
        7,
        Key::new("k").expect("a key"),
        Mode::Exclusive,
        Duration::from_secs(10),
        Arc::new(Identity::default()),
    );
    for expected in [LeaseStart::FromRequest, LeaseStart::FromConfirm] {
        let answer = store.claim(&claim, Duration::from_secs(20)).await;
        let Ok(Answer::Granted(grant)) = answer else { panic!("not granted: {answer:?}") };
        assert_eq!(grant.lease_start, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fail_if_contended_gets_the_only_place_or_fails() {
    let fake = Fake::quick();
    let (one, two, three) = (client(&fake).await, client(&fake).await, client(&fake).await);
    let guard = lock(&one).acquire().await.expect("free");
    let waiting = tokio::spawn(lock(&two).fail_if_contended().acquire());
    until("a bell", || rings(&fake).is_some()).await;
    let asked = Instant::now();
    let error = lock(&three).fail_if_contended().acquire().await.expect_err("awaited");
    assert_eq!(error.kind(), ErrorKind::Contention, "{error}");
    assert!(error.to_string().contains("another waits"), "{error}");
    assert!(asked.elapsed() < Duration::from_millis(300), "{:?}", asked.elapsed());
    guard.release().await.expect("ours");
    let next = waiting.await.expect("no panic").expect("it had the place");
    next.release().await.expect("ours");

    // A place that is lost while one waits there is told as well.
    fake.remove(BELL);
    let guard = lock(&one).acquire().await.expect("free");
    let waiting = tokio::spawn(lock(&two).fail_if_contended().acquire());
    until("a bell", || rings(&fake).is_some()).await;
    let other = json!({"waiterId": "other", "leaseMs": 1_000, "lifeMs": 60_000});
    fake.put(BELL, other.to_string());
    let error = waiting.await.expect("no panic").expect_err("displaced");
    assert_eq!(error.kind(), ErrorKind::Contention, "{error}");
    assert_eq!(rings(&fake).as_deref(), Some("other"), "its place is left alone");
    drop(guard);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_third_waits_for_the_place_and_then_in_it_and_the_timeout_covers_both() {
    let fake = Fake::quick();
    let (one, two, three) = (client(&fake).await, client(&fake).await, client(&fake).await);
    let guard = lock(&one).acquire().await.expect("free");
    let second = tokio::spawn(lock(&two).acquire());
    until("a bell", || rings(&fake).is_some()).await;
    let before = rings(&fake);
    let late = lock(&three).timeout(Duration::from_millis(400)).acquire().await;
    assert_eq!(late.expect_err("neither lock nor place").kind(), ErrorKind::Timeout);
    assert_eq!(rings(&fake), before, "the place is the second one's");
    let third = tokio::spawn(lock(&three).acquire());
    guard.release().await.expect("ours");
    let guard = second.await.expect("no panic").expect("next");
    until("the third in the place", || rings(&fake).is_some_and(|id| Some(id) != before)).await;
    let token = guard.fencing_token();
    guard.release().await.expect("ours");
    let guard = third.await.expect("no panic").expect("the last");
    assert_eq!(guard.fencing_token().number(), token.number() + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_there_is_no_single_place_none_can_be_asked_for() {
    let client = Client::connect("memory:").await.expect("a good URL");
    let error = client.lock("k").fail_if_contended().acquire().await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}
