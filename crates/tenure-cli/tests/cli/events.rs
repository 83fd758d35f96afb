//! What machines read, and what the child is told.

use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Scene, Server, eventually};

fn events(stderr: &str) -> Vec<Value> {
    let events: Vec<Value> =
        stderr.lines().map(|line| serde_json::from_str(line).expect("one object a line")).collect();
    for event in &events {
        assert_eq!(event["name"], "demo", "{event}");
        let at = event["at"].as_str().unwrap();
        assert!(at.contains('T') && at.ends_with('Z'), "{event}");
    }
    events
}

fn names(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["event"].as_str().unwrap()).collect()
}

#[test]
fn a_hold_is_told_from_its_beginning_to_its_end() {
    let scene = Scene::new();
    let command = ["run", "--json", "demo", "--", "sh", "-c", "echo $TENURE_TOKEN"];
    let (code, stdout, stderr) = scene.outcome(&command);
    assert_eq!(code, Some(0));
    let events = events(&stderr);
    assert_eq!(names(&events), ["acquired", "released"]);
    assert_eq!(events[0]["token"].as_str().unwrap(), stdout.trim());
}

#[test]
fn a_wait_tells_the_holder_and_our_place() {
    let scene = Scene::new();
    let holder = scene.holder("demo");
    let err = std::fs::File::create(scene.path("events")).unwrap();
    let mut command = scene.tenure(&["run", "--json", "demo", "true"]);
    let mut waiting = crate::support::Running::new(command.stderr(err));
    eventually("the wait is told", || scene.read("events").contains('\n').then_some(()));
    holder.signal(Signal::SIGTERM);
    assert_eq!(waiting.code(), Some(0));
    let events = events(&scene.read("events"));
    // A wait that goes on after its holder has ended is told again.
    let mut names = names(&events);
    names.dedup();
    assert_eq!(names, ["waiting", "acquired", "released"]);
    assert_eq!(events[0]["place"], 1);
    let holder = format!(":{}:", holder.id());
    assert!(events[0]["holder"].as_str().unwrap().contains(&holder), "{}", events[0]);
}

#[test]
fn json_events_report_loss_start_failure_and_contention() {
    let scene = Scene::new();
    let server = Server::start(&scene, &[]);
    let told = |arguments: &[&str]| {
        let (_, _, stderr) = scene.outcome(arguments);
        events(&stderr)
    };
    let lost = told(&[
        "run",
        "--json",
        "-s",
        &server.url,
        "--ttl",
        "600ms",
        "--max-hold",
        "700ms",
        "demo",
        "sleep",
        "300",
    ]);
    assert_eq!(names(&lost), ["acquired", "lost"]);
    assert!(lost[1]["reason"].as_str().unwrap().contains("max_hold"), "{}", lost[1]);
    let cannot = told(&["run", "--json", "demo", "no-such-program"]);
    assert_eq!(names(&cannot), ["acquired", "error", "released"]);
    let _holder = scene.holder("demo");
    let busy = told(&["run", "--json", "--try", "demo", "true"]);
    assert_eq!(names(&busy), ["acquire_failed"]);
}

#[test]
fn a_reader_that_went_away_ends_nothing() {
    let scene = Scene::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command =
        scene.tenure(&["run", "--json", "demo", "--", "sh", "-c", "echo done; exit 3"]);
    let output = command.stderr(writer).stdout(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(output.stdout, b"done\n");
}

#[test]
fn a_reader_that_does_not_read_delays_nothing() {
    let scene = Scene::new();
    let (_reader, mut writer) = std::io::pipe().unwrap();
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
    while std::io::Write::write(&mut writer, &[b' '; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::empty()).unwrap();
    let mut command = scene.tenure(&["run", "--json", "demo", "--", "sh", "-c", "exit 3"]);
    let mut running = crate::support::Running::new(command.stderr(writer));
    assert_eq!(running.code(), Some(3));
}

#[test]
fn the_child_knows_what_it_holds() {
    let scene = Scene::new();
    let (_, stdout, _) = scene.outcome(&["run", "--id", "me", "--ttl", "20s", "demo", "--", "env"]);
    let value = |name: &str| {
        let line = stdout.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("no {name} in {stdout}"))
    };
    assert_eq!(value("TENURE_NAME"), "demo");
    assert_eq!(value("TENURE_HOLDER"), "me");
    assert_eq!(value("TENURE_TTL_MS"), "20000");
    assert!(value("TENURE_STORE").starts_with("file:/"));
    assert!(value("TENURE_TOKEN").parse::<u128>().unwrap() > 0);
}

#[test]
fn stdin_stdout_and_stderr_are_the_child_s() {
    let scene = Scene::new();
    std::fs::write(scene.path("input"), "one\ntwo\n").unwrap();
    let mut command = scene.tenure(&["run", "demo", "--", "sh", "-c", "cat; echo three >&2"]);
    let output = command.stdin(std::fs::File::open(scene.path("input")).unwrap()).output().unwrap();
    assert_eq!(output.stdout, b"one\ntwo\n");
    assert_eq!(output.stderr, b"three\n");
}

#[test]
fn the_child_starts_with_no_signal_blocked_and_no_descriptor_of_ours() {
    let scene = Scene::new();
    // No shell in between: some of them start their children with nothing blocked.
    let (_, stdout, _) = scene.outcome(&["run", "demo", "grep", "SigBlk", "/proc/self/status"]);
    assert_eq!(stdout, "SigBlk:\t0000000000000000\n");
    let list = ["ls", "-l", "/proc/self/fd"];
    let (_, stdout, _) = scene.outcome(&[&["run", "demo"][..], &list].concat());
    // What the tests themselves were started with is inherited either way.
    let mut plain = Command::new(list[0]);
    let plain = plain.args(&list[1..]).stdin(Stdio::null()).output().unwrap();
    let plain = String::from_utf8(plain.stdout).unwrap();
    assert_eq!(stdout.lines().count(), plain.lines().count(), "{stdout}{plain}");
}

/// Runs a line of a shell, in which `$TENURE` is the command.
fn shell(scene: &Scene, line: &str) -> (Option<i32>, String, String) {
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).env("TENURE", env!("CARGO_BIN_EXE_tenure"));
    shell.env("TENURE_DIR", scene.store()).env_remove("TENURE_STORE").stdin(Stdio::null());
    let output = shell.current_dir(scene.path("")).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Prints whether the shell that runs it has inherited descriptor 7.
const INHERITED: &str = "[ -e /proc/$$/fd/7 ] && echo inherited || echo not inherited";

#[test]
fn events_fd_keeps_events_apart_from_stderr_and_is_not_inherited() {
    let scene = Scene::new();
    let (_, said, _) = shell(&scene, &format!("sh -c '{INHERITED}' 7>events"));
    assert_eq!(said, "inherited\n", "the check works");
    for command in ["run", "lead", "once --per 1h"] {
        let line = format!(
            "$TENURE {command} --events-fd 7 demo -- sh -c '{INHERITED}; echo a line >&2' 7>events"
        );
        let (code, stdout, stderr) = shell(&scene, &line);
        let all = events(&scene.read("events"));
        let said = (code, &*stdout, &*stderr);
        assert_eq!(said, (Some(0), "not inherited\n", "a line\n"), "{command}: {all:?}");
        assert!(names(&all).contains(&"acquired"), "{command}: {all:?}");
    }
}

#[test]
fn a_bad_events_fd_is_refused_before_anything_is_acquired() {
    let scene = Scene::new();
    for command in ["run", "lead", "once --per 1h", "work -s postgres://127.0.0.1:1/none"] {
        for (number, redirect, says) in [
            ("9", "", "no such file descriptor"),
            ("7", "7</dev/null", "open for reading only"),
            ("1", "", "give a descriptor from 3 on"),
        ] {
            let line = format!("$TENURE {command} --events-fd {number} demo touch ran {redirect}");
            let (code, _, said) = shell(&scene, &line);
            assert!(code == Some(125) && said.contains(says), "{line}: {code:?}: {said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
    }
    assert!(!scene.path("ran").exists() && !scene.store().exists());
}
