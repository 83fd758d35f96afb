//! Several locks under one command, and locks that are shared.

use std::process::Stdio;

use crate::support::{Scene, eventually};

fn is_held(scene: &Scene, name: &str) -> bool {
    scene.outcome(&["run", "--try", name, "true"]).0 == Some(75)
}

#[test]
fn all_locks_are_held_while_the_command_runs_and_released_together() {
    let scene = Scene::new();
    let script = "echo $TENURE_TOKEN; echo $TENURE_TOKENS; tenure status a; tenure status b";
    let script = script.replace("tenure", env!("CARGO_BIN_EXE_tenure"));
    let arguments = ["run", "b", "--also", "a", "--also", "c", "--", "sh", "-c", &script];
    let (code, stdout, stderr) = scene.outcome(&arguments);
    assert_eq!(code, Some(0), "{stderr}");
    let mut lines = stdout.lines();
    let token = lines.next().unwrap();
    let tokens: serde_json::Value = serde_json::from_str(lines.next().unwrap()).unwrap();
    assert_eq!(tokens["b"], token);
    assert!(tokens["a"].is_string() && tokens["c"].is_string(), "{tokens}");
    assert_eq!(lines.filter(|line| line.contains(" held ")).count(), 2, "{stdout}");
    for name in ["a", "b", "c"] {
        assert_eq!(scene.outcome(&["run", "--try", name, "true"]).0, Some(0), "{name} is free");
    }
}

#[test]
fn a_lock_that_is_held_leaves_the_others_free_and_is_named() {
    let scene = Scene::new();
    let _holder = scene.holder("b");
    let (code, _, stderr) = scene.outcome(&["run", "--try", "a", "--also", "b", "true"]);
    assert_eq!(code, Some(75), "{stderr}");
    assert!(stderr.contains("tenure: b "), "{stderr}");
    assert_eq!(scene.outcome(&["run", "--try", "a", "true"]).0, Some(0), "a was released");
}

#[test]
fn all_locks_of_a_killed_command_are_freed_and_not_before_its_child_is_dead() {
    let scene = Scene::new();
    let pid = scene.path("pid");
    let script = format!("echo $$ > {}; exec sleep 600", pid.display());
    let mut holder = scene
        .tenure(&["run", "a", "--also", "b", "--", "sh", "-c", &script])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the child runs", || {
        std::fs::read_to_string(&pid).is_ok_and(|text| text.ends_with('\n')).then_some(())
    });
    assert_eq!(scene.outcome(&["run", "--try", "b", "true"]).0, Some(75), "b is held too");
    holder.kill().unwrap();
    holder.wait().unwrap();
    let child = std::fs::read_to_string(&pid).unwrap().trim().to_owned();
    let script = format!("test ! -e /proc/{child}/exe");
    for name in ["a", "b"] {
        let (code, _, stderr) =
            scene.outcome(&["run", "--wait", "20s", name, "--", "sh", "-c", &script]);
        assert_eq!(code, Some(0), "{name}: the child was alive, or the lock held: {stderr}");
    }
}

#[test]
fn a_nested_command_may_not_wait_for_any_lock_around_it() {
    let scene = Scene::new();
    let tenure = env!("CARGO_BIN_EXE_tenure");
    for inner in ["a", "b"] {
        let arguments = ["run", "a", "--also", "b", "--", tenure, "run", inner, "true"];
        let (code, _, stderr) = scene.outcome(&arguments);
        assert_eq!(code, Some(125), "{inner}: {stderr}");
        assert!(stderr.contains("already held by an enclosing"), "{stderr}");
    }
}

#[test]
fn readers_share_a_lock_and_a_writer_does_not() {
    let scene = Scene::new();
    let mut reader = scene
        .tenure(&["run", "--shared", "book", "sleep", "600"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the reader holds it", || is_held(&scene, "book").then_some(()));
    assert_eq!(scene.outcome(&["run", "--try", "--shared", "book", "true"]).0, Some(0));
    assert_eq!(scene.outcome(&["run", "--try", "book", "true"]).0, Some(75));
    reader.kill().unwrap();
    reader.wait().unwrap();
    assert_eq!(scene.outcome(&["run", "--wait", "20s", "book", "true"]).0, Some(0));
}

#[test]
fn what_does_not_go_together_is_refused() {
    let scene = Scene::new();
    for (arguments, part) in [
        (vec!["run", "a", "--also", "b", "--limit", "2", "true"], "--limit"),
        (vec!["run", "a", "--also", "b", "--max-hold", "9s", "true"], "--max-hold"),
        (vec!["run", "a", "--shared", "--limit", "2", "true"], "--limit"),
        ([vec!["run", "a"], ["--also", "b"].repeat(16), vec!["true"]].concat(), "at most 15"),
    ] {
        let (code, _, stderr) = scene.outcome(&arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(part), "{stderr}");
    }
}
