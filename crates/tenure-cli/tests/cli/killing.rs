//! When a lock is free, no process of its previous holder runs.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::support::{Running, Scene, Server, children, eventually, runs};

/// Kills the command and measures until the next one's command runs; what that one sees of `processes`.
fn next_after_kill(scene: &Scene, first: &Running, processes: &[i32]) -> Duration {
    let list = processes.iter().map(i32::to_string).collect::<Vec<_>>().join(" ");
    let script = "for p in $0; do grep -qs 'State:.[^ZX]' /proc/$p/status && echo $p still runs; done; echo done";
    let mut next = scene.start(&["run", "demo", "--", "sh", "-c", script, &list]);
    eventually("the next one waits", || (scene.waiters("demo") == 1).then_some(()));
    let killed = Instant::now();
    first.signal(Signal::SIGKILL);
    assert_eq!(next.line(), "done");
    let took = killed.elapsed();
    assert_eq!(next.code(), Some(0));
    took
}

#[test]
fn the_shell_and_its_sleep_are_gone_before_the_next_command_runs() {
    let scene = Scene::new();
    let mut worst = Duration::ZERO;
    for _ in 0..10 {
        let script = "echo $$; sleep 30 & echo $!; wait; true";
        let mut first = scene.start(&["run", "demo", "--", "sh", "-c", script]);
        let processes = [first.number(), first.number()];
        assert!(processes.iter().all(|process| runs(*process)));
        worst = worst.max(next_after_kill(&scene, &first, &processes));
    }
    eprintln!("from kill -9 to the next command's end: {worst:?} at worst");
    assert!(worst < Duration::from_secs(5), "{worst:?}");
}

#[test]
fn the_guardian_has_what_keeps_the_lock_and_the_child_has_not() {
    let scene = Scene::new();
    let mut first = scene.start(&["run", "demo", "--", "sh", "-c", "echo $$; exec sleep 300"]);
    let child = first.number();
    let [guardian] = children(first.id())[..] else { panic!("one guardian") };
    let open_in_store = |process: i32| {
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
        let files = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        files.filter(|file| file.starts_with(scene.store())).count()
    };
    assert_eq!(open_in_store(guardian), 1);
    assert_eq!(open_in_store(child), 0);
}

#[test]
fn descendants_in_sessions_of_their_own_are_gone_too() {
    let scene = Scene::new();
    // One whose parent lives, one whose parent has ended, and one below that.
    let script = "setsid sh -c 'echo $$; exec sleep 300' &
        (setsid sh -c 'echo $$; sleep 300 & echo $!; wait' &)
        echo $$; wait; sleep 300";
    let mut first = scene.start(&["run", "demo", "--", "sh", "-c", script]);
    let processes: Vec<i32> = (0..4).map(|_| first.number()).collect();
    assert!(processes.iter().all(|process| runs(*process)), "{processes:?}");
    next_after_kill(&scene, &first, &processes);
}

#[test]
fn killing_the_whole_job_does_not_spare_the_child() {
    let scene = Scene::new();
    let mut command = scene.tenure(&["run", "demo", "--", "sh", "-c", "echo $$; exec sleep 300"]);
    let mut first =
        Running::new(std::os::unix::process::CommandExt::process_group(&mut command, 0));
    let child = first.number();
    killpg(Pid::from_raw(first.id()), Signal::SIGKILL).unwrap();
    assert_eq!(scene.outcome(&["run", "demo", "--", "true"]).0, Some(0));
    assert!(!runs(child));
}

#[test]
fn a_daemon_left_behind_lives_on_and_keeps_nothing() {
    let scene = Scene::new();
    let script = "setsid sleep 300 >/dev/null 2>&1 & echo $!";
    let (code, stdout, _) = scene.outcome(&["run", "demo", "--", "sh", "-c", script]);
    assert_eq!(code, Some(0));
    let daemon: i32 = stdout.trim().parse().unwrap();
    let alive = runs(daemon);
    let next = scene.outcome(&["run", "--try", "demo", "true"]).0;
    kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
    assert!(alive, "the daemon was killed");
    assert_eq!(next, Some(0), "the daemon keeps the lock");
}

#[test]
fn descendants_that_ignore_term_are_killed_when_the_hold_is_lost() {
    let scene = Scene::new();
    // The child obeys TERM, what it started does not.
    let script = "setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1; done' & wait";
    let server = Server::start(&scene, &[]);
    let hold = ["run", "-s", &server.url, "--ttl", "600ms", "--max-hold", "900ms", "demo"];
    let mut first = scene.start(&[&hold[..], &["--", "sh", "-c", script]].concat());
    let stubborn = first.number();
    assert_eq!(first.code(), Some(79));
    assert!(!runs(stubborn));
}

#[test]
fn a_store_that_vanishes_ends_the_command() {
    let scene = Scene::new();
    let script = "echo $$; exec sleep 300";
    let mut first = scene.start(&["run", "--ttl", "600ms", "demo", "--", "sh", "-c", script]);
    let child = first.number();
    std::fs::remove_dir_all(scene.store()).unwrap();
    assert_eq!(first.code(), Some(79));
    assert!(!runs(child));
}

#[test]
fn a_frozen_command_does_not_keep_its_child_beyond_the_lease() {
    let scene = Scene::new();
    let script = "echo $$; exec sleep 300";
    let server = Server::start(&scene, &[]);
    let flags = ["run", "-s", &server.url, "--ttl", "600ms", "demo"];
    let mut first = scene.start(&[&flags[..], &["--", "sh", "-c", script]].concat());
    let child = first.number();
    first.signal(Signal::SIGSTOP);
    eventually("the guardian ends the child", || (!runs(child)).then_some(()));
    server.until_free(&scene, "demo");
    first.signal(Signal::SIGCONT);
    assert_eq!(first.code(), Some(79));
}

#[test]
fn without_its_guardian_the_child_is_killed() {
    let scene = Scene::new();
    let script = "echo $$; sleep 300 & echo $!; wait";
    let mut first = scene.start(&["run", "demo", "--", "sh", "-c", script]);
    let processes = [first.number(), first.number()];
    let [guardian] = children(first.id())[..] else { panic!("one guardian") };
    kill(Pid::from_raw(guardian), Signal::SIGKILL).unwrap();
    assert_eq!(first.code(), Some(125));
    assert!(!processes.iter().any(|process| runs(*process)));
    assert_eq!(scene.outcome(&["run", "--try", "demo", "true"]).0, Some(0));
}

/// As `pkill -9 tenure` and `pidof tenure` do, which know processes by their names.
#[test]
fn killing_every_process_named_tenure_leaves_no_child_running() {
    let scene = Scene::new();
    let script = "echo $$; sleep 300 & echo $!; wait";
    let mut first = scene.start(&["run", "demo", "--", "sh", "-c", script]);
    let processes = [first.number(), first.number()];
    let [guardian] = children(first.id())[..] else { panic!("one guardian") };
    for process in [guardian, first.id()] {
        let name = |file| std::fs::read_to_string(format!("/proc/{process}/{file}")).unwrap();
        let begins = |words: String| words.split('\0').next().map(str::to_owned).unwrap();
        if name("comm").contains("tenure") || begins(name("cmdline")).contains("tenure") {
            kill(Pid::from_raw(process), Signal::SIGKILL).unwrap();
        }
    }
    assert_eq!(first.code(), None, "it was killed");
    assert_eq!(scene.outcome(&["run", "demo", "true"]).0, Some(0));
    assert!(!processes.iter().any(|process| runs(*process)));
}

#[test]
fn a_waiting_command_that_is_killed_leaves_its_place() {
    let scene = Scene::new();
    let holder = scene.holder("demo");
    let waiter = scene.start(&["run", "demo", "true"]);
    eventually("it waits", || (scene.waiters("demo") == 1).then_some(()));
    waiter.signal(Signal::SIGKILL);
    eventually("its place is free", || (scene.waiters("demo") == 0).then_some(()));
    drop(holder);
    assert_eq!(scene.outcome(&["run", "--wait", "20s", "demo", "true"]).0, Some(0));
}
