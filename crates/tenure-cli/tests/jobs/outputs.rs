//! Progress, result and trace of a command's job.

use std::process::Command;

use crate::queue::Queue;
use crate::support::{Running, eventually};

#[test]
fn a_command_reports_progress_and_a_result() {
    let Some(queue) = Queue::new("outputs") else { return };
    let id = queue.add(&[]);
    let script = "echo 1 of 3 >&$TENURE_PROGRESS_FD; printf '2 of 3\\n3 o' >&$TENURE_PROGRESS_FD; echo begun; \
                  while [ ! -e go ]; do sleep 0.1; done; \
                  printf '{\"rows\": ' >&$TENURE_RESULT_FD; echo '7}' >&$TENURE_RESULT_FD";
    let mut work = vec!["work", "--lease", "2s", "--until-empty", &queue.table];
    work.extend(["--", "sh", "-c", script]);
    let mut working = Running::new(&mut queue.tenure(&work));
    assert_eq!(working.line(), "begun");
    eventually("progress", || (queue.show(&id)["progress"] == "2 of 3").then_some(()));
    let (_, listed, _) = queue.outcome(&["job", "ls", &queue.table]);
    assert!(listed.contains("PROGRESS") && listed.contains("2 of 3"), "{listed}");
    std::fs::write(queue.scene.path("go"), "").unwrap();
    assert_eq!(working.code(), Some(0));
    let shown = queue.show(&id);
    assert_eq!((&shown["state"], &shown["result"]["rows"]), (&"COMPLETED".into(), &7.into()));
    let (_, shown, _) = queue.outcome(&["job", "show", &queue.table, &id]);
    assert!(
        shown.contains("progress: 2 of 3") && shown.contains("result: {\"rows\":7}"),
        "{shown}"
    );
}

#[test]
fn a_result_that_is_no_json_fails_the_attempt() {
    let Some(queue) = Queue::new("no_result") else { return };
    for (script, why) in [
        ("echo 7 rows >&$TENURE_RESULT_FD", "the result is not JSON"),
        ("printf '\\377' >&$TENURE_RESULT_FD", "the result is no UTF-8"),
        (
            "head -c 2000000 /dev/zero | tr '\\0' 1 >&$TENURE_RESULT_FD",
            "the result has 1048577 bytes",
        ),
    ] {
        let id = queue.add(&["--max-attempts", "1"]);
        let work = ["work", "--until-empty", &queue.table, "--", "sh", "-c", script];
        assert_eq!(queue.outcome(&work).0, Some(0));
        let shown = queue.show(&id);
        assert_eq!(shown["state"], "FAILED", "{script}: {shown}");
        assert!(shown["error"].as_str().unwrap().contains(why), "{script}: {shown}");
    }
}

/// A daemon that a command leaves behind keeps the pipes open.
#[test]
fn the_end_of_a_job_does_not_wait_for_processes_that_keep_its_pipes() {
    let Some(queue) = Queue::new("left_behind") else { return };
    let id = queue.add(&[]);
    let script = "echo 7 >&$TENURE_RESULT_FD; setsid sleep 20 >/dev/null 2>&1 </dev/null & exit 0";
    let begun = std::time::Instant::now();
    let work = ["work", "--until-empty", &queue.table, "--", "sh", "-c", script];
    assert_eq!(queue.outcome(&work).0, Some(0));
    assert!(begun.elapsed() < std::time::Duration::from_secs(15), "{:?}", begun.elapsed());
    assert_eq!(queue.show(&id)["result"], 7);
}

/// Only the command has the pipes; descriptors of the worker and of the guardian are closed in it.
#[test]
fn a_command_inherits_its_two_pipes_and_no_other_descriptor() {
    let Some(queue) = Queue::new("descriptors") else { return };
    queue.add(&[]);
    let script = "ls /proc/$$/fd > open; echo $TENURE_PROGRESS_FD $TENURE_RESULT_FD > named";
    let work = ["work", "--until-empty", &queue.table, "--", "bash", "-c", script];
    assert_eq!(queue.outcome(&work).0, Some(0));
    let named = queue.scene.read("named");
    let named: Vec<&str> = named.split_whitespace().collect();
    assert!(named.len() == 2 && named.iter().all(|fd| fd.len() == 1), "{named:?}");
    // This process may have inherited others, which every child of it has.
    let usual = Command::new("bash").args(["-c", "ls /proc/$$/fd; true"]).output().unwrap().stdout;
    let usual = String::from_utf8(usual).unwrap();
    let open = queue.scene.read("open");
    let new: Vec<&str> = open
        .split_whitespace()
        .filter(|fd| !usual.split_whitespace().any(|it| it == *fd))
        .collect();
    assert_eq!(new, named, "{open} against {usual}");
}

#[test]
fn a_trace_reaches_the_command() {
    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const OTHER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203332-00";
    let Some(queue) = Queue::new("traces") else { return };
    let add = |arguments: &[&str], inherited: &str| {
        let mut command = vec!["job", "add", &queue.table];
        command.extend(arguments);
        let output = queue.tenure(&command).env("TRACEPARENT", inherited).output().unwrap();
        output.status.code()
    };
    assert_eq!(add(&["--priority", "4", "--traceparent", PARENT], OTHER), Some(0));
    assert_eq!(add(&["--priority", "3", "--meta", "{\"a\": 1}"], OTHER), Some(0));
    assert_eq!(add(&["--priority", "2"], "nonsense"), Some(0));
    assert_eq!(add(&["--traceparent", "nonsense"], OTHER), Some(2));
    assert_eq!(add(&["--meta", "[]"], OTHER), Some(2));
    let script = "echo ${TRACEPARENT-none} >> seen";
    let work = ["work", "--until-empty", &queue.table, "--", "sh", "-c", script];
    assert!(queue.tenure(&work).env_remove("TRACEPARENT").status().unwrap().success());
    let seen = queue.scene.read("seen");
    let seen: Vec<&str> = seen.lines().collect();
    assert_eq!(seen, [PARENT, OTHER, "none"]);
    queue.sql(&format!("ALTER TABLE {} DROP COLUMN meta", queue.table));
    assert_eq!(add(&[], OTHER), Some(0), "no error of a table without metadata");
    assert_eq!(add(&["--traceparent", PARENT], ""), Some(125));
}
