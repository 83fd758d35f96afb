//! Buckets whose settings drop, hide or refuse the records of holders: refused at the start, and when they are edited
//! under a running client.

use std::time::Duration;

use serde_json::{Value, json};
use tenure::store::{Finding, FindingLevel};
use tenure::{Client, Error, ErrorKind, Loss};

use crate::raw::{Raw, Wrote};
use crate::services;
use crate::support::{Server, connect, unique};

const TTL: Duration = Duration::from_secs(15);
/// Of holds whose loss is waited for.
const SHORT: Duration = Duration::from_secs(6);
/// Of claims that must not wait for ever where they should be refused.
const LIMIT: Duration = Duration::from_secs(8);

/// Makes a bucket as `nats kv add` does, but for some settings.
async fn make(server: &str, changes: &Value) -> (String, Raw) {
    let name = unique("settings");
    let url = format!("{server}/{name}");
    let raw = Raw::connect(&url).await;
    let mut config = json!({
        "name": format!("KV_{name}"),
        "subjects": [format!("$KV.{name}.>")],
        "retention": "limits",
        "max_consumers": -1,
        "max_msgs_per_subject": 1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msg_size": -1,
        "storage": "file",
        "discard": "new",
        "num_replicas": 1,
        "duplicate_window": 120_000_000_000_u64,
        "allow_rollup_hdrs": true,
        "allow_direct": true,
        "deny_delete": true,
    });
    merge(&mut config, changes);
    let made = raw.api(&format!("STREAM.CREATE.KV_{name}"), &config).await;
    assert!(made["error"].is_null(), "{changes}: {made}");
    (url, raw)
}

fn merge(config: &mut Value, changes: &Value) {
    for (field, value) in changes.as_object().expect("fields") {
        config[field] = value.clone();
    }
}

/// Changes settings of a bucket that is there.
async fn edit(raw: &Raw, changes: &Value) {
    let mut config = raw.info().await.expect("there")["config"].clone();
    merge(&mut config, changes);
    let name = config["name"].as_str().expect("a name").to_owned();
    let edited = raw.api(&format!("STREAM.UPDATE.{name}"), &config).await;
    assert!(edited["error"].is_null(), "{changes}: {edited}");
}

/// Takes some other names, each of which stays in the bucket.
async fn take_names(client: &Client, count: usize) {
    for number in 0..count {
        let guard = client.lock(format!("other-{number}")).ttl(TTL).acquire().await.expect("free");
        guard.release().await.expect("held");
    }
}

fn check(error: &Error, parts: &[&str]) {
    check_kind(error, ErrorKind::Misconfigured, parts);
}

/// As [`check`], for a bucket without room: a claim waits for room, and `try_acquire` fails with the reason.
fn check_full(error: &Error, parts: &[&str]) {
    check_kind(error, ErrorKind::Unavailable, parts);
}

fn check_kind(error: &Error, kind: ErrorKind, parts: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "no {part:?} in: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_discards_the_oldest_record_is_refused() {
    let Some(server) = services::nats() else { return };
    let (url, raw) = make(&server, &json!({ "discard": "old", "max_msgs": 100 })).await;
    let error = match Client::connect(&url).await {
        Err(error) => error,
        Ok(client) => {
            // What adopting it leads to.
            let first = client.lock("key").ttl(TTL).acquire().await.expect("free");
            take_names(&client, 120).await;
            let second = connect(&url).await.lock("key").ttl(TTL).try_acquire().await;
            let both = first.is_held() && second.is_ok_and(|second| second.is_held());
            panic!("the bucket was adopted; two holders: {both}");
        }
    };
    let name = url.rsplit_once('/').expect("a bucket").1;
    let run = format!("nats stream edit KV_{name} --discard=new");
    check(&error, &[name, "discard is old", "max_msgs is 100", &run]);
    // What the message says to run helps.
    edit(&raw, &json!({ "discard": "new" })).await;
    connect(&url).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_setting_that_drops_or_hides_records_is_refused_by_name() {
    let Some(server) = services::nats() else { return };
    let refused = [
        (
            json!({ "discard": "old", "max_bytes": 4_096 }),
            vec!["discard is old", "max_bytes is 4096"],
        ),
        (json!({ "retention": "interest" }), vec!["retention is interest", "nats kv add"]),
        (json!({ "retention": "workqueue" }), vec!["retention is workqueue", "nats kv add"]),
        (json!({ "discard_new_per_subject": true }), vec!["discard_new_per_subject is true"]),
        (json!({ "no_ack": true }), vec!["no_ack is true", "--ack"]),
        (json!({ "discard": "old", "allow_msg_counter": true }), vec!["allow_msg_counter is true"]),
        (json!({ "persist_mode": "async" }), vec!["persist_mode is async"]),
        // Two at once are both told.
        (
            json!({ "discard": "old", "max_msgs": 7, "no_ack": true }),
            vec!["max_msgs is 7", "no_ack is true"],
        ),
    ];
    for (changes, parts) in refused {
        let (url, _raw) = make(&server, &changes).await;
        match Client::connect(&url).await {
            Err(error) => check(&error, &parts),
            Ok(_) => panic!("{changes}: the bucket was adopted"),
        }
    }
    // A transform moves records to subjects that no client reads.
    let name = unique("settings");
    let raw = Raw::connect(&format!("{server}/{name}")).await;
    let transform = json!({
        "name": format!("KV_{name}"), "subjects": [format!("$KV.{name}.>")], "max_msgs_per_subject": 1,
        "storage": "file", "num_replicas": 1, "discard": "new",
        "subject_transform": { "src": format!("$KV.{name}.>"), "dest": format!("moved.{name}.>") },
    });
    let made = raw.api(&format!("STREAM.CREATE.KV_{name}"), &transform).await;
    assert!(made["error"].is_null(), "{made}");
    let error = Client::connect(&format!("{server}/{name}")).await.expect_err("refused");
    check(&error, &["subject_transform"]);
    // nlock's form: a marker of an expired record can overwrite a renewal that was acknowledged.
    let ttl = 2_000_000_000_u64;
    let marked = json!({
        "storage": "memory", "max_age": ttl, "duplicate_window": ttl,
        "allow_msg_ttl": true, "subject_delete_marker_ttl": ttl,
    });
    let (url, _raw) = make(&server, &marked).await;
    let error = Client::connect(&url).await.expect_err("refused");
    check(&error, &["subject_delete_marker_ttl"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buckets_made_by_other_tools_are_adopted() {
    let Some(server) = services::nats() else { return };
    let adopted = [
        json!({}),
        // As the first versions of the key-value store made it.
        json!({ "discard": "old" }),
        // Full is refused, not forgotten.
        json!({ "max_bytes": 1_048_576, "max_msgs": 1_000 }),
        json!({ "deny_purge": true, "allow_rollup_hdrs": false, "allow_msg_ttl": true }),
        json!({ "max_age": 48 * 3_600_000_000_000_u64 }),
    ];
    for changes in adopted {
        let (url, _raw) = make(&server, &changes).await;
        let guard = connect(&url).await.lock("key").ttl(TTL).acquire().await;
        let guard = guard.unwrap_or_else(|error| panic!("{changes}: {error}"));
        guard.release().await.unwrap_or_else(|error| panic!("{changes}: {error}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_edited_under_its_clients_grants_no_second_hold() {
    let Some(server) = services::nats() else { return };
    let (url, raw) = make(&server, &json!({})).await;
    let (first, second) = (connect(&url).await, connect(&url).await);
    let guard = first.lock("key").ttl(SHORT).acquire().await.expect("free");
    edit(&raw, &json!({ "discard": "old", "max_msgs": 3 })).await;
    // Others, which have not noticed: the record of the key is gone.
    for number in 0..5 {
        let wrote = raw.write(&format!("lock.raw-{number}"), Some("{}"), 0).await;
        assert!(matches!(wrote, Wrote::At(_)), "{wrote:?}");
    }
    let Err(error) = second.lock("key").ttl(TTL).try_acquire().await else {
        panic!("granted, while the first holds it: {}", guard.is_held())
    };
    check(&error, &["discard is old", "max_msgs is 3"]);
    // The first one's renewal is refused, and it hears of that before its deadline.
    let lost = tokio::time::timeout(SHORT, guard.lost()).await.expect("told");
    assert_eq!(lost.reason, Loss::Taken);
    // Mended, it serves again.
    edit(&raw, &json!({ "discard": "new", "max_msgs": -1 })).await;
    let guard = second.lock("key").ttl(TTL).try_acquire().await.expect("free again");
    guard.release().await.expect("held");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_edited_during_an_outage_is_noticed_by_the_next_request() {
    let Some(program) = services::nats_server() else { return };
    let mut server = Server::start(&program);
    let (url, raw) = make(&server.url(), &json!({})).await;
    let client = connect(&url).await;
    // Both names are known: nothing about them says that the bucket has changed.
    client.lock("key").ttl(TTL).acquire().await.expect("free").release().await.expect("held");
    let guard = client.lock("held").ttl(SHORT).acquire().await.expect("free");
    edit(&raw, &json!({ "discard": "old", "max_msgs": 1_000 })).await;
    server.kill();
    server.resume_after_kill();
    let request = client.lock("key").ttl(TTL).timeout(Duration::from_secs(10));
    let Err(error) = request.acquire().await else { panic!("granted in a bucket that discards") };
    check(&error, &["discard is old", "max_msgs is 1000"]);
    let lost = tokio::time::timeout(SHORT, guard.lost()).await.expect("told");
    assert_eq!(lost.reason, Loss::Taken, "at the renewal, not at the deadline");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_bucket_is_named_by_the_write_that_it_refuses() {
    let Some(server) = services::nats() else { return };
    let (url, _raw) = make(&server, &json!({ "max_msgs": 2 })).await;
    let client = connect(&url).await;
    take_names(&client, 2).await;
    let error = client.lock("third").ttl(TTL).try_acquire().await.expect_err("no room");
    check_full(&error, &["is full", "max_msgs is 2", "--max-msgs=-1"]);
    // Names that have a record are written in its place.
    client.lock("other-1").ttl(TTL).acquire().await.expect("free").release().await.expect("held");

    let (url, raw) = make(&server, &json!({ "max_bytes": 900 })).await;
    let client = connect(&url).await;
    let guard = client.lock("key").ttl(Duration::from_secs(3)).acquire().await.expect("room");
    // The next name does not fit.
    let mut fills = 0;
    while let Wrote::At(_) =
        raw.write(&format!("lock.fill-{fills}"), Some(&"x".repeat(60)), 0).await
    {
        fills += 1;
    }
    let error = client.lock("next").ttl(TTL).try_acquire().await.expect_err("no room");
    check_full(&error, &["is full", "max_bytes is 900", "--max-bytes=-1"]);
    drop(guard);

    let (url, _raw) = make(&server, &json!({ "max_msg_size": 100 })).await;
    let client = connect(&url).await;
    let request = client.lock("key").ttl(TTL).timeout(LIMIT);
    let error = request.acquire().await.expect_err("too long");
    check(&error, &["max_msg_size is 100", "--max-msg-size=-1"]);
}

/// Reports of an outage, in their order.
type Reports = tokio::sync::mpsc::UnboundedReceiver<String>;

/// Acquires "key" in a task, and returns the reports of its outage.
fn acquire_reported(
    client: &Client,
    fair: bool,
) -> (tokio::task::JoinHandle<tenure::Result<tenure::Guard>>, Reports) {
    let (sender, reports) = tokio::sync::mpsc::unbounded_channel();
    let report = move |outage: &tenure::StoreOutage| {
        // Only a test that is over reads no reports.
        let _ = sender.send(format!("{outage:?}"));
    };
    let request = client.lock("key").ttl(TTL).timeout(Duration::from_secs(30)).on_outage(report);
    let request = if fair { request.fair() } else { request };
    (tokio::spawn(request.acquire()), reports)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_bucket_is_waited_for_and_reported() {
    let Some(server) = services::nats() else { return };
    let (url, raw) = make(&server, &json!({ "max_msgs": 2 })).await;
    let client = connect(&url).await;
    take_names(&client, 2).await;
    let (acquiring, mut reports) = acquire_reported(&client, false);
    let report = reports.recv().await.expect("reported");
    assert!(report.contains("is full") && report.contains("max_msgs is 2"), "{report}");
    edit(&raw, &json!({ "max_msgs": -1 })).await;
    let guard = acquiring.await.expect("no panic").expect("room");
    guard.release().await.expect("held");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fair_waiter_outlasts_a_limit_of_consumers() {
    let Some(server) = services::nats() else { return };
    let (url, raw) = make(&server, &json!({ "max_consumers": 1 })).await;
    let name = url.rsplit_once('/').expect("a bucket").1;
    let guard = connect(&url).await.lock("key").ttl(TTL).acquire().await.expect("free");
    // The only consumer that the bucket accepts.
    let config = json!({ "stream_name": format!("KV_{name}"), "config": {
        "name": "other", "durable_name": "other", "ack_policy": "none", "deliver_subject": "other",
    } });
    let made = raw.api(&format!("CONSUMER.DURABLE.CREATE.KV_{name}.other"), &config).await;
    assert!(made["error"].is_null(), "{made}");
    let (acquiring, mut reports) = acquire_reported(&connect(&url).await, true);
    let report = reports.recv().await.expect("reported");
    assert!(report.contains("maximum consumers limit reached"), "{report}");
    // Now the bucket accepts the watch of the queue, but not that of the record beside it: the waiter polls.
    let deleted = raw.api(&format!("CONSUMER.DELETE.KV_{name}.other"), &Value::Null).await;
    assert!(deleted["error"].is_null(), "{deleted}");
    let report = reports.recv().await.expect("it is back");
    assert!(!report.contains("maximum consumers"), "{report}");
    guard.release().await.expect("held");
    acquiring.await.expect("no panic").expect("granted").release().await.expect("held");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_as_long_as_the_bucket_keeps_records_is_refused() {
    let Some(server) = services::nats() else { return };
    let day = Duration::from_secs(24 * 60 * 60);
    let (url, raw) = make(&server, &json!({ "max_age": 86_400_000_000_000_u64 })).await;
    let client = connect(&url).await;
    let Err(error) = client.lock("key").ttl(day).detached().acquire().await else {
        panic!("a lease that outlasts its record was granted")
    };
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    for part in ["max_age", "24h", "--max-age=-1"] {
        assert!(error.to_string().contains(part), "no {part:?} in: {error}");
    }
    let shorter = client.lock("key").ttl(Duration::from_secs(24 * 60 * 60 - 1)).detached();
    shorter.acquire().await.expect("shorter").release().await.expect("held");
    edit(&raw, &json!({ "max_age": 0 })).await;
    let client = connect(&url).await;
    client
        .lock("key")
        .ttl(day)
        .detached()
        .acquire()
        .await
        .expect("kept")
        .release()
        .await
        .expect("held");
}

fn find<'a>(findings: &'a [Finding], what: &str) -> &'a Finding {
    let found = findings.iter().find(|finding| finding.what == what);
    found.unwrap_or_else(|| panic!("nothing of {what} in {findings:#?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_refuse_writes_are_a_warning_and_a_full_bucket_a_failure() {
    let Some(server) = services::nats() else { return };
    for (changes, names, verdict, part) in [
        (json!({}), 0, FindingLevel::Ok, "no limit"),
        (json!({ "max_msgs": 9 }), 2, FindingLevel::Warning, "2 of at most 9 records (max_msgs)"),
        (
            json!({ "max_bytes": 100_000 }),
            0,
            FindingLevel::Warning,
            "of at most 100000 bytes (max_bytes)",
        ),
        (json!({ "max_msg_size": 500 }), 0, FindingLevel::Warning, "at most 500 bytes per record"),
        (json!({ "max_msgs": 2 }), 2, FindingLevel::Failed, "2 of at most 2 records (max_msgs)"),
        (json!({ "max_age": 86_400_000_000_000_u64 }), 0, FindingLevel::Warning, "24h"),
    ] {
        let (url, _raw) = make(&server, &changes).await;
        let client = connect(&url).await;
        take_names(&client, names).await;
        let findings = client.examine(Duration::from_secs(20)).await;
        let limits = find(&findings, "settings");
        assert_eq!(limits.level, verdict, "{limits:?}");
        assert!(limits.detail.contains(part), "no {part:?} in {limits:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_edited_under_a_client_fails_its_examination() {
    let Some(server) = services::nats() else { return };
    let (url, raw) = make(&server, &json!({})).await;
    let client = connect(&url).await;
    edit(&raw, &json!({ "discard": "old", "max_bytes": 100_000 })).await;
    let findings = client.examine(Duration::from_secs(20)).await;
    let limits = find(&findings, "settings");
    assert_eq!(limits.level, FindingLevel::Failed, "{limits:?}");
    assert!(limits.detail.contains("discard is old"), "{limits:?}");
}
