//! `tenure work` while its database is away.

use nix::sys::signal::Signal;

use super::metrics::scrape;
use super::pg_server::{Server, free_port};
use super::support::{Scene, eventually};
use super::{event_names, start, until_said};

const TABLE: &str = "outage_jobs";

/// A server of the test's own that has a queue.
fn queue() -> Option<(Scene, Server, String)> {
    let (scene, server) = (Scene::new(), Server::start()?);
    let url = server.url();
    let schema = ["schema", "-s", &url, "--apply", "--queue", TABLE];
    assert_eq!(scene.outcome(&schema).0, Some(0));
    Some((scene, server, url))
}

/// Waits until the worker has a session on the server.
fn until_connected(server: &Server) {
    let sessions = "SELECT count(*) FROM pg_stat_activity \
                    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    eventually("a session", || (server.sql(sessions) != "0").then_some(()));
}

fn add_job(scene: &Scene, url: &str) {
    assert_eq!(scene.outcome(&["job", "add", "-s", url, TABLE]).0, Some(0));
}

#[test]
fn work_waits_for_a_database_that_starts_later() {
    let Some((scene, mut server, url)) = queue() else { return };
    add_job(&scene, &url);
    server.down();
    let mut working = start(&scene, &["work", "-s", &url, "--until-empty", TABLE, "echo", "ran"]);
    until_said(&scene, "outage_jobs: the store has been away");
    server.up();
    assert_eq!((working.line().as_str(), working.code()), ("ran", Some(0)));
    let said = scene.read("said");
    assert!(said.contains("outage_jobs: the store is back after"), "{said}");
}

#[test]
fn work_reports_an_outage_while_it_is_idle_and_while_all_its_commands_run() {
    let Some((scene, mut server, url)) = queue() else { return };
    let script = "echo started; while [ ! -e go ]; do sleep 0.1; done; echo done";
    let work = ["work", "-s", &url, "--json", "--lease", "20s", TABLE, "sh", "-c", script];
    let mut working = start(&scene, &work);
    for outage in 1..=2 {
        // The first outage finds the worker idle, the second with a command that runs.
        if outage == 2 {
            add_job(&scene, &url);
            assert_eq!(working.line(), "started");
        } else {
            until_connected(&server);
        }
        let until_event = |name: &str| {
            let event = format!(r#""event":"{name}""#);
            eventually(name, || {
                (scene.read("said").matches(&event).count() == outage).then_some(())
            });
        };
        server.down();
        until_event("error");
        server.up();
        until_event("store_back");
    }
    std::fs::write(scene.path("go"), "").unwrap();
    assert_eq!(working.line(), "done");
    eventually("completed", || scene.read("said").contains("job_ended").then_some(()));
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
    let said = scene.read("said");
    assert!(said.contains(r#""outcome":"completed""#), "{said}");
    let expected =
        ["error", "store_back", "job_started", "error", "store_back", "job_ended", "stopped"];
    assert_eq!(event_names(&said), expected, "{said}");
}

#[test]
fn a_signal_ends_the_wait_for_the_database() {
    let Some((scene, mut server, url)) = queue() else { return };
    server.down();
    let mut working = start(&scene, &["work", "-s", &url, TABLE, "true"]);
    until_said(&scene, "the store has been away");
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
}

#[test]
fn work_ends_at_once_if_waiting_cannot_help() {
    let Some((scene, server, url)) = queue() else { return };
    let unknown = format!("{}/unknown", url.rsplit_once('/').unwrap().0);
    let (code, _, said) = scene.outcome(&["work", "-s", &unknown, TABLE, "true"]);
    assert!(code == Some(125) && said.contains("no such database"), "{code:?}: {said}");
    let (code, _, said) = scene.outcome(&["work", "-s", &url, "other", "true"]);
    assert!(code == Some(125) && said.contains("there is no table"), "{code:?}: {said}");
    // A table that is dropped while the command runs.
    let mut working = start(&scene, &["work", "-s", &url, TABLE, "true"]);
    until_connected(&server);
    server.sql(&format!("DROP TABLE {TABLE}"));
    assert_eq!(working.code(), Some(125));
    let said = scene.read("said");
    assert!(said.contains("run `tenure schema --queue outage_jobs --apply`"), "{said}");
}

/// Waits until a metric has this value.
fn until_metric(port: u16, line: &str) {
    let found = |text: &String| text.lines().any(|found| found == line);
    eventually(line, || scrape(port).filter(found));
}

#[test]
fn claims_that_always_fail_are_reported_although_heartbeats_succeed() {
    let Some((scene, server, url)) = queue() else { return };
    add_job(&scene, &url);
    let http = free_port();
    let listen = format!("127.0.0.1:{http}");
    // Five heartbeats within the time to the report: their answers must not hide the failing claims.
    let mut work = vec!["work", "-s", &url, "--json", "--lease", "2s", "-c", "2"];
    work.extend(["--metrics", &listen, TABLE, "sh", "-c", "echo started; exec sleep 300"]);
    let mut working = start(&scene, &work);
    assert_eq!(working.line(), "started");
    server.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF NEW.locked_by IS DISTINCT FROM OLD.locked_by AND NEW.locked_by IS NOT NULL THEN \
                 RAISE EXCEPTION 'not today'; END IF; RETURN NEW; END $$",
    );
    let trigger = format!(
        "CREATE TRIGGER refuse BEFORE UPDATE ON {TABLE} FOR EACH ROW EXECUTE FUNCTION refuse()"
    );
    server.sql(&trigger);
    // So many at once that the table is at fault: single rows that cannot be claimed would be set aside.
    server.sql(&format!("INSERT INTO {TABLE} (payload) SELECT '1' FROM generate_series(1, 12)"));
    until_said(&scene, "requests to the store have failed for 2s");
    until_metric(http, r#"tenure_store_away{store="postgres"} 1"#);
    assert!(scene.read("said").contains("not today"), "{}", scene.read("said"));
    // Several heartbeats later it is still the same outage.
    let renewed = format!("SELECT max(locked_until) FROM {TABLE}");
    for _ in 0..3 {
        let before = server.sql(&renewed);
        eventually("a heartbeat", || (server.sql(&renewed) != before).then_some(()));
    }
    server.sql(&format!("DROP TRIGGER refuse ON {TABLE}"));
    assert_eq!(working.line(), "started");
    until_said(&scene, "store_back");
    until_metric(http, r#"tenure_store_away{store="postgres"} 0"#);
    until_metric(http, r#"tenure_store_outages_total{store="postgres"} 1"#);
    let said = scene.read("said");
    // The first line says where the metrics are.
    let events = event_names(said.split_once('\n').unwrap().1);
    assert_eq!(events, ["job_started", "error", "store_back", "job_started"]);
}

#[test]
fn a_read_only_database_is_reported_and_waited_for() {
    let Some((scene, server, url)) = queue() else { return };
    let mut working = start(&scene, &["work", "-s", &url, "--json", TABLE, "echo", "ran"]);
    until_connected(&server);
    server.sql("ALTER SYSTEM SET default_transaction_read_only = on");
    server.sql("SELECT pg_reload_conf()");
    until_said(&scene, "the server is read-only");
    server.sql("ALTER SYSTEM RESET default_transaction_read_only");
    server.sql("SELECT pg_reload_conf()");
    until_said(&scene, "store_back");
    add_job(&scene, &url);
    assert_eq!(working.line(), "ran");
    let events = event_names(&scene.read("said"));
    assert_eq!(events[..2], ["error", "store_back"], "{events:?}");
}

#[test]
fn missing_rights_are_named_by_the_operation_that_needs_them() {
    let Some((scene, server, url)) = queue() else { return };
    add_job(&scene, &url);
    server.sql("CREATE ROLE clerk LOGIN");
    let clerk = url.replacen("postgres@", "clerk@", 1);
    let refused = |arguments: &[&str], says: &str| {
        let (code, _, said) = scene.outcome(&[arguments, &["-s", &clerk]].concat());
        assert!(code == Some(125) && said.contains(says), "{arguments:?}: {code:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    };
    refused(&["job", "ls", TABLE], "GRANT SELECT, INSERT, UPDATE");
    server.sql(&format!("GRANT SELECT, INSERT, UPDATE ON {TABLE}, tenure_incarnation TO clerk"));
    refused(&["job", "rm", TABLE, "1"], "GRANT DELETE on outage_jobs");
    refused(&["schema", "--apply", "--queue", "new_jobs"], "CREATE to create tables");
    server.sql(&format!("ALTER TABLE {TABLE} DROP COLUMN unique_key CASCADE"));
    refused(&["schema", "--apply", "--queue", TABLE], "connect as its owner");
    // A right that is taken away while the worker runs ends it with the same advice.
    server.sql(&format!("ALTER TABLE {TABLE} ADD COLUMN unique_key text"));
    assert_eq!(scene.outcome(&["schema", "-s", &url, "--apply", "--queue", TABLE]).0, Some(0));
    let mut working = start(&scene, &["work", "-s", &clerk, "--json", TABLE, "echo", "ran"]);
    assert_eq!(working.line(), "ran");
    eventually("completed", || scene.read("said").contains("job_ended").then_some(()));
    server.sql(&format!("REVOKE UPDATE ON {TABLE} FROM clerk"));
    assert_eq!(working.code(), Some(125));
    let said = scene.read("said");
    assert!(said.contains("GRANT SELECT, INSERT, UPDATE"), "{said}");
    assert_eq!(event_names(&said), ["job_started", "job_ended", "error"], "one event: {said}");
}
