//! `ls`, `watch`, `break`: on the store of this host, and on a lock server.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Running, Scene, eventually};
use crate::{Served, TOKEN};

/// Says that it runs and goes on.
const WORK: [&str; 4] = ["--", "sh", "-c", "echo ready; exec sleep 300"];

fn token_of(json: &str) -> String {
    let state: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    state["holders"][0]["token"].as_str().unwrap().to_owned()
}

#[test]
fn ls_has_a_line_a_name() {
    let scene = Scene::new();
    let _one = scene.holder("apps/one");
    let _two = scene.holder("apps/two");
    let _other = scene.holder("other");
    let waiter = scene.start(&["run", "apps/two", "--", "true"]);
    eventually("it waits", || (scene.waiters("apps/two") == 1).then_some(()));
    let (code, stdout, _) = scene.outcome(&["ls", "apps/"]);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!((code, lines.len()), (Some(0), 3), "{stdout}");
    assert!(lines[0].starts_with("NAME"), "{stdout}");
    let two: Vec<&str> = lines[2].split_whitespace().collect();
    assert_eq!((two[0], two[1], two[2]), ("apps/two", "lock", "1"));
    assert_eq!(two[two.len() - 2], "1", "one waits: {stdout}");
    let (_, json, _) = scene.outcome(&["ls", "--json"]);
    assert_eq!(json.lines().count(), 3, "{json}");
    drop(waiter);
}

#[test]
fn a_hold_is_broken_by_its_token_and_by_no_other() {
    let scene = Scene::new();
    let mut holder = scene.holder("demo");
    let (_, json, _) = scene.outcome(&["status", "--json", "demo"]);
    let token = token_of(&json);
    let wrong = (token.parse::<u128>().unwrap() + 1).to_string();
    let (code, _, stderr) =
        scene.outcome(&["break", "demo", "--token", &wrong, "--reason", "it hangs"]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("no hold has the token"), "{stderr}");
    let (code, _, stderr) = scene.outcome(&["break", "demo", "--token", &token, "--reason", " "]);
    assert_eq!(code, Some(2), "{stderr}");
    assert_eq!(scene.outcome(&["status", "demo"]).0, Some(0), "nothing was changed");

    let (code, stdout, stderr) =
        scene.outcome(&["break", "demo", "--token", &token, "--reason", "it hangs"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains(&token), "{stdout}");
    assert_eq!(holder.code(), Some(79), "its command was stopped");
    let (code, _, _) = scene.outcome(&["break", "demo", "--token", &token, "--reason", "again"]);
    assert_eq!(code, Some(1), "it changed hands, or is free");
}

#[test]
fn break_requires_the_auth_token_and_is_logged() {
    let served = Served::start(&[]);
    let mut holder = served.begin("run", &[&["demo"][..], &WORK].concat());
    assert_eq!(holder.line(), "ready");
    let (_, json, _) = served.outcome("status", &["--json", "demo"]);
    let token = token_of(&json);
    let reason = ["--reason", "stuck since noon"];
    let arguments = [&["demo", "--token", &token][..], &reason].concat();
    let stranger = served.url.replace(TOKEN, "wrong");
    let (code, _, stderr) =
        served.scene.outcome(&[&["break", "-s", &stranger][..], &arguments].concat());
    assert_eq!(code, Some(125), "{stderr}");
    assert!(!stderr.contains("wrong"), "no secret is printed: {stderr}");
    let (code, _, stderr) = served.outcome("break", &arguments);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(holder.code(), Some(79));
    eventually("it is logged", || served.said().contains("stuck since noon").then_some(()));
    assert!(!served.said().contains(TOKEN));
}

/// How much processor time it has taken, in hundredths of a second.
fn ticks(of: &Running) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", of.id())).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11..=12].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[test]
fn watch_prints_arrivals_and_departures_of_holders_and_waiters() {
    let scene = Scene::new();
    let mut watch = scene.start(&["watch", "--json", "demo"]);
    let mut all = scene.start(&["watch", "--every", "20ms"]);
    let next = |watch: &mut Running| -> Value { serde_json::from_str(&watch.line()).unwrap() };
    let holder = scene.holder("demo");
    let acquired = next(&mut watch);
    assert_eq!((&acquired["event"], &acquired["name"]), (&"acquired".into(), &"demo".into()));
    assert_eq!(acquired["pid"], holder.id());
    let waiter = scene.start(&["run", "demo", "--", "true"]);
    let waits = next(&mut watch);
    assert_eq!((&waits["event"], &waits["pid"]), (&"waiting".into(), &waiter.id().into()));
    assert!(all.line().contains("demo: acquired by"));
    assert!(all.line().contains("demo: now waiting:"));
    drop(waiter);
    assert_eq!(next(&mut watch)["event"], "left");
    drop(holder);
    let ended = next(&mut watch);
    assert_eq!((&ended["event"], &ended["token"]), (&"ended".into(), &acquired["token"]));
    // Without events the command stays idle: a name without holders and waiters causes none.
    let before = ticks(&watch);
    std::thread::sleep(Duration::from_secs(1));
    assert!(ticks(&watch) - before < 25, "{} of 100", ticks(&watch) - before);
    for (told, signal) in [(&mut watch, Signal::SIGTERM), (&mut all, Signal::SIGINT)] {
        told.signal(signal);
        assert_eq!(told.code(), Some(0), "{signal}");
    }
}
