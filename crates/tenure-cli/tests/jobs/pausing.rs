//! Pause and resume of a queue.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::queue::Queue;
use crate::support::{Running, eventually};

#[test]
fn a_paused_queue_is_shown_and_workers_claim_nothing_until_it_is_resumed() {
    let Some(queue) = Queue::new("pausing") else { return };
    let table = &*queue.table;
    let slow = queue.add(&["--payload", "1"]);
    let script = "read x; [ $x != 1 ] || while [ ! -e go ]; do sleep 0.05; done";
    let mut work = queue.tenure(&["work", "--json", table, "--", "sh", "-c", script]);
    work.stderr(std::fs::File::create(queue.scene.path("events")).unwrap());
    let mut working = Running::new(&mut work);
    eventually("it runs", || (queue.state(&slow) == "RUNNING").then_some(()));
    let pause = ["job", "pause", table, "--reason", "a new version"];
    assert_eq!(queue.outcome(&pause).0, Some(0));
    let event = |name: &str| {
        let events = queue.scene.read("events");
        let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        events.into_iter().find(|event| event["event"] == name)
    };
    // The worker has no free place, and reports the pause all the same.
    let paused = eventually("the pause is reported", || event("paused"));
    assert_eq!(paused["reason"], "a new version");
    let (_, _, stderr) = queue.outcome(&["job", "ls", table]);
    assert!(stderr.contains("is paused for") && stderr.contains("a new version"), "{stderr}");
    let next = queue.add(&["--payload", "2"]);
    std::fs::write(queue.scene.path("go"), "").unwrap();
    eventually("running jobs go on", || (queue.state(&slow) == "COMPLETED").then_some(()));
    // Longer than the interval at which a worker polls: it had the time to claim the job, and did not.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(queue.state(&next), "AVAILABLE");
    let (code, shown, _) = queue.outcome(&["job", "resume", table, "--json"]);
    assert_eq!((code, shown.contains("\"paused\":false")), (Some(0), true), "{shown}");
    eventually("it is resumed", || (queue.state(&next) == "COMPLETED").then_some(()));
    assert!(event("resumed").is_some());
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
}

#[test]
fn a_queue_without_settings_works_and_refuses_a_pause() {
    let Some(queue) = Queue::new("unpaused") else { return };
    queue.sql(&format!("DROP TABLE {}.tenure_queues", queue.schema));
    let (code, _, stderr) = queue.outcome(&["job", "pause", &queue.table]);
    assert_eq!(code, Some(125), "{stderr}");
    assert!(
        stderr.contains("tenure_queues") && stderr.contains("tenure schema --queue"),
        "{stderr}"
    );
    queue.add(&[]);
    assert_eq!(queue.outcome(&["work", "-q", "--until-empty", &queue.table, "true"]).0, Some(0));
}
