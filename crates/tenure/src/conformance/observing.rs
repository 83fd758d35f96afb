//! Observation of keys by other clients.

use std::time::Duration;

use super::outcome::grant;
use super::{Fixture, Outcome, cases};
use crate::store::{KeySpace, KeyState, QueueKind};
use crate::{Client, FencingToken};

cases! {
    holders_and_waiters_are_shown: "holders and waiters are shown with names, token and times", [];
    keys_are_listed_in_order: "the keys in use with a prefix are listed in order, page by page", [LIST];
    only_keys_in_use_are_listed: "a key whose hold was released or has ended is not listed", [LIST];
    evicted_keys_are_not_listed: "a key whose hold was broken is not listed", [LIST, EVICT];
    cleaning_keeps_holds_and_tokens: "Store::clean removes neither holds nor waiters, and no later token is smaller", [];
    observers_are_notified: "an observer is notified when the state of a key changes, and not before", [PUSH];
}

async fn holders_and_waiters_are_shown(scene: Fixture) {
    let request = scene.lock(&scene.one).id("web-1").note("deploy 42");
    let guard = request.acquire().await.succeeds("LockRequest::acquire");
    let pending =
        scene.lock(&scene.two).id("web-2").enqueue().await.succeeds("LockRequest::enqueue");
    if scene.can().queue != QueueKind::None {
        scene.wait_until("a waiter", |state| state.waiters.len() == 1).await;
    }
    let state = scene.state().await;
    let [holder] = &state.holders[..] else { panic!("one holder: {state:?}") };
    if scene.can().identities {
        assert_eq!(holder.token, guard.fencing_token());
        assert!(
            holder.by.is_some(),
            "Store::inspect shows a holder without its identity: {state:?}"
        );
        assert!(state.waiters.iter().all(|waiter| waiter.by.is_some()), "{state:?}");
    }
    if let Some(by) = &holder.by {
        assert_eq!((&*by.id, &*by.note, by.pid), ("web-1", "deploy 42", std::process::id()));
    }
    if let Some(left) = holder.lease_left {
        assert!(left <= scene.ttl(), "{left:?}");
    }
    if let [waiter] = &state.waiters[..] {
        assert!(waiter.by.as_ref().is_none_or(|by| by.id == "web-2"), "{waiter:?}");
    }
    drop((guard, pending));
    scene.wait_until_free().await;
}

async fn keys_are_listed_in_order(scene: Fixture) {
    let prefix = scene.key_of("/");
    let mut guards = Vec::new();
    // Keys without the prefix sort before and after those that have it.
    for part in ["/c", "/a", "/b", "-", "0"] {
        let request = scene.one.lock(scene.key_of(part)).ttl(scene.ttl());
        guards.push(
            request.timeout(scene.max_wait()).acquire().await.succeeds("LockRequest::acquire"),
        );
    }
    let listed = list(&scene, prefix.as_str()).await;
    let names: Vec<_> = listed.iter().map(|state| state.key.clone()).collect();
    let expected: Vec<_> = ["/a", "/b", "/c"].map(|part| scene.key_of(part)).into();
    assert_eq!(names, expected, "keys that Store::list returns for the prefix {prefix}");
    assert!(listed.iter().all(|state| state.holders.len() == 1), "{listed:?}");
}

/// All pages of a list of locks.
async fn list(scene: &Fixture, prefix: &str) -> Vec<KeyState> {
    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let page = scene.two.store().list(KeySpace::Lock, prefix, after.as_deref()).await;
        let page = page.succeeds("Store::list");
        let Some(last) = page.last() else { return listed };
        after = Some(last.key.to_string());
        listed.extend(page);
    }
}

async fn only_keys_in_use_are_listed(scene: Fixture) {
    scene.acquire(&scene.one).await.release().await.succeeds("Guard::release");
    let listed = list(&scene, scene.key().as_str()).await;
    assert!(listed.is_empty(), "Store::list returns a key that was released: {listed:?}");
    drop(grant(&**scene.two.store(), &scene.claim(1)).await);
    scene.wait_until_free().await;
    let listed = list(&scene, scene.key().as_str()).await;
    assert!(listed.is_empty(), "Store::list returns a key whose hold has ended: {listed:?}");
}

async fn evicted_keys_are_not_listed(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let store = scene.two.store();
    store.evict(&scene.key(), guard.fencing_token(), "a test").await.succeeds("Store::evict");
    let listed = list(&scene, scene.key().as_str()).await;
    assert!(listed.is_empty(), "Store::list returns a key whose hold was broken: {listed:?}");
}

async fn cleaning_keeps_holds_and_tokens(scene: Fixture) {
    let idle = |client: &Client| {
        client.lock(scene.key_of("-idle")).ttl(scene.ttl()).timeout(scene.max_wait())
    };
    let mut before = FencingToken::NONE;
    // Several grants: a counter that is reset needs several more until it is past them.
    for _ in 0..5 {
        let released = idle(&scene.one).acquire().await.succeeds("LockRequest::acquire");
        before = released.fencing_token();
        released.release().await.succeeds("Guard::release");
    }
    let guard = scene.acquire(&scene.one).await;
    let pending = scene.lock(&scene.two).enqueue().await.succeeds("LockRequest::enqueue");
    let seen = scene.state().await;
    scene.two.store().clean(Duration::ZERO).await.succeeds("Store::clean");
    let cleaned = scene.state().await;
    let held = |state: &KeyState| (state.holders.len(), state.waiters.len());
    assert_eq!(held(&cleaned), held(&seen), "holders and waiters after Store::clean: {cleaned:?}");
    guard.release().await.succeeds("Guard::release after Store::clean");
    drop(pending.wait().await.succeeds("Pending::wait after Store::clean"));
    let next = idle(&scene.two).acquire().await.succeeds("LockRequest::acquire");
    scene.check_order(before, next.fencing_token());
}

async fn observers_are_notified(scene: Fixture) {
    let (store, key) = (scene.two.store(), scene.key());
    let free = scene.state().await.version;
    let idle = store.changed(&key, KeySpace::Lock, free);
    let early = tokio::time::timeout(Duration::from_millis(50), idle).await;
    assert!(early.is_err(), "notified of a change that did not happen");
    let watch = store.changed(&key, KeySpace::Lock, free);
    let (notified, guard) = tokio::join!(watch, scene.acquire(&scene.one));
    notified.succeeds("Store::changed, on a grant");
    let held = scene.state().await.version;
    assert_ne!(held, free);
    let watch = store.changed(&key, KeySpace::Lock, held);
    let (notified, released) = tokio::join!(watch, guard.release());
    notified.succeeds("Store::changed, on a release");
    released.succeeds("Guard::release");
}
