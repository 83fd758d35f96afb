//! nlock's participants and ours on one bucket: one holder at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tenure::ErrorKind;

use crate::raw::{Raw, Wrote};
use crate::services;
use crate::support::{connect, unique, until};

const TTL: Duration = Duration::from_secs(2);
const OWNER: &str = "0b54ac6e-9d4d-4f3e-8f0e-2f6d0b8f0c11";

fn bucket(server: &str) -> String {
    format!("{server}/{}?form=nlock&ttl=2s", unique("mixed"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn participants_of_nlock_and_ours_exclude_each_other() {
    const ROUNDS: u32 = 20;
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    // The bucket is there before the others come.
    drop(connect(&url).await);
    let inside = Arc::new(AtomicU32::new(0));
    let work = async |inside: &AtomicU32| {
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside at once");
        tokio::time::sleep(Duration::from_millis(1)).await;
        inside.fetch_sub(1, Ordering::SeqCst);
    };
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..4_u32 {
        let (url, inside) = (url.clone(), Arc::clone(&inside));
        tasks.spawn(async move {
            if number % 2 == 0 {
                let client = connect(&url).await;
                for _ in 0..ROUNDS {
                    let request = client.lock("a.b").ttl(TTL).timeout(Duration::from_secs(60));
                    let guard = request.acquire().await.expect("its turn");
                    work(&inside).await;
                    guard.release().await.expect("held");
                }
            } else {
                let raw = Raw::connect(&url).await;
                let owner = format!("{number:08x}{}", &OWNER[8..]);
                for _ in 0..ROUNDS {
                    let revision = loop {
                        match raw.nlock_try("a.b", &owner).await {
                            Some(revision) => break revision,
                            None => tokio::time::sleep(Duration::from_millis(5)).await,
                        }
                    };
                    // Renewal by revision, as nlock's keep-alive does.
                    let renewed = raw.write("a.b", Some(&owner), revision).await;
                    let Wrote::At(revision) = renewed else { panic!("lost: {renewed:?}") };
                    work(&inside).await;
                    let released = raw.write("a.b", None, revision).await;
                    assert!(matches!(released, Wrote::At(_)), "{released:?}");
                }
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.expect("no task fails");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_of_theirs_is_shown_and_ends_with_the_buckets_ttl() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let client = connect(&url).await;
    let raw = Raw::connect(&url).await;
    let revision = raw.nlock_try("key", OWNER).await.expect("free");
    let error = client.lock("key").ttl(TTL).try_acquire().await.expect_err("held by nlock");
    assert_eq!(error.kind(), ErrorKind::Held, "{error}");
    assert!(error.to_string().contains(OWNER), "{error}");
    let state = client.inspect("key").await.expect("shown");
    assert_eq!(state.holders[0].token.number(), revision);
    // It is not renewed: the server removes it.
    let request = client.lock("key").ttl(TTL).timeout(Duration::from_secs(20));
    let guard = request.acquire().await.expect("the bucket's ttl ended it");
    assert!(guard.fencing_token() > state.holders[0].token);
    assert_eq!(raw.nlock_try("key", OWNER).await, None, "they see ours");
    guard.release().await.expect("held");
    raw.nlock_try("key", OWNER).await.expect("released for them, too");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_they_overwrite_is_lost() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let client = connect(&url).await;
    let raw = Raw::connect(&url).await;
    let guard = client.lock("key").ttl(TTL).acquire().await.expect("free");
    raw.overwrite("key", OWNER).await;
    guard.lost().await;
    until("theirs", async || {
        client.inspect("key").await.expect("shown").holders[0]
            .by
            .as_ref()
            .is_some_and(|by| by.id == OWNER)
    })
    .await;
}

#[tokio::test]
async fn a_longer_ttl_than_the_buckets_is_refused() {
    let Some(server) = services::nats() else { return };
    let client = connect(&bucket(&server)).await;
    let error = client.lock("key").ttl(TTL * 2).acquire().await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("the bucket's ttl of 2s"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ttl_that_another_participant_changes_is_a_loss() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let client = connect(&url).await;
    let raw = Raw::connect(&url).await;
    let guard = client.lock("key").ttl(TTL).acquire().await.expect("free");
    // What a second manager of nlock's with another ttl does at its start.
    let mut config = raw.info().await.expect("there")["config"].clone();
    config["max_age"] = 1_000_000_000_u64.into();
    config["duplicate_window"] = 1_000_000_000_u64.into();
    let name = config["name"].as_str().expect("a name").to_owned();
    let changed = raw.api(&format!("STREAM.UPDATE.{name}"), &config).await;
    assert!(changed["error"].is_null(), "{changed}");
    let lost = tokio::time::timeout(Duration::from_secs(20), guard.lost()).await;
    assert_eq!(lost.expect("told").reason, tenure::Loss::Taken, "not only at its own deadline");
    let error = client.lock("other").ttl(TTL).acquire().await.expect_err("not as agreed");
    assert!(error.to_string().contains("changed the bucket's ttl from 2s to 1s"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revisions_of_their_holders_and_ours_are_one_order() {
    let Some(server) = services::nats() else { return };
    let url = bucket(&server);
    let client = connect(&url).await;
    let raw = Raw::connect(&url).await;
    // Theirs: acquired, renewed once, released.
    let first = raw.nlock_try("key", OWNER).await.expect("free");
    let Wrote::At(renewed) = raw.write("key", Some(OWNER), first).await else { panic!("lost") };
    let shown = client.inspect("key").await.expect("shown");
    assert_eq!(shown.holders[0].revision, Some(renewed), "theirs is the last one");
    assert!(matches!(raw.write("key", None, renewed).await, Wrote::At(_)));
    // Ours: larger than any of theirs from the first one on, and raised by renewals, as theirs is.
    let guard = client.lock("key").ttl(TTL).acquire().await.expect("free");
    let granted = guard.revision().expect("a bucket has revisions");
    assert!(granted > renewed);
    until("a renewal raises it", async || guard.revision().is_some_and(|now| now > granted)).await;
    let ask = serde_json::json!({ "last_by_subj": raw.subject("key") });
    let name = url.rsplit_once('/').and_then(|(_, name)| name.split('?').next()).expect("a bucket");
    until("it is the revision that they read", async || {
        let told = guard.revision();
        let found = raw.api(&format!("STREAM.MSG.GET.KV_{name}"), &ask).await;
        let there = found["message"]["seq"].as_u64();
        let shown = client.inspect("key").await.expect("shown").holders[0].revision;
        there == told && shown == told
    })
    .await;
    let last = guard.revision().expect("held");
    guard.release().await.expect("held");
    let next = raw.nlock_try("key", OWNER).await.expect("free");
    assert!(next > last, "a stale one of ours is refused by who has seen theirs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_of_our_own_form_has_revisions_and_memory_has_none() {
    let Some(server) = services::nats() else { return };
    let client = connect(&format!("{server}/{}", unique("mixed"))).await;
    let election = client.election("lead").ttl(TTL).start().await.expect("it starts");
    until("it leads", async || election.is_leader()).await;
    let leadership = election.leadership().expect("it leads");
    assert_eq!(leadership.revision().map(|first| first > 0), Some(true));
    election.shutdown(None).await.expect("it ends");
    let guard = connect("memory:revisions").await.lock("key").acquire().await.expect("free");
    assert_eq!(guard.revision(), None);
    guard.release().await.expect("held");
}
