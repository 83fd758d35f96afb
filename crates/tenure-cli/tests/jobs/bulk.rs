//! Lists of jobs, and changes of many jobs at once.

use crate::queue::Queue;

#[test]
fn the_list_has_the_newest_job_first_and_names_the_worker_of_an_expired_one() {
    let Some(queue) = Queue::new("newest") else { return };
    let ids: Vec<String> = (0..3).map(|_| queue.add(&[])).collect();
    queue.sql(&format!(
        "UPDATE {} SET locked_by = 'worker 7', locked_until = now() - interval '1 s' WHERE id = {}",
        queue.table, ids[0]
    ));
    let (_, table, _) = queue.outcome(&["job", "ls", &queue.table]);
    let listed: Vec<&str> =
        table.lines().skip(1).map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(listed, [&*ids[2], &*ids[1], &*ids[0]], "{table}");
    let expired = table.lines().last().unwrap();
    assert!(expired.contains("EXPIRED") && expired.contains("worker 7"), "{table}");
    let after = ["job", "ls", "--after", &ids[1], &queue.table];
    let (_, rest, _) = queue.outcome(&after);
    assert!(rest.lines().count() == 2 && rest.contains("worker 7"), "{rest}");
}

#[test]
fn jobs_are_changed_by_state_age_and_key_after_a_confirmation() {
    let Some(queue) = Queue::new("bulk") else { return };
    for key in ["a 1", "a 2", "b 1"] {
        queue.add(&["--unique-key", key]);
    }
    let table = &*queue.table;
    let cancel = ["job", "cancel", table, "--key", "a *"];
    let (code, stdout, stderr) = queue.outcome(&cancel);
    assert_eq!((code, &*stdout), (Some(2), ""), "{stderr}");
    assert!(stderr.contains("2 jobs would be cancelled: add --yes"), "{stderr}");
    let dry = queue.outcome(&[&cancel[..], &["--dry-run"]].concat());
    assert_eq!((dry.0, &*dry.1), (Some(0), "2 jobs would be cancelled\n"));
    let yes = queue.outcome(&[&cancel[..], &["--yes", "--reason", "not now"]].concat());
    assert_eq!((yes.0, &*yes.1), (Some(0), "2 jobs cancelled\n"));
    let retry = ["job", "retry", table, "--state", "failed", "--yes"];
    let old = queue.outcome(&[&retry[..], &["--older-than", "1h"]].concat());
    assert_eq!((old.0, &*old.1), (Some(0), "0 jobs retried\n"));
    let one = queue.outcome(&[&retry[..], &["--limit", "1", "--json"]].concat());
    let line: serde_json::Value = serde_json::from_str(&one.1).unwrap();
    assert_eq!((&line["done"], &line["jobs"]), (&"retried".into(), &1.into()));
    let removed = queue.outcome(&["job", "rm", table, "--older-than", "0s", "--yes"]);
    assert_eq!((removed.0, &*removed.1), (Some(0), "3 jobs removed\n"));
    for (arguments, says) in [
        (&["job", "rm", table][..], "no jobs are named"),
        (&["job", "rm", table, "--yes"], "no jobs are named"),
        (&["job", "rm", table, "7", "--state", "failed"], "cannot be used"),
    ] {
        let (code, _, stderr) = queue.outcome(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(says), "{arguments:?}: {stderr}");
    }
}
