//! What a client does besides locks: holds that others left, and its own end.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tenure::conformance::{Fault, Faults, Op};
use tenure::store::{
    Answer, Capabilities, Claim, FindingLevel, KeySpace, KeyState, Store, async_trait,
};
use tenure::{Client, Clock, ErrorKind, Handle, Key, MemoryStore, Result};
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
    for ttl in [Duration::ZERO, Duration::MAX] {
        let error = client.renew("a", &handle, ttl).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
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
    let clock = Clock::system();
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

/// Calls that are dropped before the next poll do not put it off: on a store that does not push, the change is seen.
#[tokio::test]
async fn a_watch_that_is_dropped_often_still_polls() {
    let (clock, hand) = Clock::manual();
    let store = Arc::new(MemoryStore::with_clock(clock.clone()));
    // Without notifications: only polls show a change.
    let client = Client::with_store(Arc::new(Silent(store.clone()))).with_clock(clock.clone());
    let other = Client::with_store(store).with_clock(clock);
    let mut watch = client.watch("k").unwrap();
    assert!(!watch.next().await.unwrap().is_in_use());
    let _guard = other.lock("k").acquire().await.unwrap();
    for _ in 0..10 {
        let seen = tokio::select! {
            biased;
            state = watch.next() => Some(state.unwrap()),
            () = tokio::task::yield_now() => None,
        };
        if let Some(state) = seen {
            return assert_eq!(state.holders.len(), 1);
        }
        hand.advance(Duration::from_millis(200));
    }
    panic!("two seconds have passed, and the store was not asked");
}

/// A store that pushes nothing.
#[derive(Debug)]
struct Silent(Arc<MemoryStore>);

impl std::fmt::Display for Silent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("silent:")
    }
}

#[async_trait]
impl Store for Silent {
    fn capabilities(&self) -> Capabilities {
        let mut can = self.0.capabilities();
        can.push = false;
        can
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        self.0.claim(claim, limit).await
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        self.0.inspect(key, space).await
    }
}
