//! What a client does besides locks: holds that others left, and its own end.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tenure::conformance::{Fault, Faults, Op};
use tenure::store::FindingLevel;
use tenure::{Client, ErrorKind, Handle, MemoryStore};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(10);

fn client() -> Client {
    Client::with_store(Arc::new(MemoryStore::new()))
}

#[tokio::test]
async fn a_hold_that_was_left_is_renewed_and_released_by_its_handle() {
    let client = client();
    let ttl = Duration::from_secs(60);
    let guard = client.lock("a").ttl(ttl).detached().acquire().await.unwrap();
    let handle = guard.detach().await.unwrap();
    client.renew("a", &handle, ttl * 2).await.unwrap();
    let state = client.inspect("a").await.unwrap();
    assert!(state.holders[0].lease_left.unwrap() > ttl, "{state:?}");
    client.release("a", &handle).await.unwrap();
    client.lock("a").try_acquire().await.unwrap().release().await.unwrap();
    for error in [
        client.renew("a", &handle, ttl).await.unwrap_err(),
        client.release("a", &handle).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}");
    }
    let error = client.release("a", &Handle::new("none")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[tokio::test]
async fn a_store_that_is_away_is_told_from_one_that_refuses() {
    let clock = tenure::Clock::system();
    let (store, faults) = Faults::wrap(Arc::new(MemoryStore::new()), clock);
    let client = Client::with_store(Arc::new(store));
    let findings = client.examine(SOON).await;
    assert!(findings.iter().all(|finding| finding.level == FindingLevel::Ok), "{findings:?}");

    faults.set_down(true);
    let findings = client.examine(SOON).await;
    assert!(findings.iter().any(tenure::store::Finding::is_unreachable), "{findings:?}");
    faults.heal();
    faults.always(Op::Inspect, Fault::Hang);
    let findings = client.examine(Duration::from_millis(50)).await;
    assert!(findings.iter().any(tenure::store::Finding::is_unreachable), "{findings:?}");

    faults.heal();
    faults.always(Op::Inspect, Fault::Deny);
    let findings = client.examine(SOON).await;
    assert!(!findings.iter().any(tenure::store::Finding::is_unreachable), "{findings:?}");
    let failed: Vec<_> =
        findings.iter().filter(|finding| finding.level == FindingLevel::Failed).collect();
    assert!(matches!(failed[..], [one] if one.detail.contains("refused")), "{failed:?}");
}

#[tokio::test]
async fn a_client_is_idle_when_what_was_dropped_has_been_given_back() {
    let client = client();
    client.idle().await;
    let guard = client.lock("a").acquire().await.unwrap();
    let waiting = client.lock("a").enqueue().await.unwrap();
    assert!(is_pending(client.idle()).await, "a lock is held and one is waited for");
    drop(waiting);
    drop(guard);
    timeout(SOON, client.clone().idle()).await.expect("idle");
    let state = client.inspect("a").await.unwrap();
    assert!(state.holders.is_empty() && state.waiters.is_empty(), "{state:?}");
}

#[tokio::test]
async fn an_election_that_goes_on_is_work() {
    let client = client();
    let election = client.election("a").start().await.unwrap();
    assert!(election.wait_for_leadership(SOON).await.unwrap());
    assert!(is_pending(client.idle()).await, "somebody leads");
    drop(election);
    timeout(SOON, client.idle()).await.expect("idle");
    assert!(client.inspect("a").await.unwrap().holders.is_empty());
}

/// Whether a future has nothing to say yet.
async fn is_pending(future: impl Future<Output = ()>) -> bool {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(future.as_mut().poll(context).is_pending())
    })
    .await
}
