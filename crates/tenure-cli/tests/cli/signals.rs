//! Signals, while waiting and while the child runs.

use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{Running, Scene, eventually};

#[test]
fn a_signal_ends_the_wait_at_once_and_leaves_no_ticket() {
    let scene = Scene::new();
    let _holder = scene.holder("demo");
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        let mut waiter = scene.start(&["run", "demo", "true"]);
        eventually("it waits", || (scene.waiters("demo") == 1).then_some(()));
        let told = Instant::now();
        waiter.signal(signal);
        assert_eq!(waiter.code(), Some(128 + signal as i32));
        assert!(told.elapsed() < Duration::from_secs(2), "{:?}", told.elapsed());
        assert_eq!(scene.waiters("demo"), 0, "{signal}");
    }
}

#[test]
fn signals_other_than_termination_do_not_end_the_wait() {
    let scene = Scene::new();
    let holder = scene.holder("demo");
    let mut waiter = scene.start(&["run", "demo", "true"]);
    eventually("it waits", || (scene.waiters("demo") == 1).then_some(()));
    for signal in [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH, Signal::SIGCONT] {
        waiter.signal(signal);
    }
    drop(holder);
    assert_eq!(waiter.code(), Some(0));
}

#[test]
fn signals_reach_the_child() {
    let scene = Scene::new();
    let script = "for s in INT HUP QUIT USR1 USR2 WINCH CONT; do trap \"echo $s\" $s; done
        trap 'echo TERM; exit 3' TERM
        echo ready; while :; do sleep 0.02; done";
    let mut first = scene.start(&["run", "demo", "--", "sh", "-c", script]);
    assert_eq!(first.line(), "ready");
    for (signal, name) in [
        (Signal::SIGINT, "INT"),
        (Signal::SIGHUP, "HUP"),
        (Signal::SIGQUIT, "QUIT"),
        (Signal::SIGUSR1, "USR1"),
        (Signal::SIGUSR2, "USR2"),
        (Signal::SIGWINCH, "WINCH"),
        (Signal::SIGCONT, "CONT"),
        (Signal::SIGTERM, "TERM"),
    ] {
        first.signal(signal);
        assert_eq!(first.line(), name);
    }
    assert_eq!(first.code(), Some(3));
    assert_eq!(scene.outcome(&["status", "demo"]).0, Some(75));
}

#[test]
fn a_shutdown_waits_for_the_child_before_it_lets_go() {
    let scene = Scene::new();
    let script =
        "trap 'read x < fifo; echo over; exit 5' TERM; echo ready; while :; do sleep 0.02; done";
    assert!(Command::new("mkfifo").arg(scene.path("fifo")).status().unwrap().success());
    let mut first = scene.start(&["run", "demo", "--", "sh", "-c", script]);
    assert_eq!(first.line(), "ready");
    first.signal(Signal::SIGTERM);
    assert_eq!(scene.outcome(&["run", "--wait", "100ms", "demo", "true"]).0, Some(75));
    std::fs::write(scene.path("fifo"), "go on\n").unwrap();
    assert_eq!(first.line(), "over");
    assert_eq!(first.code(), Some(5));
    assert_eq!(scene.outcome(&["run", "--try", "demo", "true"]).0, Some(0));
}

#[test]
fn a_command_started_with_chld_ignored_ends_and_releases_the_lock() {
    let scene = Scene::new();
    let start = |arguments: &[&str]| {
        let tenure = scene.tenure(arguments);
        let mut command = Command::new("env");
        command.arg("--ignore-signal=CHLD").arg(tenure.get_program()).args(tenure.get_args());
        command.env("TENURE_DIR", scene.store()).env_remove("TENURE_STORE");
        Running::new(&mut command)
    };
    let mut first =
        start(&["run", "demo", "--", "sh", "-c", "grep SigIgn /proc/self/status; exit 3"]);
    let inherited = first.line();
    let ignored = inherited.split_whitespace().nth(1).unwrap();
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    assert_eq!(ignored >> (Signal::SIGCHLD as u32 - 1) & 1, 0, "the command can wait: {inherited}");
    assert_eq!(first.code(), Some(3));
    assert_eq!(scene.outcome(&["status", "demo"]).0, Some(75));
    assert_eq!(start(&["lead", "-q", "demo", "--", "sh", "-c", "exit 4"]).code(), Some(4));
    assert_eq!(start(&["once", "--slot", "a", "task", "--", "sh", "-c", "exit 5"]).code(), Some(5));
}

#[test]
fn signal_ignored_at_startup_stays_ignored() {
    let scene = Scene::new();
    let holder = scene.holder("demo");
    let script = "trap '' HUP; exec \"$TENURE\" run demo true";
    let mut command = Command::new("sh");
    command.args(["-c", script]).env("TENURE_DIR", scene.store());
    command.env("TENURE", env!("CARGO_BIN_EXE_tenure")).env_remove("TENURE_STORE");
    let mut waiter = Running::new(&mut command);
    eventually("it waits", || (scene.waiters("demo") == 1).then_some(()));
    waiter.signal(Signal::SIGHUP);
    drop(holder);
    assert_eq!(waiter.code(), Some(0));
}
