//! Retention of ended jobs.

use nix::sys::signal::Signal;

use crate::queue::Queue;
use crate::support::{Running, eventually};

#[test]
fn ended_jobs_are_deleted_by_prune_and_by_a_worker() {
    let Some(queue) = Queue::new("retention") else { return };
    let table = &*queue.table;
    let insert = format!(
        "INSERT INTO {table} (created_at, completed_at, failed_at) SELECT now() - age, CASE WHEN ok THEN now() - age END,
             CASE WHEN NOT ok THEN now() - age END
         FROM unnest(ARRAY[interval '1 day', interval '10 days']) AS age, unnest(ARRAY[true, false]) AS ok"
    );
    let count = format!("SELECT count(completed_at) || ' ' || count(failed_at) FROM {table}");
    queue.sql(&insert);
    let prune = queue.outcome(&["job", "prune", table, "--keep", "7d"]);
    assert_eq!((prune.0, &*prune.1), (Some(0), "1 job removed\n"), "{}", prune.2);
    let json = queue.outcome(&["job", "prune", table, "--keep-failed", "7d", "--json"]);
    assert_eq!((json.0, &*json.1), (Some(0), "{\"removed\":1}\n"));
    let none = queue.outcome(&["job", "prune", table]);
    assert!(none.0 == Some(2) && none.2.contains("keeps all jobs"), "{none:?}");
    queue.sql(&insert);
    assert_eq!(queue.sql(&count), "3 3");
    let mut working =
        Running::new(&mut queue.tenure(&["work", "-q", "--keep", "7d", table, "true"]));
    eventually("old jobs are gone", || (queue.sql(&count) == "2 3").then_some(()));
    working.signal(Signal::SIGTERM);
    assert_eq!(working.code(), Some(0));
}

#[test]
fn a_worker_that_may_not_delete_refuses_to() {
    let Some(queue) = Queue::new("undeletable") else { return };
    let role = format!("{}_role", queue.schema);
    queue.sql(&format!(
        "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {0} TO {role};
         GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA {0} TO {role}",
        queue.schema
    ));
    let theirs = queue.url.replace("postgres@", &format!("{role}@"));
    let mut work = queue.tenure(&["work", "--keep", "7d", "--until-empty", &queue.table, "true"]);
    let refused = work.env("TENURE_STORE", theirs).output().unwrap();
    queue.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(125) && stderr.contains("GRANT DELETE"), "{stderr}");
}
