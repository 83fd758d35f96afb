//! Servers and buckets that cannot be used are refused with words that help.

use serde_json::json;
use tenure::{Client, Error, ErrorKind};

use crate::raw::Raw;
use crate::services;
use crate::support::{Server, connect, free_port, unique, words};

async fn refused(url: &str) -> Error {
    match Client::connect(url).await {
        Err(error) => error,
        Ok(client) => panic!("{client:?} was let in"),
    }
}

#[tokio::test]
async fn no_server_and_no_jetstream() {
    let Some(program) = services::nats_server() else { return };
    let error = refused(&format!("nats://127.0.0.1:{}/b", free_port())).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(words(&error).contains("is the server up"), "{}", words(&error));

    let plain = Server::with(&program, &[]);
    let error = refused(&format!("{}/b", plain.url())).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("JetStream is off"), "{error}");
}

#[tokio::test]
async fn credentials_are_checked_and_never_shown() {
    let Some(program) = services::nats_server() else { return };
    let server = Server::with(&program, &["--jetstream", "--user", "me", "--pass", "hunter2"]);
    let at = |who: &str| format!("nats://{who}127.0.0.1:{}/b", server.port);
    for who in ["", "me:hunter3@", "hunter3@"] {
        let error = refused(&at(who)).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
        assert!(!words(&error).contains("hunter"), "{}", words(&error));
    }
    let client = connect(&at("me:hunter2@")).await;
    let guard = client.lock("a").acquire().await.expect("free");
    let shown = format!("{client:?} {guard:?} {}", client.store());
    assert!(!shown.contains("hunter"), "{shown}");
    guard.release().await.expect("held");

    let server = Server::with(&program, &["--jetstream", "--auth", "s3cret"]);
    connect(&format!("nats://s3cret@127.0.0.1:{}/b", server.port)).await;
}

#[tokio::test]
async fn missing_rights_are_told() {
    let Some(program) = services::nats_server() else { return };
    let folder = std::env::temp_dir().join(unique("tenure-test-nats-rights"));
    let config = r#"authorization { users = [
        { user: all, password: pw }
        { user: reader, password: pw, permissions: { publish: ["$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>"], subscribe: ["_INBOX.>"] } }
    ] }"#;
    std::fs::write(&folder, config).expect("a file of the test's own");
    let server =
        Server::with(&program, &["--jetstream", "--config", folder.to_str().expect("plain")]);
    let at = |user: &str| format!("nats://{user}:pw@127.0.0.1:{}/b", server.port);
    connect(&at("all")).await;
    let reader = connect(&at("reader")).await;
    let error = reader.lock("a").acquire().await.expect_err("may not write");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("$KV.b.lock.a"), "{error}");
    reader.inspect("a").await.expect("may look");
    std::fs::remove_file(folder).ok();
}

#[tokio::test]
async fn a_bucket_of_a_foreign_shape_is_refused_and_left_as_it_is() {
    let Some(server) = services::nats() else { return };
    for (change, part) in [
        (json!({ "max_msgs_per_subject": 5 }), "history of 5"),
        (
            json!({ "max_age": 60_000_000_000_u64, "duplicate_window": 60_000_000_000_u64 }),
            "ttl of 60s",
        ),
        (json!({ "storage": "memory" }), "a restart would forget"),
    ] {
        let name = unique("foreign");
        let url = format!("{server}/{name}");
        let raw = Raw::connect(&url).await;
        let mut config = json!({
            "name": format!("KV_{name}"),
            "subjects": [format!("$KV.{name}.>")],
            "max_msgs_per_subject": 1,
            "storage": "file",
            "num_replicas": 1,
        });
        for (field, value) in change.as_object().expect("fields") {
            config[field] = value.clone();
        }
        let made = raw.api(&format!("STREAM.CREATE.KV_{name}"), &config).await;
        assert!(made["error"].is_null(), "{made}");
        let error = refused(&url).await;
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains(part), "{error}");
        let after = raw.info().await.expect("still there");
        assert_eq!(after["config"], made["config"], "never changed");
    }
    let error = refused(&format!("{server}/{}?replicas=3", unique("foreign"))).await;
    assert!(error.to_string().contains("(10074)"), "the server's own code: {error}");
}
