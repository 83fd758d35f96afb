//! Commands that are stopped: their job was cancelled, or they ran for too long.

use nix::sys::signal::Signal;

use crate::queue::Queue;
use crate::support::{Running, eventually, runs};

/// Prints its process id; on TERM prints `term`, and ends only if it is told to.
fn script(on_term: &str) -> String {
    format!("trap 'echo term; {on_term}' TERM; echo $$; while :; do sleep 0.1; done")
}

#[test]
fn the_command_of_a_cancelled_job_gets_term_then_kill() {
    let Some(queue) = Queue::new("cancel_kill") else { return };
    for (on_term, ends) in [("touch tidy; exit 0", true), ("", false)] {
        let id = queue.add(&[]);
        let script = script(on_term);
        let mut work = vec!["work", "--json", "--lease", "10s", "--kill-after", "2s"];
        work.extend(["--until-empty", &queue.table, "--", "sh", "-c", &script]);
        let said = std::fs::File::create(queue.scene.path("said")).unwrap();
        let mut working = Running::new(queue.tenure(&work).stderr(said));
        let command = working.number();
        let cancel = ["job", "cancel", "--reason", "not needed", &queue.table, &id];
        assert_eq!(queue.outcome(&cancel).0, Some(0));
        assert_eq!(working.line(), "term");
        assert_eq!(working.code(), Some(0));
        assert!(!runs(command));
        assert_eq!(queue.scene.path("tidy").exists(), ends, "it had time to end");
        let said = queue.scene.read("said");
        assert!(said.contains(r#""outcome":"lost""#) && said.contains("cancelled"), "{said}");
        assert!(!said.contains("another worker"), "{said}");
        let shown = queue.show(&id);
        assert_eq!((&shown["state"], &shown["error"]), (&"FAILED".into(), &"not needed".into()));
        let _ = std::fs::remove_file(queue.scene.path("tidy"));
    }
}

#[test]
fn a_command_that_runs_longer_than_max_run_is_stopped_and_has_failed() {
    let Some(queue) = Queue::new("max_run") else { return };
    let slow = queue.add(&["--max-attempts", "2"]);
    let quick = queue.add(&["--payload", "7"]);
    let script = "read payload; [ $payload = 7 ] && exit 0; \
                  trap 'echo term' TERM; echo $$; while :; do sleep 0.1; done";
    let mut work = vec!["work", "--max-run", "1s", "--kill-after", "500ms", "--until-empty"];
    work.extend(["--retry-base", "100ms", "-c", "2", &queue.table, "--", "sh", "-c", script]);
    let said = std::fs::File::create(queue.scene.path("said")).unwrap();
    let mut working = Running::new(queue.tenure(&work).stderr(said));
    let first = working.number();
    assert_eq!(working.line(), "term");
    let second = working.number();
    assert!(!runs(first), "killed before the next attempt");
    assert_eq!(working.line(), "term");
    assert_eq!(working.code(), Some(0));
    assert!(!runs(second));
    let shown = queue.show(&slow);
    assert_eq!((&shown["state"], &shown["attempts"]), (&"FAILED".into(), &2.into()));
    let error = shown["error"].as_str().unwrap();
    assert!(error.starts_with("it ran for longer than --max-run 1s; the command was"), "{error}");
    assert_eq!(queue.state(&quick), "COMPLETED");
    let said = queue.scene.read("said");
    assert!(said.contains("1 done, 1 failed, 1 to be retried"), "{said}");
}

#[test]
fn a_worker_that_is_told_to_stop_releases_the_job_of_a_command_with_a_time_limit() {
    let Some(queue) = Queue::new("max_run_stop") else { return };
    let id = queue.add(&[]);
    let mut work = vec!["work", "--max-run", "1h", "--grace", "0s", &queue.table];
    work.extend(["--", "sh", "-c", "echo $$; exec sleep 300"]);
    let mut working = Running::new(&mut queue.tenure(&work));
    working.number();
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
    eventually("released", || (queue.state(&id) == "AVAILABLE").then_some(()));
    assert_eq!(queue.show(&id)["attempts"], 0);
}
