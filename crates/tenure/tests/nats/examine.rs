//! What `tenure doctor` is told of servers and buckets.

use std::time::Duration;

use tenure::Client;
use tenure::store::{Finding, FindingLevel};

use crate::raw::Raw;
use crate::services;
use crate::support::{Server, connect, free_port, unique};

const LIMIT: Duration = Duration::from_secs(20);

async fn examine(client: &Client) -> Vec<Finding> {
    client.examine(LIMIT).await
}

fn find<'a>(findings: &'a [Finding], what: &str) -> &'a Finding {
    let found = findings.iter().find(|finding| finding.what == what);
    found.unwrap_or_else(|| panic!("nothing of {what} in {findings:#?}"))
}

fn check(findings: &[Finding], what: &str, verdict: FindingLevel, part: &str) {
    let finding = find(findings, what);
    assert_eq!(finding.level, verdict, "{finding:?}");
    assert!(finding.detail.contains(part), "no {part:?} in {finding:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_by_itself_is_examined_and_nothing_is_left_behind() {
    for (server, version) in [(services::nats(), "2.15."), (services::nats_older(), "2.10.")] {
        let Some(server) = server else { return };
        let url = format!("{server}/{}", unique("doctor"));
        let client = connect(&url).await;
        let raw = Raw::connect(&url).await;
        let findings = examine(&client).await;
        assert!(findings.iter().all(|f| f.level != FindingLevel::Failed), "{findings:#?}");
        check(&findings, "servers", FindingLevel::Ok, version);
        check(&findings, "bucket", FindingLevel::Warning, "file storage, 1 replica, tenure's form");
        check(&findings, "durability", FindingLevel::Warning, "if its server loses power");
        check(&findings, "rights", FindingLevel::Ok, "read, write, watch, purge");
        let advice = find(&findings, "durability").advice.as_deref();
        assert!(advice.is_some_and(|advice| advice.contains("sync_interval")), "{findings:#?}");
        let left = raw.info().await.expect("there")["state"].clone();
        assert_eq!((&left["last_seq"], &left["consumer_count"]), (&0.into(), &0.into()), "{left}");
        // Once it has been used, a second look says the same.
        client.lock("tenure/doctor").acquire().await.expect("free").release().await.expect("held");
        let again = examine(&client).await;
        check(&again, "rights", FindingLevel::Ok, "read, write, watch, purge");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_tells_of_its_servers_and_replicas() {
    let Some(server) = services::nats_cluster() else { return };
    let client = connect(&format!("{server}/{}?replicas=3", unique("doctor"))).await;
    let findings = examine(&client).await;
    assert!(findings.iter().all(|f| f.level != FindingLevel::Failed), "{findings:#?}");
    for node in ["node0 2.", "node1 2.", "node2 2."] {
        check(&findings, "servers", FindingLevel::Ok, node);
    }
    check(&findings, "bucket", FindingLevel::Ok, "file storage, 3 replicas");
    assert!(find(&findings, "replicas").detail.contains("led by node"), "{findings:#?}");
    check(
        &findings,
        "durability",
        FindingLevel::Warning,
        "if 2 of its 3 servers lose power at once",
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_form_of_nlock_is_a_warning() {
    let Some(server) = services::nats() else { return };
    let client = connect(&format!("{server}/{}?form=nlock&ttl=2s", unique("doctor"))).await;
    let findings = examine(&client).await;
    check(&findings, "bucket", FindingLevel::Warning, "memory storage, 1 replica, nlock's form");
    check(&findings, "durability", FindingLevel::Warning, "in memory");
    check(&findings, "rights", FindingLevel::Ok, "read, write, watch");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_that_are_missing_are_named_one_by_one() {
    let Some(program) = services::nats_server() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("rights.conf");
    let text = r#"authorization { users = [
        { user: all, password: pw }
        { user: reader, password: pw, permissions: { publish: ["$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>"], subscribe: ["_INBOX.>"] } }
        { user: plain, password: pw, permissions: { publish: ["$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.CONSUMER.CREATE.>", "$KV.b.>"], subscribe: ["_INBOX.>"] } }
        { user: deaf, password: pw, permissions: { publish: [">"], subscribe: ["something.else"] } }
    ] }"#;
    std::fs::write(&config, text).expect("a file of the test's own");
    let config = config.to_str().expect("a plain name");
    let server = Server::with(&program, &["--jetstream", "--config", config]);
    let at = |user: &str| format!("nats://{user}:pw@127.0.0.1:{}/b", server.port);
    connect(&at("all")).await;

    let begun = std::time::Instant::now();
    let findings = examine(&connect(&at("reader")).await).await;
    assert!(begun.elapsed() < LIMIT, "what is refused is not waited for: {:?}", begun.elapsed());
    check(&findings, "right to write", FindingLevel::Failed, "$KV.b.lock.tenure/doctor");
    check(&findings, "right to watch", FindingLevel::Failed, "$JS.API.CONSUMER.CREATE.KV_b");
    check(&findings, "right to purge", FindingLevel::Warning, "$JS.API.STREAM.PURGE.KV_b");
    assert!(!format!("{findings:?}").contains("pw@"), "{findings:#?}");

    let findings = examine(&connect(&at("plain")).await).await;
    assert!(findings.iter().all(|f| f.level != FindingLevel::Failed), "{findings:#?}");
    check(&findings, "right to purge", FindingLevel::Warning, "STREAM.PURGE");

    let error = Client::connect(&at("deaf")).await.expect_err("cannot hear an answer");
    assert_eq!(error.kind(), tenure::ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("Subscription"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn how_often_a_server_writes_to_disk_is_told_by_its_monitoring_port() {
    let Some(program) = services::nats_server() else { return };
    for (sync, verdict, part) in [
        ("always", FindingLevel::Ok, "on disk before it is acknowledged"),
        ("7s", FindingLevel::Warning, "up to 7s before it is on disk: if its server loses power"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("server.conf");
        let text = format!("jetstream {{ sync_interval: {sync} }}");
        std::fs::write(&config, text).expect("a file of the test's own");
        let (config, port) = (config.to_str().expect("a plain name"), free_port());
        let monitor = format!("127.0.0.1:{port}");
        let port = port.to_string();
        let server = Server::with(&program, &["--config", config, "--http_port", &port]);
        let client = connect(&format!("{}/b?monitor={monitor}", server.url())).await;
        check(&examine(&client).await, "durability", verdict, part);
    }
}
