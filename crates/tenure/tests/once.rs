//! Once per period, on stores that keep holds without a process and on one that keeps marks instead.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tenure::once::{Once, OnceRequest};
use tenure::store::{KeySpace, Store as _};
use tenure::{Client, Clock, ErrorKind, MemoryStore};

const HOUR: Duration = Duration::from_secs(3600);

/// A time some hours into the day.
fn hour(number: u32) -> SystemTime {
    SystemTime::UNIX_EPOCH + HOUR * (490_000 + number) + HOUR / 3
}

/// The stores: one that keeps holds without a process, and one that keeps marks.
async fn stores(name: &str) -> Vec<(tempfile::TempDir, Client)> {
    let mut stores = Vec::new();
    for scheme in ["memory", "file"] {
        let folder = tempfile::tempdir().unwrap();
        let url = match scheme {
            "memory" => format!("memory:once-{name}"),
            _ => format!("file:{}", folder.path().join("store").display()),
        };
        stores.push((folder, Client::connect(&url).await.unwrap()));
    }
    stores
}

fn hourly(client: &Client, at: SystemTime) -> OnceRequest {
    client.once("nightly").per(HOUR).at(at)
}

async fn runs(request: OnceRequest) -> bool {
    match request.begin().await.unwrap() {
        Once::Run(run) => {
            run.done().await.unwrap();
            true
        }
        Once::Ran(_) => false,
    }
}

#[tokio::test]
async fn each_slot_is_run_once() {
    for (_folder, client) in stores("each").await {
        for number in 1..=40 {
            let ran = runs(hourly(&client, hour(number))).await;
            let again = runs(hourly(&client, hour(number) + HOUR / 2)).await;
            assert_eq!((ran, again), (true, false), "{number} on {}", client.store());
            // Two periods later nothing is left of it on a store that counts leases; on the others a later one is there.
            if client.store().durable_notes().is_none() {
                for state in client.store().list(KeySpace::Lock, "", None).await.unwrap() {
                    let token = state.holders[0].token;
                    client
                        .store()
                        .evict(&state.key, token, "its two periods are over")
                        .await
                        .unwrap();
                }
            }
        }
    }
}

#[tokio::test]
async fn once_does_not_run_while_another_run_is_in_progress() {
    for (_folder, client) in stores("while").await {
        for retry in [false, true] {
            let at = hour(u32::from(retry));
            let Once::Run(run) = hourly(&client, at).retry(retry).begin().await.unwrap() else {
                panic!("nobody has run it");
            };
            assert!(run.guard().is_held());
            match hourly(&client, at).begin().await.unwrap() {
                Once::Ran(Some(by)) => assert_eq!(by.pid, std::process::id()),
                other => panic!("{other:?}"),
            }
            run.done().await.unwrap();
            assert!(!runs(hourly(&client, at).retry(true)).await, "done is done");
        }
    }
}

#[tokio::test]
async fn a_run_that_failed_is_repeated_only_where_that_was_said() {
    for (_folder, client) in stores("failed").await {
        for (retry, dropped) in [(false, false), (false, true), (true, false), (true, true)] {
            let at = hour(u32::from(retry) * 2 + u32::from(dropped));
            let Once::Run(run) = hourly(&client, at).retry(retry).begin().await.unwrap() else {
                panic!("nobody has run it");
            };
            if dropped {
                drop(run);
                tokio::time::timeout(Duration::from_secs(20), client.idle()).await.unwrap();
            } else {
                run.failed().await.unwrap();
            }
            assert_eq!(runs(hourly(&client, at).retry(retry)).await, retry, "{}", client.store());
        }
    }
}

#[tokio::test]
async fn a_clock_that_went_back_runs_nothing() {
    for (_folder, client) in stores("back").await {
        assert!(runs(hourly(&client, hour(8))).await);
        let error = hourly(&client, hour(7)).begin().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("the clock of this host is behind"), "{error}");
        assert!(runs(hourly(&client, hour(9))).await, "nothing was changed");
    }
}

#[tokio::test]
async fn the_mark_of_a_run_outlasts_its_slot() {
    let client = Client::connect("memory:once-mark").await.unwrap();
    for retry in [false, true] {
        assert!(runs(hourly(&client, hour(u32::from(retry))).retry(retry)).await);
        let states = client.store().list(KeySpace::Lock, "", None).await.unwrap();
        let shortest = states.iter().map(|state| state.holders[0].lease_left.unwrap()).min();
        assert!(shortest.unwrap() > HOUR, "retry {retry}: {shortest:?}");
    }
}

#[tokio::test]
async fn a_mark_of_the_far_future_blocks_nothing_where_marks_never_expire() {
    for (_folder, client) in stores("future").await {
        if client.store().durable_notes().is_some() {
            assert!(runs(hourly(&client, hour(1_000))).await);
            assert!(runs(hourly(&client, hour(1))).await);
        }
    }
}

#[tokio::test]
async fn slots_with_names_are_kept_as_long_as_was_said() {
    for (_folder, client) in stores("named").await {
        let day = |day: &str| client.once("nightly").slot(day, HOUR * 24);
        assert!(runs(day("2026-11-14")).await);
        assert!(!runs(day("2026-11-14")).await);
        assert!(runs(day("2026-11-15")).await);
        assert!(runs(client.once("other").slot("2026-11-14", HOUR)).await);
    }
}

#[tokio::test]
async fn invalid_once_requests_are_rejected() {
    let client = Client::connect("memory:once-refused").await.unwrap();
    let said = async |request: OnceRequest| {
        let error = request.begin().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        error.to_string()
    };
    assert!(said(client.once("a").per(Duration::ZERO)).await.contains("a period of 0"));
    assert!(said(client.once("a")).await.contains("neither a period nor a slot is set"));
    assert!(said(client.once("").per(HOUR)).await.contains("the key is empty"));
    assert!(said(client.once("x".repeat(199)).per(HOUR)).await.contains("shorten it"));
    assert!(said(client.once("a").slot("x", Duration::ZERO)).await.contains("kept for 0"));
    assert!(said(client.once("a").slot("x\ny", HOUR)).await.contains("U+000A"));
}

/// A process that is stopped for long, wherever it has just read its clock, does not run a slot that another process
/// ran.
#[cfg(feature = "simulation")]
#[tokio::test]
async fn a_slot_is_not_run_again_by_a_process_that_was_stopped() {
    let mut readings = 0;
    loop {
        let (clock, hand) = Clock::manual();
        let store = Arc::new(MemoryStore::with_clock(clock.clone()));
        let client = Client::with_store(store.clone()).with_clock(clock.clone());
        let Ok(Once::Run(run)) = hourly(&client, hour(1)).begin().await else {
            panic!("it is free")
        };
        let first = run.slot();
        run.done().await.expect("recorded");
        let left = Arc::new(AtomicU64::new(readings));
        let count = Arc::clone(&left);
        hand.stop_after_readings(move || match count.fetch_sub(1, Ordering::Relaxed) {
            0 => HOUR * 3,
            _ => Duration::ZERO,
        });
        let late = Client::with_store(store).with_clock(clock);
        match hourly(&late, hour(1) + HOUR / 4).begin().await {
            Ok(Once::Ran(_)) => {}
            // Stopped before the slot was computed: it is the present one.
            Ok(Once::Run(run)) => assert_ne!(
                run.slot(),
                first,
                "run again: stopped after {readings} readings of the clock"
            ),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
        if left.load(Ordering::Relaxed) < u64::MAX / 2 {
            break;
        }
        readings += 1;
    }
    assert!(readings > 1, "the clock was read {readings} times");
}

/// The reply to the claim is lost, and the grant is evicted before the repeated claim has confirmed it.
#[cfg(feature = "conformance")]
#[tokio::test]
async fn a_slot_without_a_holder_is_claimed_again() {
    use tenure::conformance::{Fault, Faults, Op};

    let (clock, hand) = Clock::manual();
    let memory = Arc::new(MemoryStore::with_clock(clock.clone()));
    let (store, faults) = Faults::wrap(memory.clone(), clock.clone());
    let client = Client::with_store(Arc::new(store)).with_clock(clock.clone());
    faults.next(Op::Claim, Fault::LoseReply);
    faults.next(Op::Renew, Fault::Delay);
    let once = tokio::spawn(client.once("nightly").slot("x", HOUR).begin());
    let (mut evicted, begun) = (false, clock.now());
    for _ in 0..1_000 {
        // Time passes only while every task waits.
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        let Some(pause) = hand.next_timer().map(|timer| timer.since(clock.now())) else { continue };
        // The claim is repeated after five seconds. The renewal that confirms it is delayed by 15 s, half of its limit.
        if clock.now().since(begun) >= Duration::from_secs(5) && !evicted {
            let states = memory.list(KeySpace::Lock, "", None).await.unwrap();
            memory.evict(&states[0].key, states[0].holders[0].token, "test").await.unwrap();
            evicted = true;
        }
        hand.advance(pause);
        if once.is_finished() {
            break;
        }
    }
    assert!(evicted);
    let once = once.await.unwrap().expect("claimed again");
    assert!(matches!(once, Once::Run(_)), "the first grant was not used: {once:?}");
}
