//! Jobs from a file.

use std::fmt::Write as _;

use crate::queue::Queue;

#[test]
fn the_jobs_of_a_file_are_added_all_or_none() {
    let Some(queue) = Queue::new("importing") else { return };
    let table = &*queue.table;
    let mut lines =
        String::from("{\"payload\": 7, \"unique_key\": \"k\"}\n{\"unique_key\": \"k\"}\n");
    for nth in 0..2_000 {
        writeln!(lines, "{{\"payload\": {{\"nth\": {nth}}}, \"priority\": 1, \"delay\": \"1h\"}}")
            .unwrap();
    }
    let path = queue.scene.path("jobs.jsonl");
    std::fs::write(&path, &lines).unwrap();
    let from = ["job", "add", table, "--from", "jobs.jsonl"];
    let (code, added, stderr) = queue.outcome(&from);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(added.starts_with("2001 jobs added, 1 left out"), "{added}");
    let count = format!(
        "SELECT count(*) || ' ' || count(*) FILTER (WHERE locked_by = '~retry') FROM {table}"
    );
    assert_eq!(queue.sql(&count), "2001 2000");
    std::fs::write(&path, lines + "{\"payload\": 8}\n{payload: 9}\n").unwrap();
    let mut stdin = queue.tenure(&["job", "add", table, "--from", "-"]);
    let refused = stdin.stdin(std::fs::File::open(&path).unwrap()).output().unwrap();
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && stderr.contains("line 2004: "), "{stderr}");
    assert_eq!(queue.sql(&count), "2001 2000", "no job was added");
    let both = queue.outcome(&["job", "add", table, "--from", "jobs.jsonl", "--payload", "1"]);
    assert_eq!(both.0, Some(2), "{both:?}");
    let missing = queue.outcome(&["job", "add", table, "--from", "no-such-file"]);
    assert!(missing.0 == Some(2) && missing.2.contains("no-such-file"), "{missing:?}");
}
