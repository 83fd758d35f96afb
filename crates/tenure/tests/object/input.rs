//! Bad input: a clear error, and nothing destroyed.

use std::net::TcpListener;
use std::time::Duration;

use serde_json::json;
use tenure::store::FindingLevel;
use tenure::{Client, ErrorKind};

use crate::fake::{Fake, Fault, Manner, Op};
use crate::faults::{client, lock, until};
use crate::services;

async fn refusal(url: &str) -> tenure::Error {
    let client = Client::connect(url).await.expect("a good URL");
    let request = client.lock("k").ttl(Duration::from_secs(12)).timeout(Duration::from_secs(2));
    request.acquire().await.expect_err("refused")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_bucket_no_rights_and_no_server_are_told_apart() {
    let fake = Fake::quick();
    let host = fake.host();
    let options = format!("?endpoint={host}&anonymous=true");
    let error = refusal(&format!("gs://absent/p{options}")).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("no bucket absent"), "{error}");
    let error = refusal(&format!("gs://denied/p{options}")).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("storage.objects.get"), "{error}");
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let closed = free.local_addr().expect("bound");
    drop(free);
    let error = refusal(&format!("gs://locks/p?endpoint=http://{closed}&anonymous=true")).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn object_that_is_not_a_lock_is_never_overwritten() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    for (body, part) in [
        ("hello".to_owned(), "not a JSON object"),
        (json!({"name": "a report"}).to_string(), "no ownerId"),
        (json!({"ownerId": "x", "expiresAt": "soon"}).to_string(), "not a time"),
        ("x".repeat(100_000), "too large for a lock"),
    ] {
        fake.put("p/k", body.clone());
        let error = lock(&one).try_acquire().await.expect_err("no lock");
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains(part), "{error}");
        let seen = fake.seen();
        assert!(seen.iter().all(|(op, ..)| *op == Op::Read), "nothing but looks: {seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_name_bells_and_modes_that_are_not_there_are_refused() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let error = one.lock("x.bell").ttl(Duration::from_secs(1)).try_acquire().await;
    let error = error.expect_err("taken for a bell");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let error = one.semaphore("x", 2).try_acquire().await.expect_err("no semaphores");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_smallest_ttl_is_ten_seconds_where_time_is_told_in_whole_ones() {
    let fake = Fake::real();
    let one = client(&fake).await;
    let error = one.lock("x").ttl(Duration::from_secs(9)).try_acquire().await;
    let error = error.expect_err("too short");
    assert!(error.to_string().contains("10s"), "{error}");
}

async fn examined(fake: &Fake) -> Vec<tenure::store::Finding> {
    let one = client(fake).await;
    one.examine(Duration::from_secs(10)).await
}

fn verdict(findings: &[tenure::store::Finding], what: &str) -> FindingLevel {
    let found = findings.iter().find(|finding| finding.what == what);
    found.unwrap_or_else(|| panic!("nothing about {what}: {findings:?}")).level
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_looks_at_rights_conditions_settings_and_clock_and_leaves_nothing() {
    let fake = Fake::real();
    let findings = examined(&fake).await;
    for what in [
        "reachable",
        "create race",
        "replacing",
        "rights",
        "clock offset",
        "store clocks",
        "removing",
        "soft delete",
        "versioning",
    ] {
        assert_eq!(verdict(&findings, what), FindingLevel::Ok, "{findings:?}");
    }
    assert_eq!(fake.names(), Vec::<String>::new(), "nothing is left");

    fake.set_bucket(json!({
        "name": "locks", "versioning": {"enabled": true},
        "softDeletePolicy": {"retentionDurationSeconds": "604800"},
    }));
    fake.set(|manner| manner.skew = 3_600);
    let findings = examined(&fake).await;
    for what in ["soft delete", "versioning", "clock offset"] {
        assert_eq!(verdict(&findings, what), FindingLevel::Warning, "{findings:?}");
    }

    let careless = Fake::start(Manner { careless: true, ..Fake::quick().manner() });
    let findings = examined(&careless).await;
    assert_eq!(verdict(&findings, "create race"), FindingLevel::Failed, "{findings:?}");
    assert_eq!(verdict(&findings, "removing"), FindingLevel::Warning, "{findings:?}");

    fake.next(Op::Write, "", Fault::Refuse(403));
    let findings = examined(&fake).await;
    assert_eq!(verdict(&findings, "rights"), FindingLevel::Failed, "{findings:?}");
}

/// Waits until every object is older than the slack of the store's clock, by that clock.
async fn time_passes(fake: &Fake) {
    let written = fake.now();
    until("a later time", || fake.now() > written + 0.1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clean_removes_released_lock_objects_and_nothing_else() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let ttl = Duration::from_secs(12);
    one.lock("old").ttl(ttl).acquire().await.expect("free").release().await.expect("ours");
    let held = one.lock("held").ttl(ttl).acquire().await.expect("free");
    fake.put("p/report.json", json!({"a": 1}).to_string());
    let record = json!({"ownerId": "x", "expiresAt": 0, "waitingOwnerId": "y", "waiterExpiresAt": fake.now() + 9.0});
    fake.put("p/awaited", record.to_string());
    fake.put("elsewhere", json!({"ownerId": "x", "expiresAt": 0}).to_string());
    time_passes(&fake).await;
    assert_eq!(one.store().clean(Duration::from_secs(60)).await.expect("looked"), 0, "too young");
    assert_eq!(one.store().clean(Duration::ZERO).await.expect("cleaned"), 1);
    let names = fake.names();
    assert_eq!(names, ["elsewhere", "p/awaited", "p/held", "p/report.json"]);
    held.release().await.expect("ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_says_less_with_the_content_is_asked_for_the_rest() {
    let fake = Fake::quick();
    fake.set(|manner| manner.terse = true);
    let (one, two) = (client(&fake).await, client(&fake).await);
    let guard = lock(&one).acquire().await.expect("free");
    let held = lock(&two).try_acquire().await.expect_err("held");
    assert_eq!(held.kind(), ErrorKind::Held, "{held}");
    let pending = lock(&two).enqueue().await.expect("queued");
    guard.handoff_requested().await;
    guard.release().await.expect("ours");
    let next = pending.wait().await.expect("handed over");
    next.release().await.expect("ours");
}

/// What a waiter and a holder leave, on the clouds that say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_and_azure_are_cleaned_at_the_version_that_was_looked_at() {
    let second = Duration::from_secs(1);
    let s3 = services::s3().map(|endpoint| (format!("s3://locks/gc?endpoint={endpoint}"), 2));
    let azure = services::azure().map(|endpoint| (format!("az://locks/gc?endpoint={endpoint}"), 1));
    for (url, left) in [s3, azure].into_iter().flatten() {
        let one = Client::connect(&url).await.expect("a good URL");
        let old = one.lock("old").acquire().await.expect("free");
        let token = old.fencing_token();
        // A waiter that gives up; on S3 its bell stays, empty.
        let given_up = one.lock("old").timeout(second).acquire().await.expect_err("held");
        assert_eq!(given_up.kind(), ErrorKind::Timeout, "{given_up}");
        old.release().await.expect("ours");
        let held = one.lock("held").acquire().await.expect("free");
        let clean = |age| one.store().clean(age);
        assert_eq!(clean(Duration::from_secs(600)).await.expect("looked"), 0, "{url}: too young");
        tokio::time::sleep(second * 3).await;
        assert_eq!(clean(Duration::ZERO).await.expect("cleaned"), left, "{url}");
        assert_eq!(clean(Duration::ZERO).await.expect("looked"), 0, "{url}: nothing is left");
        assert!(held.is_held());
        let again = one.lock("old").acquire().await.expect("free");
        assert!(again.fencing_token() > token, "{url}: the number grew over the removal");
        again.release().await.expect("ours");
        held.release().await.expect("ours");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_removes_whatever_version_is_named_is_not_cleaned() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let ttl = Duration::from_secs(12);
    one.lock("old").ttl(ttl).acquire().await.expect("free").release().await.expect("ours");
    time_passes(&fake).await;
    fake.set(|manner| manner.careless = true);
    let error = one.store().clean(Duration::ZERO).await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("nothing was removed"), "{error}");
    assert_eq!(fake.names(), ["p/old"], "and nothing of the proof is left");
}

/// Without its object, the next holder within the same second would get the same fencing token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clean_keeps_a_lock_released_just_now() {
    let fake = Fake::real();
    fake.set(|manner| manner.limited = false);
    let one = client(&fake).await;
    one.lock("new").acquire().await.expect("free").release().await.expect("ours");
    assert_eq!(one.store().clean(Duration::ZERO).await.expect("looked"), 0);
    assert_eq!(fake.names(), ["p/new"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clean_removes_dead_and_cleared_bells_only() {
    let fake = Fake::quick();
    let one = client(&fake).await;
    let bell = |life: u64| json!({"waiterId": "w", "leaseMs": 1_000, "lifeMs": life}).to_string();
    fake.put("p/dead.bell", bell(1));
    fake.put("p/cleared.bell", "{}");
    fake.put("p/rung.bell", bell(60_000));
    fake.put("p/door.bell", json!({"a": "song"}).to_string());
    time_passes(&fake).await;
    assert_eq!(one.store().clean(Duration::from_secs(60)).await.expect("looked"), 0, "too young");
    assert_eq!(one.store().clean(Duration::ZERO).await.expect("cleaned"), 2);
    assert_eq!(fake.names(), ["p/door.bell", "p/rung.bell"]);
}
