//! Refusals that waiting cannot cure: they end the command at once with 125, also if they come later.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use nix::sys::signal::Signal;

use super::nats_server::NatsServer;
use super::pg_server::Server as PgServer;
use super::support::{Running, Scene, Server, eventually};
use super::{services, start, until_said};

/// Runs on a store that refuses for good. The command has no `--wait`: if it waited, it would not end.
fn is_refused(scene: &Scene, url: &str, says: &str) {
    let mut commands = vec![&["run"][..], &["run", "--try"], &["lead"], &["once", "--per", "1h"]];
    if url.starts_with("postgres+advisory:") {
        commands.pop(); // `once` needs a store that keeps records.
    }
    for command in commands {
        let (code, _, said) = scene.outcome(&[command, &["-s", url, "demo", "true"]].concat());
        assert!(code == Some(125) && said.contains(says), "{command:?} {url}: {code:?}: {said}");
        assert!(!said.contains("has been away"), "{said}");
    }
    let (code, _, said) = scene.outcome(&["status", "-s", url, "demo"]);
    assert!(code == Some(125) && said.contains(says), "status {url}: {code:?}: {said}");
}

#[test]
fn an_unknown_database_and_a_wrong_password_end_at_once() {
    let Some(server) = PgServer::start() else { return };
    let scene = Scene::new();
    let unknown = format!("postgres://postgres@127.0.0.1:{}/unknown", server.port);
    let wrong = format!("postgres://locked_out:wrong@127.0.0.1:{}/postgres", server.port);
    for (url, says) in [(unknown, "no such database"), (wrong, "rejected the user")] {
        is_refused(&scene, &url, says);
        is_refused(&scene, &url.replacen("postgres:", "postgres+advisory:", 1), says);
    }
    is_refused(&scene, &server.url(), "there is no table");
}

#[test]
fn a_wrong_auth_token_and_wrong_credentials_end_at_once() {
    let scene = Scene::new();
    let server = Server::start(&scene, &["--auth-token", "right"]);
    is_refused(&scene, &server.url, "auth");
    let Some(mut nats) = NatsServer::new(&scene, "nats", &["--user", "a", "--pass", "right"])
    else {
        return;
    };
    nats.up();
    is_refused(&scene, &format!("nats://a:wrong@127.0.0.1:{}/locks", nats.port), "credentials");
}

#[test]
fn a_missing_bucket_ends_at_once() {
    let scene = Scene::new();
    if let Some(s3) = services::s3() {
        is_refused(&scene, &format!("s3://missing/p?endpoint={s3}"), "there is no bucket");
    }
    if let Some(azure) = services::azure() {
        is_refused(&scene, &format!("az://missing/p?endpoint={azure}"), "there is no container");
    }
}

/// Deletes the store of a holder and a waiter: the waiter ends with 125 and the reason, the holder loses its hold.
fn deleted_meanwhile(scene: &Scene, url: &str, says: &str, delete: impl FnOnce()) {
    let script = "echo ready; exec sleep 300";
    let hold = ["run", "-s", url, "--ttl", "10s", "demo", "--", "sh", "-c", script];
    let mut holder: Running = scene.start(&hold);
    assert_eq!(holder.line(), "ready");
    let mut waiter = start(scene, &["run", "-s", url, "--ttl", "10s", "demo", "true"]);
    until_said(scene, "waiting for demo: held by");
    // Not every store is deleted in one step, and the waiter must not get a lock whose record went first.
    waiter.signal(Signal::SIGSTOP);
    delete();
    waiter.signal(Signal::SIGCONT);
    assert_eq!(waiter.code(), Some(125), "{}", scene.read("said"));
    assert!(scene.read("said").contains(says), "{}", scene.read("said"));
    assert_eq!(holder.code(), Some(79));
}

#[test]
fn a_table_or_a_database_that_is_deleted_meanwhile_is_a_failure() {
    let Some(server) = PgServer::start() else { return };
    let scene = Scene::new();
    let url = |name: &str| format!("postgres://postgres@127.0.0.1:{}/{name}", server.port);
    let apply = |url: &str| {
        assert_eq!(scene.outcome(&["schema", "-s", url, "--locks", "--apply"]).0, Some(0));
    };
    apply(&server.url());
    let drop_table = || drop(server.sql("DROP TABLE tenure_locks"));
    deleted_meanwhile(&scene, &server.url(), "table is missing", drop_table);
    for scheme in ["postgres:", "postgres+advisory:"] {
        server.sql("CREATE DATABASE other");
        apply(&url("other"));
        let drop_database = || drop(server.sql("DROP DATABASE other WITH (FORCE)"));
        let url = url("other").replacen("postgres:", scheme, 1);
        deleted_meanwhile(&scene, &url, "no such database", drop_database);
    }
}

#[test]
fn a_nats_bucket_that_is_deleted_meanwhile_is_a_failure() {
    let scene = Scene::new();
    let Some(mut server) = NatsServer::new(&scene, "nats", &[]) else { return };
    server.up();
    let url = format!("nats://127.0.0.1:{}/locks", server.port);
    deleted_meanwhile(&scene, &url, "stream not found", || server.delete_bucket("locks"));
}

/// Sends a request to an emulator of S3; the status and the body of its reply.
fn s3_request(endpoint: &str, method: &str, path: &str) -> (u16, String) {
    let address = endpoint.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).unwrap();
    // The emulator does not check signatures, but wants a header of them.
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: s3.amazonaws.com\r\nauthorization: AWS tests:tests\r\n\
         content-length: 0\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
    (status, reply.split_once("\r\n\r\n").unwrap().1.to_owned())
}

#[test]
fn an_s3_bucket_that_is_deleted_meanwhile_is_a_failure() {
    let Some(s3) = services::s3() else { return };
    let scene = Scene::new();
    let bucket = format!("deleted-{}", std::process::id());
    let at = format!("/{bucket}");
    assert_eq!(s3_request(&s3, "PUT", &at).0, 200);
    let url = format!("s3://{bucket}/p?endpoint={s3}");
    deleted_meanwhile(&scene, &url, "there is no bucket", || {
        // A waiter may write in between, and only an empty bucket can be deleted.
        eventually("the bucket is gone", || {
            let (_, list) = s3_request(&s3, "GET", &format!("{at}?list-type=2"));
            for key in list.split("<Key>").skip(1).filter_map(|rest| rest.split('<').next()) {
                s3_request(&s3, "DELETE", &format!("{at}/{key}"));
            }
            (s3_request(&s3, "DELETE", &at).0 == 204).then_some(())
        });
    });
}
