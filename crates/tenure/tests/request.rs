//! What cannot be asked is refused, with the value and what to do; nothing panics and nothing is left.

use std::sync::Arc;
use std::time::Duration;

use tenure::{Client, ErrorKind, LockRequest, MemoryStore};

fn client() -> Client {
    Client::with_store(Arc::new(MemoryStore::new()))
}

async fn refused(request: LockRequest, parts: &[&str]) {
    let error = request.acquire().await.expect_err("it cannot be asked");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{error} lacks {part}");
    }
}

#[tokio::test]
async fn bad_keys() {
    let client = client();
    refused(client.lock(""), &["the key is empty"]).await;
    refused(client.lock("x".repeat(201)), &["201 bytes", "at most 200", "xxx"]).await;
    refused(client.lock("a\u{1b}[2Jb"), &["U+001B", "byte 1"]).await;
    refused(client.lock("a\n"), &["U+000A"]).await;
    assert_eq!(client.inspect("\0").await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn bad_leases() {
    let client = client();
    let lock = |ttl| client.lock("a").ttl(Duration::from_millis(ttl));
    refused(lock(0), &["0ns", "1ms"]).await;
    refused(lock(100), &["100ms", "33.333333ms", "25ms", "50ms", "longer ttl"]).await;
    refused(client.lock("a").ttl(Duration::MAX), &["above the maximum"]).await;
    refused(lock(6_000).stop_grace(Duration::from_secs(5)), &["6s", "5s", "kill-after"]).await;
    refused(lock(6_000).keep_alive_factor(1), &["factor of 1", "at least 2"]).await;
    refused(lock(6_000).max_hold(Duration::ZERO), &["max_hold is 0"]).await;
}

#[tokio::test]
async fn bad_semaphores_and_texts() {
    let client = client();
    refused(client.semaphore("a", 0), &["0 slots", "at least 1"]).await;
    refused(client.lock("a").note("one\ntwo"), &["note", "U+000A"]).await;
    refused(client.lock("a").id("x".repeat(999)), &["999 bytes"]).await;
}

#[tokio::test]
async fn bad_stores() {
    for (url, part) in [("", "no scheme"), ("etcd://localhost", "`etcd`"), ("://", "scheme")] {
        let error = Client::connect(url).await.expect_err("there is no such store");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let message = error.to_string();
        assert!(message.contains(part) && message.contains("memory:"), "{url}: {message}");
    }
}

#[tokio::test]
async fn stores_of_one_name_are_one_and_others_are_not() {
    let [one, same, other] = ["memory:x", "memory:x", "memory:y"].map(Client::connect);
    let (one, same, other) = (one.await.unwrap(), same.await.unwrap(), other.await.unwrap());
    let guard = one.lock("a").acquire().await.unwrap();
    assert_eq!(same.lock("a").try_acquire().await.unwrap_err().kind(), ErrorKind::Held);
    drop(other.lock("a").try_acquire().await.unwrap());
    drop(guard);
}

#[tokio::test]
async fn a_run_says_whether_it_ran_and_leaves_the_lock_free() {
    let client = Client::with_store(Arc::new(MemoryStore::new()));
    let ran = client.lock("a").try_run(async |guard| guard.is_held()).await.unwrap();
    assert_eq!(ran, Some(true));
    let held = client.lock("a").try_acquire().await.expect("released after the run");
    let ran = client.lock("a").try_run(async |_| panic!("another holds it")).await.unwrap();
    assert_eq!(ran, None::<()>);
    let evict = async |guard: &tenure::Guard| {
        let key = guard.key().clone();
        client.store().evict(&key, guard.fencing_token(), "a test").await.unwrap();
        std::future::pending::<()>().await;
    };
    held.release().await.unwrap();
    let error = client.lock("a").try_run(evict).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}
