//! A store that is not up yet: commands wait for it, and say so.

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Running, Scene, Server, eventually};

/// A port on which nothing listens, and the URL of a server there.
fn free_port() -> (u16, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (port, format!("tenure://127.0.0.1:{port}"))
}

/// Starts a command whose stderr is the file `said`.
fn start(scene: &Scene, arguments: &[&str]) -> Running {
    let mut command = scene.tenure(arguments);
    Running::new(command.stderr(File::create(scene.path("said")).unwrap()))
}

fn until_said(scene: &Scene, text: &str) {
    eventually(text, || scene.read("said").contains(text).then_some(()));
}

#[test]
fn run_waits_for_a_server_that_starts_later_and_reports_it() {
    let (scene, (port, url)) = (Scene::new(), free_port());
    let arguments = ["run", "-s", &url, "--wait", "60s", "demo", "--", "echo", "ran"];
    let mut running = start(&scene, &arguments);
    until_said(&scene, "demo: the store has been away");
    let _server = Server::start_at(&scene, port, &[]);
    assert_eq!((running.line().as_str(), running.code()), ("ran", Some(0)));
    until_said(&scene, "demo: the store is back after");
    let said = scene.read("said");
    assert!(said.lines().count() == 2 && said.contains("refused"), "{said}");
}

#[test]
fn a_command_that_waits_for_its_store_stops_on_ctrl_z_and_continues() {
    let (scene, (port, url)) = (Scene::new(), free_port());
    let mut command = scene.tenure(&["run", "-s", &url, "demo", "--", "echo", "ran"]);
    // In its own group, beside that of this process: the kernel ignores TSTP in a group without a shell.
    command.process_group(0).stderr(File::create(scene.path("said")).unwrap());
    let mut running = Running::new(&mut command);
    until_said(&scene, "demo: the store has been away");
    running.signal(Signal::SIGTSTP);
    let stat = format!("/proc/{}/stat", running.id());
    eventually("stopped", || {
        std::fs::read_to_string(&stat).unwrap().contains(") T ").then_some(())
    });
    let _server = Server::start_at(&scene, port, &[]);
    running.signal(Signal::SIGCONT);
    assert_eq!((running.line().as_str(), running.code()), ("ran", Some(0)));
}

#[test]
fn the_outage_is_an_event_for_programs() {
    let (scene, (port, url)) = (Scene::new(), free_port());
    let mut running = start(&scene, &["run", "--json", "-s", &url, "demo", "--", "echo", "ran"]);
    until_said(&scene, "the store has been away");
    let _server = Server::start_at(&scene, port, &[]);
    assert_eq!(running.code(), Some(0));
    let events = scene.read("said");
    let events: Vec<Value> =
        events.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let names: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["error", "store_back", "acquired", "released"]);
    assert!(events[1]["away_ms"].as_u64().unwrap() >= 1_500);
}

#[test]
fn a_wait_that_ends_and_a_try_fail_with_125() {
    let (scene, (_, url)) = (Scene::new(), free_port());
    let (code, _, said) = scene.outcome(&["run", "-s", &url, "--wait", "300ms", "demo", "true"]);
    assert!(code == Some(125) && said.contains("could not be reached for"), "{code:?}: {said}");
    let (code, _, said) = scene.outcome(&["run", "-s", &url, "--try", "demo", "true"]);
    assert!(code == Some(125) && said.lines().count() == 1, "{code:?}: {said}");
}

#[test]
fn a_signal_ends_the_wait_for_the_store() {
    let (scene, (_, url)) = (Scene::new(), free_port());
    let mut running = start(&scene, &["run", "-s", &url, "demo", "true"]);
    until_said(&scene, "the store has been away");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.code(), Some(128 + 15));
    let mut leading = start(&scene, &["lead", "-s", &url, "demo", "true"]);
    until_said(&scene, "the store has been away");
    leading.signal(Signal::SIGTERM);
    assert_eq!(leading.code(), Some(0), "stopped while no command ran");
}

#[test]
fn lead_waits_for_a_server_that_starts_later() {
    let (scene, (port, url)) = (Scene::new(), free_port());
    let mut running = start(&scene, &["lead", "-s", &url, "demo", "--", "echo", "leads"]);
    until_said(&scene, "demo: the store has been away");
    let _server = Server::start_at(&scene, port, &[]);
    assert_eq!(running.line(), "leads");
}

#[test]
fn a_log_says_once_that_run_waits_and_that_it_got_the_lock() {
    let scene = Scene::new();
    let holder = scene.holder("demo");
    let mut running = start(&scene, &["run", "demo", "--", "true"]);
    until_said(&scene, "waiting for demo: held by");
    drop(holder);
    assert_eq!(running.code(), Some(0));
    let said = scene.read("said");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.len() == 2 && lines[1].contains("acquired demo after"), "{said}");
}
