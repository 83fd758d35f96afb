//! Several locks at once.

use std::sync::Arc;
use std::time::Duration;

use tenure::{Client, ErrorKind, Loss, MemoryStore};

const SOON: Duration = Duration::from_secs(30);

fn client() -> Client {
    Client::with_store(Arc::new(MemoryStore::new()))
}

/// Number of waiters of a lock.
async fn waiters(client: &Client, key: &str) -> usize {
    client.inspect(key).await.expect("an answer").waiters.len()
}

/// Resolves when a lock has a waiter.
async fn has_waiter(client: &Client, key: &str) {
    let mut watch = client.watch(key).expect("a good key");
    while watch.next().await.expect("an answer").waiters.is_empty() {}
}

#[tokio::test]
async fn opposite_orders_do_not_deadlock() {
    let client = client();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let client = client.clone();
        tasks.spawn(async move {
            let keys = if task % 2 == 0 { ["a", "b", "c"] } else { ["c", "b", "a"] };
            for _ in 0..20 {
                let guards = client.lock_all(keys).timeout(SOON).acquire().await.unwrap();
                assert!(guards.is_held());
                tokio::task::yield_now().await;
                guards.release().await.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

#[tokio::test]
async fn keys_are_sorted_and_each_is_locked_once() {
    let client = client();
    let guards = client.lock_all(["b", "a", "b"]).acquire().await.unwrap();
    let keys: Vec<&str> = guards.keys().map(tenure::Key::as_str).collect();
    assert_eq!(keys, ["a", "b"]);
    assert!(guards.get("a").is_some() && guards.get("c").is_none());
    guards.release().await.unwrap();
    for key in ["a", "b"] {
        assert!(!client.inspect(key).await.unwrap().is_in_use(), "{key}");
    }
}

#[tokio::test]
async fn a_held_lock_leaves_none_held_and_is_named() {
    let client = client();
    let _other = client.lock("b").acquire().await.unwrap();
    let error = client.lock_all(["a", "b", "c"]).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    assert_eq!(error.key().map(tenure::Key::as_str), Some("b"));
    assert!(!client.inspect("a").await.unwrap().is_in_use(), "it was released");
    assert!(!client.inspect("c").await.unwrap().is_in_use(), "it was not reached");
}

#[tokio::test]
async fn the_timeout_is_for_all_locks_together() {
    let client = client();
    let _other = client.lock("b").acquire().await.unwrap();
    let wait = Duration::from_millis(50);
    let error = client.lock_all(["a", "b"]).timeout(wait).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(!client.inspect("a").await.unwrap().is_in_use(), "it was released");
    assert_eq!(waiters(&client, "b").await, 0, "it left the queue");
}

#[tokio::test]
async fn a_lock_that_is_lost_meanwhile_ends_the_wait() {
    let client = client();
    let _other = client.lock("b").acquire().await.unwrap();
    let all = client.lock_all(["a", "b"]);
    let waiting = tokio::spawn(async move { all.acquire().await });
    has_waiter(&client, "b").await;
    let token = client.inspect("a").await.unwrap().holders[0].token;
    client.evict("a", token, "test").await.unwrap();
    let error = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert_eq!(waiters(&client, "b").await, 0, "it left the queue");
}

#[tokio::test]
async fn the_loss_of_one_ends_the_work_and_the_others_are_released() {
    let client = client();
    let guards = client.lock_all(["a", "b"]).acquire().await.unwrap();
    let token = guards.get("b").unwrap().fencing_token();
    client.evict("b", token, "test").await.unwrap();
    let error = guards.run(std::future::pending::<()>()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert_eq!(guards.lost().await.reason, Loss::Evicted);
    assert!(!guards.is_held());
    assert_eq!(guards.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(!client.inspect("a").await.unwrap().is_in_use());
}

#[tokio::test]
async fn a_wrong_request_is_refused_before_anything_is_held() {
    let client = client();
    let error = client.lock_all::<&str>([]).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let error = client.lock_all(["a", "b\n"]).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(!client.inspect("a").await.unwrap().is_in_use());
    let error = client.semaphore("s", 2).shared().try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("slot"), "{error}");
}

#[tokio::test]
async fn settings_apply_to_each_lock() {
    let client = client();
    let request = client.lock_all(["a", "b"]).each(|lock| lock.note("transfer").shared());
    let first = request.acquire().await.unwrap();
    let second = client.lock("a").shared().try_acquire().await.unwrap();
    let state = client.inspect("b").await.unwrap();
    assert_eq!(state.holders[0].by.as_ref().unwrap().note, "transfer");
    drop((first, second));
}
