//! A store that denies access after it has worked: the commands wait for access, or end at once with `--fail-fast`.

use super::pg_server::Server as PgServer;
use super::support::{Scene, eventually};
use super::{start, until_said};

/// Ends every session of the role, also those that are being opened at this moment.
fn end_sessions(server: &PgServer) {
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'locked_out'";
    eventually("no session is left", || (server.sql(end) == "0").then_some(()));
}

/// A server with a role that needs a password, and the URL of its advisory locks.
fn place() -> Option<(PgServer, String)> {
    let server = PgServer::start()?;
    server.sql("CREATE ROLE locked_out SUPERUSER LOGIN PASSWORD 'right'");
    let port = server.port;
    Some((server, format!("postgres+advisory://locked_out:right@127.0.0.1:{port}/postgres")))
}

#[test]
fn a_leader_waits_for_access_and_leads_again() {
    let Some((server, url)) = place() else { return };
    let scene = Scene::new();
    let script = ["sh", "-c", "echo leads; exec sleep 300"];
    let lead = ["lead", "-s", &url, "--ttl", "3s", "demo", "--"];
    let mut leader = start(&scene, &[&lead[..], &script].concat());
    assert_eq!(leader.line(), "leads");
    server.sql("ALTER ROLE locked_out NOLOGIN");
    end_sessions(&server);
    until_said(&scene, "the store has been away");
    let said = scene.read("said");
    assert!(said.contains("rejected the user") && !said.contains("right"), "{said}");
    server.sql("ALTER ROLE locked_out LOGIN");
    assert_eq!(leader.line(), "leads");
}

#[test]
fn a_leader_and_a_waiter_that_must_fail_fast_end_at_once() {
    let Some((server, url)) = place() else { return };
    let (scene, waiting) = (Scene::new(), Scene::new());
    let script = ["sh", "-c", "echo leads; exec sleep 300"];
    let lead = ["lead", "--fail-fast", "-s", &url, "--ttl", "3s", "demo", "--"];
    let mut leader = start(&scene, &[&lead[..], &script].concat());
    assert_eq!(leader.line(), "leads");
    let mut waiter =
        start(&waiting, &["run", "--fail-fast", "-s", &url, "--ttl", "3s", "demo", "true"]);
    until_said(&waiting, "waiting for demo: held by");
    server.sql("ALTER ROLE locked_out NOLOGIN");
    end_sessions(&server);
    assert_eq!(leader.code(), Some(125), "{}", scene.read("said"));
    assert_eq!(waiter.code(), Some(125), "{}", waiting.read("said"));
    for scene in [&scene, &waiting] {
        let said = scene.read("said");
        assert!(said.contains("rejected the user") && !said.contains("has been away"), "{said}");
    }
}

#[test]
fn an_idle_worker_waits_for_access() {
    let Some((server, url)) = place() else { return };
    let scene = Scene::new();
    let url = url.replacen("postgres+advisory", "postgres", 1);
    let table = "denied_jobs";
    assert_eq!(scene.outcome(&["schema", "-s", &url, "--apply", "--queue", table]).0, Some(0));
    let mut working = start(&scene, &["work", "-s", &url, table, "echo", "ran"]);
    let add = || assert_eq!(scene.outcome(&["job", "add", "-s", &url, table]).0, Some(0));
    add();
    assert_eq!(working.line(), "ran");
    server.sql("ALTER ROLE locked_out NOLOGIN");
    end_sessions(&server);
    until_said(&scene, "denied_jobs: the store has been away");
    server.sql("ALTER ROLE locked_out LOGIN");
    add();
    assert_eq!(working.line(), "ran");
}
