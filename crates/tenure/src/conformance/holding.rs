//! Acquiring, renewing and releasing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::needs::RESTART;
use super::outcome::grant;
use super::{CaseOutcome, Fixture, Outcome, cases};
use crate::store::{Handle, Liveness};
use crate::{ErrorKind, FencingToken, Guard, Key};

cases! {
    one_holder_at_a_time: "of many contending tasks, one holds the lock at a time, and every task acquires it", [];
    tokens_grow: "the fencing token of every grant is larger than the token before, or the store grants no tokens at all", [];
    tokens_grow_over_a_restart: "a restart of the store's server does not reset tokens", [RESTART];
    failed_try_names_the_holder: "a try on a held lock is refused at once, and the error names the holder", [];
    renewal_keeps_it: "a hold that is renewed outlives its ttl", [];
    max_hold_ends_it: "a hold ends at max_hold even if it is renewed", [];
    release_frees_it: "a released lock is free", [];
    dropping_a_guard_releases: "a dropped guard releases its lock", [];
    release_twice_is_refused: "a second release of the same hold is refused and does not affect the next holder", [];
    a_renewal_never_creates: "the renewal of a released hold is refused, and the lock stays free", [];
    a_repeated_claim_is_the_same: "a claim that is sent several times is granted once", [];
    any_key_is_a_lock_of_its_own: "keys with unusual characters are distinct locks and are shown unchanged", [];
    ttl_below_the_minimum_is_rejected: "a ttl below the store's minimum is refused, and the error names both values", [MIN_TTL];
    a_detached_hold_lasts_by_its_handle: "a detached hold can be renewed and released with its handle, and not after its release", [DETACHED];
    a_forged_handle_is_refused: "neither a token nor a mixture of two handles renews a hold", [DETACHED];
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
                let guard = request.acquire().await.succeeds("LockRequest::acquire");
                assert_eq!(
                    inside.fetch_add(1, Ordering::SeqCst),
                    0,
                    "two tasks hold the lock at once"
                );
                tokio::task::yield_now().await;
                entered.fetch_add(1, Ordering::SeqCst);
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.succeeds("Guard::release");
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
        guard.release().await.succeeds("Guard::release");
    }
}

async fn tokens_grow_over_a_restart(scene: Fixture) -> CaseOutcome {
    let guard = scene.acquire(&scene.two).await;
    let before = guard.fencing_token();
    guard.release().await.succeeds("Guard::release");
    let (key, ttl, patience) = (scene.key(), scene.ttl(), scene.max_wait());
    let ordered = scene.can().ordered_tokens;
    let Fixture { harness, one, two, faults, .. } = scene;
    drop((one, two, faults));
    let Some(store) = harness.restart().await else {
        return CaseOutcome::Skipped(RESTART);
    };
    let client = crate::Client::with_store(store);
    let guard = client.lock(key).ttl(ttl).timeout(patience).acquire().await;
    let after = guard.succeeds("LockRequest::acquire after a restart").fencing_token();
    assert_eq!(after > before, ordered, "{before:?}, then {after:?} after a restart");
    CaseOutcome::Passed
}

async fn failed_try_names_the_holder(scene: Fixture) {
    let guard =
        scene.lock(&scene.one).id("the-first").acquire().await.succeeds("LockRequest::acquire");
    let tried = scene.lock(&scene.two).try_acquire().await;
    let error = tried.fails(ErrorKind::Held, "LockRequest::try_acquire of a held lock");
    if scene.can().identities {
        assert!(error.to_string().contains("the-first"), "{error}");
    }
    guard.release().await.succeeds("Guard::release");
    drop(scene.lock(&scene.two).try_acquire().await.succeeds("LockRequest::try_acquire"));
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
        let tried = scene.lock(&scene.two).try_acquire().await;
        tried.fails(ErrorKind::Held, "LockRequest::try_acquire of a lock whose holder renews");
        tokio::time::sleep(scene.ttl() / 10).await;
    }
    guard.release().await.succeeds("Guard::release");
}

async fn max_hold_ends_it(scene: Fixture) {
    let guard = scene
        .lock(&scene.one)
        .max_hold(scene.ttl())
        .acquire()
        .await
        .succeeds("LockRequest::acquire");
    let lost = guard.lost().await;
    assert_eq!(lost.reason, crate::Loss::MaxHold);
    assert!(!guard.is_held());
    drop(scene.acquire(&scene.two).await);
}

async fn release_frees_it(scene: Fixture) {
    scene.acquire(&scene.one).await.release().await.succeeds("Guard::release");
    let state = scene.state().await;
    assert!(state.holders.is_empty(), "{state:?}");
}

async fn dropping_a_guard_releases(scene: Fixture) {
    drop(scene.acquire(&scene.one).await);
    scene.wait_until_free().await;
}

async fn release_twice_is_refused(scene: Fixture) {
    let store = scene.two.store();
    let mut grant = grant(&**store, &scene.claim(1)).await;
    grant.hold.release(scene.limit()).await.succeeds("Hold::release");
    let next = scene.acquire(&scene.one).await;
    let again = grant.hold.release(scene.limit()).await;
    again.fails(ErrorKind::NotHeld, "a second Hold::release");
    drop(grant);
    let state = scene.state().await;
    assert_eq!(state.holders.len(), 1, "the next holder keeps it: {state:?}");
    next.release().await.succeeds("Guard::release");
}

async fn a_renewal_never_creates(scene: Fixture) {
    let store = scene.two.store();
    let mut grant = grant(&**store, &scene.claim(1)).await;
    grant.hold.release(scene.limit()).await.succeeds("Hold::release");
    let renewed = grant.hold.renew(scene.ttl(), scene.limit()).await;
    renewed.fails(ErrorKind::NotHeld, "Hold::renew after Hold::release");
    assert!(scene.state().await.holders.is_empty());
    let other = scene.acquire(&scene.one).await;
    let renewed = grant.hold.renew(scene.ttl(), scene.limit()).await;
    renewed.fails(ErrorKind::NotHeld, "Hold::renew while another holds the key");
    other.release().await.succeeds("Guard::release");
}

async fn a_repeated_claim_is_the_same(scene: Fixture) {
    let store = scene.two.store();
    let claim = scene.claim(7);
    let (mut first, mut tokens) = (None, Vec::new());
    for _ in 0..3 {
        let grant = grant(&**store, &claim).await;
        tokens.push(grant.token);
        first.get_or_insert(grant);
    }
    tokens.dedup();
    assert_eq!(tokens.len(), 1, "one grant has one token");
    assert_eq!(scene.state().await.holders.len(), 1);
    let mut hold = first.expect("granted").hold;
    hold.release(scene.limit()).await.succeeds("Hold::release");
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
    let ttl = scene.ttl_of(Duration::from_secs(10));
    for key in &keys {
        let request = || scene.one.lock(key).ttl(ttl).timeout(scene.max_wait());
        let tried = match request().try_acquire().await {
            Err(error) if error.kind() != ErrorKind::Held => request().acquire().await,
            tried => tried,
        };
        match tried {
            Ok(guard) => guards.push(guard),
            Err(error) => {
                let same = same_lock(&scene, key, guards).await;
                panic!("cannot lock {key:?}, which is free{same}: {error}");
            }
        }
    }
    for (key, guard) in keys.iter().zip(&guards) {
        let state = scene.two.inspect(key).await.succeeds("Store::inspect");
        let tokens: Vec<_> = state.holders.iter().map(|holder| holder.token).collect();
        let expected =
            if scene.can().identities { guard.fencing_token() } else { FencingToken::default() };
        assert_eq!(tokens, [expected], "tokens of the holders of {key:?}");
        assert_eq!(state.key.as_str(), key, "the key is shown unchanged");
    }
    for guard in guards {
        guard.release().await.succeeds("Guard::release");
    }
}

/// Searches for the held key that the store takes for `key`: the key is free once that one is released.
async fn same_lock(scene: &Fixture, key: &str, held: Vec<Guard>) -> String {
    for guard in held {
        let other = guard.key().clone();
        guard.release().await.succeeds("Guard::release");
        if let Ok(guard) = scene.one.lock(key).ttl(scene.ttl()).try_acquire().await {
            drop(guard);
            return format!(" (the store takes it for {:?})", other.as_str());
        }
    }
    String::new()
}

async fn ttl_below_the_minimum_is_rejected(scene: Fixture) {
    let smallest = scene.can().min_ttl;
    let short = smallest.saturating_sub(Duration::from_nanos(1));
    let acquired = scene.one.lock(scene.key()).ttl(short).acquire().await;
    let error = acquired.fails(ErrorKind::Invalid, "LockRequest::acquire with a ttl too short");
    for value in [short, smallest] {
        assert!(error.to_string().contains(&format!("{value:?}")), "{error}");
    }
}

async fn a_detached_hold_lasts_by_its_handle(scene: Fixture) {
    let guard = scene.acquire(&scene.one).await;
    let handle = guard.detach().await.succeeds("Guard::detach");
    assert!(!format!("{handle:?}").contains(handle.expose()), "a handle is a secret");
    let tried = scene.lock(&scene.two).try_acquire().await;
    tried.fails(ErrorKind::Held, "LockRequest::try_acquire while a detached hold lasts");

    let store = scene.two.store();
    let mut hold = store.resume(&scene.key(), &handle).await.succeeds("Store::resume");
    let long = scene.ttl() * 3;
    hold.renew(long, scene.limit()).await.succeeds("Hold::renew");
    drop(hold);
    tokio::time::sleep(scene.ttl()).await;
    assert_eq!(scene.state().await.holders.len(), 1, "renewed for longer");

    let mut hold = store.resume(&scene.key(), &handle).await.succeeds("Store::resume");
    hold.release(scene.limit()).await.succeeds("Hold::release");
    drop(hold);
    scene.wait_until_free().await;
    let gone = store.resume(&scene.key(), &handle).await;
    let renewed = match gone {
        Err(error) => Err(error),
        Ok(mut hold) => hold.renew(long, scene.limit()).await,
    };
    renewed.fails(ErrorKind::NotHeld, "Store::resume, or its Hold::renew, after Hold::release");

    scene.acquire(&scene.one).await.detach().await.succeeds("Guard::detach");
    if scene.can().liveness != Liveness::Session {
        scene.wait_until_free().await;
    }
}

async fn a_forged_handle_is_refused(scene: Fixture) {
    let renewed_by = async |handle: &Handle| {
        let mut hold = scene.two.store().resume(&scene.key(), handle).await?;
        hold.renew(scene.ttl(), scene.limit()).await
    };
    let release_by = async |handle: &Handle| {
        let hold = scene.two.store().resume(&scene.key(), handle).await;
        let released = hold.succeeds("Store::resume").release(scene.limit()).await;
        released.succeeds("Hold::release by its handle");
    };
    let guard = scene.acquire(&scene.one).await;
    let old = guard.detach().await.succeeds("Guard::detach");
    release_by(&old).await;
    let guard = scene.acquire(&scene.one).await;
    let token = guard.fencing_token().to_string();
    let handle = guard.detach().await.succeeds("Guard::detach");

    let refusals = [ErrorKind::Invalid, ErrorKind::NotHeld];
    let renewed = renewed_by(&Handle::new(token)).await;
    renewed.fails_with(&refusals, "Store::resume by the token alone");
    // The suite does not know which part of a handle is the secret. So it exchanges parts with the handle of an earlier
    // hold: one such mixture has the token of the present hold and the secret of the earlier one.
    let [old, new] = [&old, &handle].map(|handle| handle.expose().chars().collect::<Vec<_>>());
    for eighth in 1..8 {
        let cut = |text: &Vec<char>| text.len() * eighth / 8;
        let (old, new) = (old.split_at(cut(&old)), new.split_at(cut(&new)));
        for mixed in [[old.0, new.1], [new.0, old.1]] {
            let mixed = Handle::new(mixed.concat().into_iter().collect::<String>());
            if mixed != handle {
                let renewed = renewed_by(&mixed).await;
                renewed.fails_with(&refusals, "Hold::renew by parts of two handles");
            }
        }
    }
    release_by(&handle).await;
}
