//! Order of the waiters, their fencing tokens, and the notification of the next holder.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure::store::{Answer, Claim, Mode, Place, Waited};
use tenure::{FencingToken, FileStore, Key, Store};

use super::support::{Folder, state, until_shown};

const LIMIT: Duration = Duration::from_secs(5);

async fn ask(store: &FileStore, id: u128, mode: Mode) -> Answer {
    let claim = Claim::new(
        id,
        Key::new("key").expect("a key"),
        mode,
        Duration::from_secs(15),
        Arc::default(),
    );
    store.claim(&claim, LIMIT).await.expect("an answer")
}

async fn place(store: &FileStore, id: u128, mode: Mode) -> Box<dyn Place> {
    match ask(store, id, mode).await {
        Answer::Queued(place) => place,
        other => panic!("not queued: {other:?}"),
    }
}

async fn granted(place: &mut Box<dyn Place>) -> tenure::store::Grant {
    match place.wait(LIMIT).await.expect("an answer") {
        Waited::Granted(grant) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

#[tokio::test]
async fn release_wakes_the_next_waiter() {
    let (folder, began) = (Folder::new(), Instant::now());
    let (client, other) = (folder.client(), folder.client());
    let rounds = 10;
    for _ in 0..rounds {
        let guard = client.lock("key").acquire().await.expect("free");
        let next = tokio::spawn(other.lock("key").acquire());
        let last = tokio::spawn(client.lock("key").acquire());
        until_shown(&client, "key", 1, 2).await;
        guard.release().await.expect("ours");
        for waiting in [next, last] {
            let guard = waiting.await.expect("no panic").expect("its turn");
            guard.release().await.expect("ours");
        }
    }
    // A waiter that is not notified polls once per second.
    let took = began.elapsed();
    assert!(took < Duration::from_secs(rounds), "{rounds} rounds of two took {took:?}");
}

#[tokio::test]
async fn fencing_tokens_grow_with_every_grant_across_modes() {
    let folder = Folder::new();
    let store = folder.open();
    let Answer::Granted(mut first) = ask(&store, 0, Mode::Exclusive).await else {
        panic!("not free")
    };
    // The one that shares gets its number when it is granted, and so after those behind it came.
    let modes = [Mode::Exclusive, Mode::Shared, Mode::Exclusive, Mode::Exclusive];
    let mut places = Vec::new();
    for (id, mode) in (1..).zip(modes) {
        places.push(place(&store, id, mode).await);
    }
    let mut last = first.token;
    first.hold.release(LIMIT).await.expect("ours");
    for place in &mut places {
        let mut grant = granted(place).await;
        assert!(grant.token > last, "{} came after {last}", grant.token);
        last = grant.token;
        grant.hold.release(LIMIT).await.expect("ours");
    }
}

#[tokio::test]
async fn first_waiter_holds_the_lock_before_it_is_notified() {
    let folder = Folder::new();
    let (store, client) = (folder.open(), folder.client());
    let Answer::Granted(mut first) = ask(&store, 0, Mode::Exclusive).await else {
        panic!("not free")
    };
    let mut second = place(&store, 1, Mode::Exclusive).await;
    let mut third = place(&store, 2, Mode::Exclusive).await;
    first.hold.release(LIMIT).await.expect("ours");
    let shown = state(&client, "key").await;
    let (holders, waiters) = (shown.holders.len(), shown.waiters.len());
    assert_eq!((holders, waiters), (1, 1), "{shown:?}");
    assert!(shown.holders[0].token > first.token);

    // It releases a grant that it was not notified of.
    second.abandon(LIMIT).await.expect("left");
    let grant = granted(&mut third).await;
    assert!(grant.token > shown.holders[0].token);
}

#[tokio::test]
async fn waiter_evicted_before_it_is_notified_loses_its_place() {
    let folder = Folder::new();
    let (store, client) = (folder.open(), folder.client());
    let Answer::Granted(mut first) = ask(&store, 0, Mode::Exclusive).await else {
        panic!("not free")
    };
    let mut second = place(&store, 1, Mode::Exclusive).await;
    first.hold.release(LIMIT).await.expect("ours");
    let token: FencingToken = state(&client, "key").await.holders[0].token;
    let key = Key::new("key").expect("a key");
    let evicting = client.store().evict(&key, token, "a test");
    // It is marked before the wait begins.
    let (evicted, waited) = tokio::join!(biased; evicting, second.wait(LIMIT));
    evicted.expect("it held");
    assert!(matches!(waited.expect("an answer"), Waited::Gone));
    until_shown(&client, "key", 0, 0).await;
}

#[tokio::test]
async fn a_hold_counts_from_its_grant_and_not_from_the_wait() {
    let folder = Folder::new();
    let client = folder.client();
    let guard = client.lock("key").acquire().await.expect("free");
    let next = tokio::spawn(folder.client().lock("key").acquire());
    until_shown(&client, "key", 1, 1).await;
    let waited = Duration::from_millis(300);
    tokio::time::sleep(waited).await;
    let released = Instant::now();
    guard.release().await.expect("ours");
    let guard = next.await.expect("no panic").expect("its turn");
    super::support::until("the time of the grant is written down", async || {
        let held = state(&client, "key").await.holders[0].held_for.expect("known");
        held <= released.elapsed()
    })
    .await;
    guard.release().await.expect("ours");
}
