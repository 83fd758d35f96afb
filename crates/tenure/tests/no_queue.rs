//! A store without a queue and without pushes to holders, which counts its grants: as stores on foreign servers are.
//! Waiters watch the key, and a holder learns of its loss by a renewal. The clock is moved by hand.

use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure::election::Event;
use tenure::store::{
    Answer, Capabilities, Claim, Handle, Hold, HoldEvent, KeepOpen, KeySpace, KeyState, QueueKind,
    Renewed, Store, Version,
};
use tenure::{Client, Clock, FencingToken, Key, Loss, ManualClock, MemoryStore, Result};

/// A ttl of 6 s: margin 1 s, renewal every 2 s.
const TTL: Duration = Duration::from_secs(6);

#[derive(Debug)]
struct NoQueue(MemoryStore, AtomicU64);

impl fmt::Display for NoQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[async_trait]
impl Store for NoQueue {
    fn capabilities(&self) -> Capabilities {
        {
            let mut can = self.0.capabilities();
            can.queue = QueueKind::None;
            can
        }
    }

    async fn claim(&self, claim: &Claim, limit: Duration) -> Result<Answer> {
        let answer = self
            .0
            .claim(
                &{
                    let mut claim = claim.clone();
                    claim.queue = false;
                    claim
                },
                limit,
            )
            .await?;
        Ok(match answer {
            Answer::Granted(mut grant) => {
                grant.hold = Box::new(QuietHold(grant.hold));
                grant.grants = Some(self.1.fetch_add(1, Ordering::Relaxed) + 1);
                Answer::Granted(grant)
            }
            other => other,
        })
    }

    async fn resume(&self, key: &Key, handle: &Handle) -> Result<Box<dyn Hold>> {
        self.0.resume(key, handle).await
    }

    async fn changed(&self, key: &Key, space: KeySpace, since: Version) -> Result<()> {
        self.0.changed(key, space, since).await
    }

    async fn inspect(&self, key: &Key, space: KeySpace) -> Result<KeyState> {
        self.0.inspect(key, space).await
    }

    async fn list(
        &self,
        space: KeySpace,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<KeyState>> {
        self.0.list(space, prefix, after).await
    }

    async fn evict(&self, key: &Key, token: FencingToken, reason: &str) -> Result<()> {
        self.0.evict(key, token, reason).await
    }

    async fn close(&self) {}
}

/// A hold whose store reports nothing by itself.
#[derive(Debug)]
struct QuietHold(Box<dyn Hold>);

#[async_trait]
impl Hold for QuietHold {
    async fn renew(&mut self, ttl: Duration, limit: Duration) -> Result<Renewed> {
        self.0.renew(ttl, limit).await
    }

    async fn check_handoff(&mut self, limit: Duration) -> Result<bool> {
        self.0.check_handoff(limit).await
    }

    async fn event(&mut self) -> HoldEvent {
        pending().await
    }

    async fn release(&mut self, limit: Duration) -> Result<()> {
        self.0.release(limit).await
    }

    fn handle(&self) -> Option<Handle> {
        self.0.handle()
    }

    async fn detach(&mut self, limit: Duration) -> Result<()> {
        self.0.detach(limit).await
    }

    #[cfg(unix)]
    fn keep_open(&self) -> Option<Weak<dyn KeepOpen>> {
        None
    }
}

fn world() -> (Client, ManualClock) {
    let (clock, hand) = Clock::manual();
    let store = NoQueue(MemoryStore::with_clock(clock.clone()), AtomicU64::new(0));
    (Client::with_store(Arc::new(store)).with_clock(clock), hand)
}

/// On a runtime of one thread every task that can run has run after this.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_waiter_is_woken_by_a_change_of_the_key() {
    let (client, _hand) = world();
    let holder = client.lock("a").ttl(TTL).acquire().await.unwrap();
    let waiting = tokio::spawn(async move { client.lock("a").ttl(TTL).acquire().await });
    settle().await;
    assert!(!waiting.is_finished());
    holder.release().await.unwrap();
    settle().await;
    assert!(waiting.is_finished(), "it waits for its timer, and no time passes");
    drop(waiting.await.unwrap().unwrap());
}

#[tokio::test]
async fn a_refused_renewal_is_a_loss_before_the_deadline() {
    let (client, hand) = world();
    let guard = client.lock("a").ttl(TTL).acquire().await.unwrap();
    settle().await;
    client.store().evict(guard.key(), guard.fencing_token(), "stuck").await.unwrap();
    settle().await;
    assert!(guard.is_held(), "the store reported nothing");
    hand.advance(TTL / 3);
    settle().await;
    assert!(!guard.is_held(), "the renewal was refused");
    assert_eq!(guard.lost().await.reason, Loss::Taken);
}

#[tokio::test]
async fn a_leader_that_recovers_after_another_leader_reports_the_loss() {
    let (client, hand) = world();
    let election = client.election("a").reconnect_grace(TTL * 10).build().unwrap();
    let mut events = election.events();
    election.start().await.unwrap();
    settle().await;
    let token = election.fencing_token().unwrap();
    // The hold ends, and another client has the key for a moment. The leader learns of it by its next renewal.
    client.store().evict(&Key::new("a").unwrap(), token, "stuck").await.unwrap();
    client.lock("a").try_acquire().await.unwrap().release().await.unwrap();
    for _ in 0..100 {
        hand.advance(Duration::from_millis(250));
        settle().await;
    }
    assert!(election.is_leader() && election.fencing_token() > Some(token));
    let lost = async {
        while let Some(event) = events.next().await {
            if let Event::Lost(_) = event {
                return true;
            }
        }
        false
    };
    election.shutdown(None).await.unwrap();
    drop(election);
    assert!(lost.await, "another leader was in between");
}
