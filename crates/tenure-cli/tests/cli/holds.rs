//! Holds without a command, and the display of holders.

use serde_json::Value;

use crate::support::{Scene, Server, eventually};

#[test]
fn a_store_whose_holds_end_with_their_process_says_what_to_do() {
    let scene = Scene::new();
    let (code, stdout, stderr) = scene.outcome(&["acquire", "demo"]);
    assert_eq!((code, stdout.as_str()), (Some(125), ""));
    assert!(stderr.contains("tenure run demo -- COMMAND"), "{stderr}");
    for command in ["renew", "release"] {
        let (code, _, stderr) = scene.outcome(&[command, "demo", "--handle", "x"]);
        assert_eq!(code, Some(125), "{command}: {stderr}");
    }
}

#[test]
fn a_check_sees_whether_it_is_free_and_keeps_nothing() {
    let scene = Scene::new();
    for _ in 0..2 {
        assert_eq!(scene.outcome(&["acquire", "--check", "demo"]).0, Some(0));
    }
    let _holder = scene.holder("demo");
    let (code, _, stderr) = scene.outcome(&["acquire", "--check", "demo"]);
    assert_eq!(code, Some(1), "{stderr}");
}

#[test]
fn a_hold_that_is_left_has_a_token_and_a_handle() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    let (code, stdout, stderr) = scene.outcome(&["acquire", "-s", &server.url, "demo"]);
    assert_eq!(code, Some(0), "{stderr}");
    let names: Vec<_> = stdout.lines().map(|line| line.split('=').next().unwrap()).collect();
    assert_eq!(names, ["export TENURE_TOKEN", "export TENURE_HANDLE"]);
    let (_, stdout, _) = scene.outcome(&["acquire", "--json", "-s", &server.url, "another"]);
    let line: Value = serde_json::from_str(&stdout).unwrap();
    assert!(line["token"].is_string() && line["handle"].is_string() && line["ttl_ms"] == 15_000);
}

#[test]
fn a_handle_that_holds_nothing_is_told_apart_from_a_failure() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    let url = &*server.url;
    let (_, stdout, _) = scene.outcome(&["acquire", "--json", "-s", url, "demo"]);
    let line: Value = serde_json::from_str(&stdout).unwrap();
    let handle = line["handle"].as_str().unwrap();
    let (code, _, stderr) = scene.outcome(&["release", "-s", url, "demo", "--handle", handle]);
    assert_eq!(code, Some(0), "{stderr}");
    for command in ["renew", "release"] {
        let mut by_variable = scene.tenure(&[command, "-s", url, "demo"]);
        let output = by_variable.env("TENURE_HANDLE", handle).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.starts_with("tenure: demo"), "{stderr}");
        let mut by_stdin = scene.tenure(&[command, "-s", url, "demo", "--handle", "-"]);
        std::fs::write(scene.path("handle"), format!("{handle}\n")).unwrap();
        by_stdin.stdin(std::fs::File::open(scene.path("handle")).unwrap());
        assert_eq!(by_stdin.output().unwrap().status.code(), Some(1));
        let none = scene.outcome(&[command, "-s", url, "demo", "--handle", "no handle"]);
        assert_eq!(none.0, Some(2), "{}", none.2);
    }
}

#[test]
fn status_shows_holders_and_waiters() {
    let scene = Scene::new();
    let (code, stdout, _) = scene.outcome(&["status", "demo"]);
    assert_eq!((code, stdout.as_str()), (Some(75), "demo is free\n"));
    let holder = scene.holder("demo");
    let waiter = scene.start(&["run", "--id", "second", "--note", "v42", "demo", "true"]);
    eventually("somebody waits", || (scene.waiters("demo") == 1).then_some(()));
    let (code, stdout, _) = scene.outcome(&["status"]);
    assert_eq!(code, Some(0));
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{stdout}");
    assert!(lines[0].starts_with("NAME"), "{stdout}");
    assert!(lines[1].contains("held") && lines[1].contains(&format!("(pid {})", holder.id())));
    let second = format!("second (pid {}): v42", waiter.id());
    assert!(lines[2].contains("waits 1st") && lines[2].contains(&second), "{stdout}");
    let (code, stdout, _) = scene.outcome(&["status", "demo", "--json"]);
    let state: Value = serde_json::from_str(stdout.trim()).unwrap();
    assert_eq!(code, Some(0));
    assert_eq!(state["holders"][0]["pid"], holder.id());
    assert!(state["holders"][0]["since"].is_string(), "{state}");
    assert_eq!(state["waiters"][0]["holder"], "second");
}

#[test]
fn the_memory_of_one_process_is_no_store_for_a_command() {
    let scene = Scene::new();
    for (command, arguments) in [
        ("run", &["demo", "true"][..]),
        ("lead", &["demo", "true"]),
        ("once", &["--per", "1h", "demo", "true"]),
        ("acquire", &["demo"]),
        ("renew", &["demo", "--handle", "x"]),
        ("release", &["demo", "--handle", "x"]),
        ("status", &["demo"]),
        ("ls", &[]),
        ("watch", &["demo"]),
        ("history", &["demo"]),
        ("top", &[]),
        ("break", &["demo", "--token", "1", "--reason", "it hangs"]),
        ("gc", &[]),
    ] {
        for url in ["memory:", "memory:here"] {
            let arguments = [&[command, "-s", url], arguments].concat();
            let (code, stdout, stderr) = scene.outcome(&arguments);
            assert_eq!((code, stdout.as_str()), (Some(2), ""), "{arguments:?}: {stderr}");
            assert!(stderr.contains("file:") && stderr.contains("tenure://"), "{stderr}");
            assert_eq!(stderr.lines().count(), 1, "{stderr}");
        }
    }
    let mut by_variable = scene.tenure(&["run", "demo", "true"]);
    let output = by_variable.env("TENURE_STORE", "memory:").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

/// A holder of the semaphore `demo` that says `ready` and goes on until it is told to stop.
const SLOT: [&str; 8] =
    ["run", "--limit", "2", "demo", "--", "sh", "-c", "echo ready; exec sleep 300"];

#[test]
fn a_lock_and_a_semaphore_of_one_name_are_both_shown() {
    let scene = Scene::new();
    let mut slot = scene.start(&SLOT);
    assert_eq!(slot.line(), "ready");
    let (code, stdout, _) = scene.outcome(&["status", "demo"]);
    assert_eq!(code, Some(0), "held as a semaphore");
    assert!(stdout.contains("KIND") && stdout.contains("semaphore"), "{stdout}");
    let _holder = scene.holder("demo");
    let (code, stdout, _) = scene.outcome(&["status", "demo"]);
    assert_eq!(code, Some(0));
    let kinds = |line: &str| line.split_whitespace().nth(1).unwrap().to_owned();
    let kinds: Vec<String> = stdout.lines().skip(1).map(kinds).collect();
    assert_eq!(kinds, ["lock", "semaphore"], "{stdout}");
    let (_, stdout, _) = scene.outcome(&["status", "--json", "demo"]);
    let lines = stdout.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    for (line, kind) in lines.iter().zip(["lock", "semaphore"]) {
        assert_eq!((&line["kind"], &line["fencing"]), (&kind.into(), &"ordered".into()), "{line}");
        assert_eq!(line["holders"].as_array().map(Vec::len), Some(1), "{line}");
    }
    assert_eq!(lines.len(), 2, "{stdout}");
}

#[test]
fn holder_of_the_other_kind_of_a_name_is_warned_about_once() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    for url in ["file:", &server.url] {
        let on = |arguments: &[&str]| {
            let mut command = scene.tenure(arguments);
            command.env("TENURE_STORE", url);
            command
        };
        // It goes on until the test has read what it says.
        let warned = |flags: &[&str], file: &str| {
            let err = std::fs::File::create(scene.path(file)).unwrap();
            let work = ["demo", "--", "sh", "-c", "echo ready; exec sleep 300"];
            let arguments = [&["run"], flags, &work].concat();
            let mut running = crate::support::Running::new(on(&arguments).stderr(err));
            assert_eq!(running.line(), "ready");
            running
        };
        let alone = warned(&["--limit", "2"], "alone");
        assert_eq!(scene.read("alone"), "", "nothing else is held");
        let lock = warned(&["--wait", "10s"], "people");
        eventually("a warning", || scene.read("people").contains('\n').then_some(()));
        let text = scene.read("people");
        assert!(text.starts_with("tenure: warning: demo is also held as a semaphore"), "{text}");
        drop(lock);
        let lock = warned(&["--json", "--wait", "10s"], "events");
        let event = eventually("an event", || {
            let text = scene.read("events");
            let mut lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
            lines.find(|line: &Value| line["event"] == "other_kind_held")
        });
        assert_eq!((&event["kind"], &event["name"]), (&"semaphore".into(), &"demo".into()));
        let slot = warned(&["--limit", "2"], "slots");
        eventually("a warning", || scene.read("slots").contains("held as a lock").then_some(()));
        assert_eq!(scene.read("slots").lines().count(), 1, "once");
        drop((lock, slot));
        let quiet = warned(&["--quiet", "--wait", "10s"], "quiet");
        drop(quiet);
        assert_eq!(scene.read("quiet"), "");
        let output = on(&["acquire", "--check", "demo"]).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("demo is also held as a semaphore"), "{stderr}");
        drop(alone);
    }
}
