//! What `tenure work --metrics` tells of a queue on a real server.

use crate::http::{get, lint, metrics, shown};
use crate::queue::Queue;
use crate::support::eventually;

/// A job of payload 2 hangs, one of payload 1 fails.
const SCRIPT: &str = "read x; [ $x != 2 ] || { echo ready; exec sleep 300; }; [ $x != 1 ]";

#[test]
fn jobs_are_counted_by_their_state_and_those_of_the_dead_when_they_are_taken_over() {
    let Some(queue) = Queue::new("metrics") else { return };
    let lost = queue.add(&["--payload", "2", "--priority", "3"]);
    // The claim of a worker whose machine is gone: nothing releases the job before its lease ends.
    queue.sql(&format!(
        "UPDATE {} SET locked_by = 'gone', locked_until = clock_timestamp() + interval '1 s' WHERE id = {lost}",
        queue.table
    ));
    let quick = ["--payload", "0", "--priority", "5"];
    let due = queue.add(&[&quick[..], &["--delay", "1s"]].concat());
    for _ in 0..3 {
        queue.add(&quick);
    }
    for _ in 0..2 {
        queue.add(&["--payload", "1", "--priority", "4", "--max-attempts", "1"]);
        queue.add(&["--payload", "0", "--priority", "-1"]);
    }
    queue.add(&["--payload", "0", "--delay", "1h"]);
    eventually("its lease ends", || (queue.state(&lost) == "EXPIRED").then_some(()));
    eventually("its time comes", || (queue.state(&due) == "AVAILABLE").then_some(()));

    let work = ["work", "--metrics", "127.0.0.1:0", "-q", &queue.table, "--", "sh", "-c", SCRIPT];
    let (_worker, address) = shown(&mut queue.tenure(&work));
    let numbers = || {
        let (text, samples) = metrics(&address);
        let states = ["available", "delayed", "running", "expired", "completed", "failed"];
        let series = |state| format!("tenure_jobs{{queue=\"{}\",state=\"{state}\"}}", queue.table);
        let numbers = states.map(|state| samples.get(&series(state)).cloned().unwrap_or_default());
        let reclaimed = format!("tenure_job_reclaimed_total{{queue=\"{}\"}}", queue.table);
        (text, numbers, samples.get(&reclaimed).cloned())
    };
    // The worst comes last: it hangs at the job that was taken over, and leaves those below.
    let expected = ["2", "1", "1", "0", "4", "2"];
    eventually("the numbers are right", || (numbers().1 == expected).then_some(()));
    let (text, _, reclaimed) = numbers();
    lint(&text);
    assert_eq!(reclaimed.as_deref(), Some("1"), "not the one whose time had come: {text}");
    queue.add(&["--payload", "0", "--priority", "-1"]);
    eventually("a new one is counted", || (numbers().1[0] == "3").then_some(()));
    assert_eq!((get(&address, "/readyz").0, get(&address, "/leader").0), (200, 503));

    // Without the table the number is unknown: an old number would be taken for a current one.
    queue.sql(&format!("ALTER TABLE {} RENAME TO gone", queue.table));
    eventually("it is not a number", || (numbers().1[0] == "NaN").then_some(()));
}
