//! Acquiring, renewing and releasing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{CaseOutcome, Fixture, always, cases};
use crate::store::{Answer, Capabilities, Liveness};
use crate::{ErrorKind, FencingToken, Key};

cases! {
    one_holder_at_a_time: "of many contending tasks, one holds the lock at a time, and every task acquires it", always;
    tokens_grow: "the fencing token of every grant is larger than the token before, or the store grants no tokens at all", always;
    tokens_grow_over_a_restart: "a restart of the store's server does not reset tokens", always;
    failed_try_names_the_holder: "a try on a held lock is refused at once, and the error names the holder", always;
    renewal_keeps_it: "a hold that is renewed outlives its ttl", always;
    max_hold_ends_it: "a hold ends at max_hold even if it is renewed", always;
    release_frees_it: "a released lock is free", always;
    dropping_a_guard_releases: "a dropped guard releases its lock", always;
    release_twice_is_refused: "a second release of the same hold is refused and does not affect the next holder", always;
    a_renewal_never_creates: "the renewal of a released hold is refused, and the lock stays free", always;
    a_repeated_claim_is_the_same: "a claim that is sent several times is granted once", always;
    any_key_is_a_lock_of_its_own: "keys with unusual characters are distinct locks and are shown unchanged", always;
    ttl_below_the_minimum_is_rejected: "a ttl below the store's minimum is refused, and the error names both values", has_smallest;
    a_detached_hold_lasts_by_its_handle: "a detached hold can be renewed and released with its handle, and not after its release", can_detach;
}

fn has_smallest(can: &Capabilities) -> Option<&'static str> {
    (can.min_ttl <= Duration::from_millis(1)).then_some("the store has no minimum ttl")
}

fn can_detach(can: &Capabilities) -> Option<&'static str> {
    (!can.detached).then_some("a hold cannot outlive its process")
}

async fn one_holder_at_a_time(scene: Fixture) {
    const TASKS: u32 = 8;
    const ROUNDS: u32 = 10;
    let (inside, entered) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (inside, entered) = (Arc::clone(&inside), Arc::clone(&entered));
        let client = if task % 2 == 0 { scene.one.clone() } else { scene.two.clone() };
        let (key, ttl, patience) = (scene.key(), scene.ttl(), scene.max_wait() * TASKS);
        tasks.spawn(async move {
            for _ in 0..ROUNDS {
                let request = client.lock(&key).ttl(ttl).timeout(patience);
                let guard = request.acquire().await.expect("every task acquires the lock");
                assert_eq!(
                    inside.fetch_add(1, Ordering::SeqCst),
                    0,
                    "two tasks hold the lock at once"
                );
                tokio::task::yield_now().await;
                entered.fetch_add(1, Ordering::SeqCst);
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.expect("what is held can be released");
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.expect("no task fails");
    }
    assert_eq!(entered.load(Ordering::SeqCst), TASKS * ROUNDS);
}

async fn tokens_grow(scene: Fixture) {
    let mut last: Option<FencingToken> = None;
    for round in 0..10 {
        let client = if round % 2 == 0 { &scene.one } else { &scene.two };
        let guard = scene.acquire(client).await;
        if let Some(before) = last.replace(guard.fencing_token()) {
            scene.check_order(before, guard.fencing_token());
        }
        guard.release().await.expect("released");
    }
}

async fn tokens_grow_over_a_restart(scene: Fixture) -> CaseOutcome {
    let guard = scene.acquire(&scene.two).await;
    let before = guard.fencing_token();
    guard.release().await.expect("released");
    let (key, ttl, patience) = (scene.key(), scene.ttl(), scene.max_wait());
    let ordered = scene.can().ordered_tokens;
    let Fixture { harness, one, two, faults, .. } = scene;
    drop((one, two, faults));
    let Some(store) = harness.restart().await else {
        return CaseOutcome::Skipped("there is nothing to restart");
    };
    let client = crate::Client::with_store(store);
    let guard = client.lock(key).ttl(ttl).timeout(patience).acquire().await;
    let after = guard.expect("it can be acquired after the restart").fencing_token();
    assert_eq!(after > before, ordered, "{before:?}, then {after:?} after a restart");
    CaseOutcome::Passed
}

async fn failed_try_names_the_holder(scene: Fixture) {
    let guard = scene.lock(&scene.one).id("the-first").acquire().await.expect("free");
    let error = scene.lock(&scene.two).try_acquire().await.expect_err("it is held");
    assert_eq!(error.kind(), ErrorKind::Held, "{error}");
    if scene.can().identities {
        assert!(error.to_string().contains("the-first"), "{error}");
    }
    guard.release().await.expect("released");
    drop(scene.lock(&scene.two).try_acquire().await.expect("it is free again"));
}

async fn renewal_keeps_it(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let seen = scene.state().await.version;
    let end = Instant::now() + scene.ttl() * 4;
    while Instant::now() < end {
        assert!(guard.is_held(), "not held although it is renewed");
        let remaining = guard.remaining();
        let state = scene.state().await;
        let left = state.holders.first().and_then(|holder| holder.lease_left);
        assert!(left.is_none_or(|left| left > remaining), "the store's lease ends first: {left:?}");
        assert_eq!(state.version, seen, "a renewal changes neither holders nor waiters");
        let refused = scene.lock(&scene.two).try_acquire().await.expect_err("it is held");
        assert_eq!(refused.kind(), ErrorKind::Held);
        tokio::time::sleep(scene.ttl() / 10).await;
    }
    guard.release().await.expect("it was held all the time");
}

async fn max_hold_ends_it(scene: Fixture) {
    let guard = scene.lock(&scene.one).max_hold(scene.ttl()).acquire().await.expect("free");
    let lost = guard.lost().await;
    assert_eq!(lost.reason, crate::Loss::MaxHold);
    assert!(!guard.is_held());
    drop(scene.acquire(&scene.two).await);
}

async fn release_frees_it(scene: Fixture) {
    scene.acquire(&scene.one).await.release().await.expect("released");
    let state = scene.state().await;
    assert!(state.holders.is_empty(), "{state:?}");
}

async fn dropping_a_guard_releases(scene: Fixture) {
    drop(scene.acquire(&scene.one).await);
    scene.wait_until_free().await;
}

async fn release_twice_is_refused(scene: Fixture) {
    let store = scene.two.store();
    let answer = store.claim(&scene.claim(1), scene.limit()).await.expect("an answer");
    let Answer::Granted(mut grant) = answer else { panic!("not granted: {answer:?}") };
    grant.hold.release(scene.limit()).await.expect("released");
    let next = scene.acquire(&scene.one).await;
    let again = grant.hold.release(scene.limit()).await.expect_err("it was released before");
    assert_eq!(again.kind(), ErrorKind::NotHeld, "{again}");
    drop(grant);
    let state = scene.state().await;
    assert_eq!(state.holders.len(), 1, "the next holder keeps it: {state:?}");
    next.release().await.expect("the next holder still had it");
}

async fn a_renewal_never_creates(scene: Fixture) {
    let store = scene.two.store();
    let answer = store.claim(&scene.claim(1), scene.limit()).await.expect("an answer");
    let Answer::Granted(mut grant) = answer else { panic!("not granted: {answer:?}") };
    grant.hold.release(scene.limit()).await.expect("released");
    let renewed = grant.hold.renew(scene.ttl(), scene.limit()).await.expect_err("it is gone");
    assert_eq!(renewed.kind(), ErrorKind::NotHeld, "{renewed}");
    assert!(scene.state().await.holders.is_empty());
    let other = scene.acquire(&scene.one).await;
    let renewed = grant.hold.renew(scene.ttl(), scene.limit()).await.expect_err("another's");
    assert_eq!(renewed.kind(), ErrorKind::NotHeld, "{renewed}");
    other.release().await.expect("the other still had it");
}

async fn a_repeated_claim_is_the_same(scene: Fixture) {
    let store = scene.two.store();
    let claim = scene.claim(7);
    let (mut first, mut tokens) = (None, Vec::new());
    for _ in 0..3 {
        let answer = store.claim(&claim, scene.limit()).await.expect("an answer");
        let Answer::Granted(grant) = answer else { panic!("not granted again: {answer:?}") };
        tokens.push(grant.token);
        first.get_or_insert(grant);
    }
    tokens.dedup();
    assert_eq!(tokens.len(), 1, "one grant has one token");
    assert_eq!(scene.state().await.holders.len(), 1);
    let mut hold = first.expect("granted").hold;
    hold.release(scene.limit()).await.expect("released");
    drop(hold);
    scene.wait_until_free().await;
}

async fn any_key_is_a_lock_of_its_own(scene: Fixture) {
    let long = "k".repeat(Key::MAX_BYTES);
    let run = std::process::id();
    let keys: Vec<_> = [
        "a b",
        "a.b",
        "a/b",
        "a//b",
        "../a",
        ".",
        "*",
        "a.>",
        "%",
        "%20",
        "a%20b",
        "'; drop--",
        "\"",
        "\\",
        "ключ",
        "🦀",
        "a+b",
        "$x",
        "~",
        "#",
        "?a=b",
        "A",
        "a",
        "-n",
        "=",
        "{}",
        "\u{a0}x\u{200b}",
    ]
    .into_iter()
    .map(str::trim)
    .map(|key| format!("{key}|{run}"))
    .chain([long])
    .collect();
    let mut guards = Vec::new();
    let ttl = scene.ttl().max(Duration::from_secs(10)).min(scene.harness.longest_ttl());
    for key in &keys {
        let request = scene.one.lock(key).ttl(ttl);
        let guard = request.timeout(scene.max_wait()).acquire().await;
        guards.push(guard.unwrap_or_else(|error| panic!("{key:?}: {error}")));
    }
    for (key, guard) in keys.iter().zip(&guards) {
        let state = scene.two.inspect(key).await.expect("it can be inspected");
        let tokens: Vec<_> = state.holders.iter().map(|holder| holder.token).collect();
        let expected =
            if scene.can().identities { guard.fencing_token() } else { FencingToken::default() };
        assert_eq!(tokens, [expected], "{key:?}");
        assert_eq!(state.key.as_str(), key);
    }
    for guard in guards {
        guard.release().await.expect("released");
    }
}

async fn ttl_below_the_minimum_is_rejected(scene: Fixture) {
    let smallest = scene.can().min_ttl;
    let short = smallest.saturating_sub(Duration::from_nanos(1));
    let error = scene.one.lock(scene.key()).ttl(short).acquire().await.expect_err("too short");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    for value in [short, smallest] {
        assert!(error.to_string().contains(&format!("{value:?}")), "{error}");
    }
}

async fn a_detached_hold_lasts_by_its_handle(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let handle = guard.detach().await.expect("it can be detached");
    assert!(!format!("{handle:?}").contains(handle.expose()), "a handle is a secret");
    assert_eq!(
        scene.lock(&scene.two).try_acquire().await.expect_err("held").kind(),
        ErrorKind::Held
    );

    let store = scene.two.store();
    let mut hold = store.resume(&scene.key(), &handle).await.expect("the handle resumes it");
    let long = scene.ttl() * 3;
    hold.renew(long, scene.limit()).await.expect("renewed by its handle");
    drop(hold);
    tokio::time::sleep(scene.ttl()).await;
    assert_eq!(scene.state().await.holders.len(), 1, "renewed for longer");

    let mut hold = store.resume(&scene.key(), &handle).await.expect("the handle resumes it");
    hold.release(scene.limit()).await.expect("released by its handle");
    drop(hold);
    scene.wait_until_free().await;
    let gone = store.resume(&scene.key(), &handle).await;
    let refused = match gone {
        Err(error) => error,
        Ok(mut hold) => hold.renew(long, scene.limit()).await.map(drop).expect_err("it is gone"),
    };
    assert_eq!(refused.kind(), ErrorKind::NotHeld, "{refused}");

    scene.acquire(&scene.one).await.detach().await.expect("detached again");
    if scene.can().liveness != Liveness::Session {
        scene.wait_until_free().await;
    }
}
