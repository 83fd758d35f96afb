//! Holds without a command, and who holds what.

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
fn status_shows_who_holds_and_who_waits() {
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
