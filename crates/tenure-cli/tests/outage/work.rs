//! `tenure work` while its database is away.

use nix::sys::signal::Signal;

use super::pg_server::Server;
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
    assert!(scene.read("said").contains("the table is missing"), "{}", scene.read("said"));
}
