//! Observation of keys by other clients.

use std::time::Duration;

use super::{Fixture, always, cases, pushes};
use crate::store::{Capabilities, KeySpace, QueueKind};

cases! {
    holders_and_waiters_are_shown: "holders and waiters are shown with names, token and times", always;
    keys_are_listed_in_order: "the keys in use with a prefix are listed in order, page by page", can_list;
    observers_are_notified: "an observer is notified when the state of a key changes, and not before", pushes;
}

fn can_list(can: &Capabilities) -> Option<&'static str> {
    (!can.list).then_some("the store cannot list keys")
}

async fn holders_and_waiters_are_shown(scene: Fixture) {
    let request = scene.lock(&scene.one).id("web-1").note("deploy 42");
    let guard = request.acquire().await.expect("free");
    let pending = scene.lock(&scene.two).id("web-2").enqueue().await.expect("enqueued");
    if scene.can().queue != QueueKind::None {
        scene.wait_until("a waiter", |state| state.waiters.len() == 1).await;
    }
    let state = scene.state().await;
    let [holder] = &state.holders[..] else { panic!("one holder: {state:?}") };
    if scene.can().identities {
        assert_eq!(holder.token, guard.fencing_token());
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
    for part in ["/c", "/a", "/b"] {
        let request = scene.one.lock(scene.key_of(part)).ttl(scene.ttl());
        guards.push(request.timeout(scene.max_wait()).acquire().await.expect("free"));
    }
    let store = scene.two.store();
    let mut listed = Vec::new();
    let mut after = None;
    loop {
        let page =
            store.list(KeySpace::Lock, prefix.as_str(), after.as_deref()).await.expect("a page");
        let Some(last) = page.last() else { break };
        after = Some(last.key.to_string());
        listed.extend(page);
    }
    let names: Vec<_> = listed.iter().map(|state| state.key.clone()).collect();
    let expected: Vec<_> = ["/a", "/b", "/c"].map(|part| scene.key_of(part)).into();
    assert_eq!(names, expected);
    assert!(listed.iter().all(|state| state.holders.len() == 1), "{listed:?}");
}

async fn observers_are_notified(scene: Fixture) {
    let (store, key) = (scene.two.store(), scene.key());
    let free = scene.state().await.version;
    let idle = store.changed(&key, KeySpace::Lock, free);
    let early = tokio::time::timeout(Duration::from_millis(50), idle).await;
    assert!(early.is_err(), "notified of a change that did not happen");
    let watch = store.changed(&key, KeySpace::Lock, free);
    let (notified, guard) = tokio::join!(watch, scene.acquire(&scene.one));
    notified.expect("notified of the grant");
    let held = scene.state().await.version;
    assert_ne!(held, free);
    let watch = store.changed(&key, KeySpace::Lock, held);
    let (notified, released) = tokio::join!(watch, guard.release());
    notified.expect("notified of the release");
    released.expect("released");
}
