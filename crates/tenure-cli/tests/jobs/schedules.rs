//! Schedules of a queue.

use nix::sys::signal::Signal;

use crate::queue::Queue;
use crate::support::{Running, eventually};

#[test]
fn a_schedule_is_added_listed_fired_by_a_worker_and_removed() {
    let Some(queue) = Queue::new("schedules") else { return };
    let table = &*queue.table;
    let add = ["job", "schedule", "add", table, "report", "--cron", "30 6 * * 1-5"];
    let add = [&add[..], &["--time-zone", "Europe/Berlin", "--payload", "7"]].concat();
    let (code, next, stderr) = queue.outcome(&add);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(next.starts_with("next: 20") && next.contains(":30:00"), "{next}");
    let ls = ["job", "schedule", "ls", table];
    let (_, listed, _) = queue.outcome(&ls);
    let line = listed.lines().nth(1).unwrap();
    assert!(line.starts_with("report") && line.contains("Europe/Berlin"), "{listed}");
    queue.sql(&format!(
        "UPDATE {}.tenure_schedules SET next_at = now() - interval '8 days'",
        queue.schema
    ));
    let mut working = Running::new(&mut queue.tenure(&["work", "-q", table, "cat"]));
    assert_eq!(working.line(), "7");
    let done = format!("SELECT count(completed_at) || '/' || count(*) FROM {table}");
    eventually("it is done", || (queue.sql(&done) == "1/1").then_some(()));
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
    let (_, json, _) = queue.outcome(&[&ls[..], &["--json"]].concat());
    let shown: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&shown["payload"], &shown["catch_up"]), (&7.into(), &"last".into()));
    assert!(shown["last_at"].as_str() < shown["next_at"].as_str(), "{shown}");
    let rm = ["job", "schedule", "rm", table, "report"];
    assert_eq!((queue.outcome(&rm).0, queue.outcome(&rm).0), (Some(0), Some(1)));
    assert_eq!(queue.outcome(&ls).1, "no schedules\n");
    for (change, says) in [
        (["--cron", "nonsense", "--time-zone", "UTC"], "cron expression"),
        (["--cron", "@daily", "--time-zone", "Mars/Olympus"], "time zone"),
        (["--cron", "@daily", "--catch-up", "some"], "none, last, all"),
    ] {
        let add = [&["job", "schedule", "add", table, "x"][..], &change].concat();
        let (code, _, stderr) = queue.outcome(&add);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains(says), "{stderr}");
    }
}
