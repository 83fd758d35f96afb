//! `tenure schema` on a table in use: the difference, its application, and its removal.

use super::queue::Queue;

/// A table of a team's own, in the schema of the queue.
fn create_tasks(queue: &Queue) -> String {
    let table = format!("{}.tasks", queue.schema);
    queue.sql(&format!(
        "CREATE TABLE {table} (task_id bigserial PRIMARY KEY, \"Owner\" text, leased_until timestamptz, data jsonb)"
    ));
    table
}

#[test]
fn a_table_with_other_names_is_planned_applied_used_and_undone() {
    let Some(queue) = Queue::new("mapped") else { return };
    let table = create_tasks(&queue);
    let name = format!("{}.work", queue.schema);
    let columns = "id=task_id,locked_by=\"Owner\",locked_until=leased_until,payload=data";
    let mapped = ["schema", "--queue", &name, "--table", &table, "--columns", columns];
    let (code, plan, stderr) = queue.outcome(&mapped);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(plan.contains("CREATE INDEX CONCURRENTLY") && plan.contains("\"Owner\""), "{plan}");
    let (code, _, stderr) =
        queue.outcome(&[&mapped[..], &["--apply", "--lock-timeout", "2s"]].concat());
    assert_eq!(code, Some(0), "{stderr}");
    let (code, plan, _) = queue.outcome(&["schema", "--queue", &name]);
    assert_eq!((code, plan), (Some(0), format!("-- {name}: nothing to do\n")));
    let (code, sql, _) = queue.outcome(&["schema", "--queue", &name, "--offline"]);
    assert!(code == Some(0) && sql.contains("CREATE TABLE"), "{sql}");

    let (code, _, stderr) = queue.outcome(&["job", "add", &name, "--payload", "7"]);
    assert_eq!(code, Some(0), "{stderr}");
    let (code, out, stderr) = queue.outcome(&["work", &name, "--until-empty", "--", "cat"]);
    assert_eq!((code, out.trim()), (Some(0), "7"), "{stderr}");

    queue.sql(&format!(
        "INSERT INTO {table} (\"Owner\", leased_until) VALUES ('plain', now() + interval '1 hour')"
    ));
    let undo = ["schema", "--queue", &name, "--undo"];
    let (code, plan, _) = queue.outcome(&undo);
    assert!(code == Some(0) && plan.contains("DROP VIEW") && plan.contains("kept"), "{plan}");
    assert!(!plan.contains("DROP COLUMN"), "{plan}");
    let (code, _, stderr) = queue.outcome(&[&undo[..], &["--apply"]].concat());
    assert!(code == Some(125) && stderr.contains("held by workers"), "{stderr}");
    let all = ["--apply", "--force", "--drop-columns"];
    let (code, _, stderr) = queue.outcome(&[&undo[..], &all].concat());
    assert_eq!(code, Some(0), "{stderr}");
    let count = format!(
        "SELECT count(*) FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped"
    );
    assert_eq!(queue.sql(&count).trim(), "4");
}

#[test]
fn wrong_combinations_are_usage_errors_and_an_unreachable_server_gets_the_general_sql() {
    let Some(queue) = Queue::new("combined") else { return };
    for wrong in [
        &["schema", "--undo"][..],
        &["schema", "--queue", "a", "--queue", "b", "--table", "t"],
        &["schema", "--queue", "a", "--columns", "id=x"],
        &["schema", "--queue", "a", "--table", "t", "--columns", "id"],
        &["schema", "--queue", "a", "--table", "t", "--columns", "no=x"],
        &["schema", "--queue", "a", "--drop-columns"],
        &["schema", "--queue", "a", "--undo", "--offline"],
    ] {
        let (code, _, stderr) = queue.outcome(wrong);
        assert_eq!(code, Some(2), "{wrong:?}: {stderr}");
    }
    let away = "postgres://postgres@127.0.0.1:1/postgres";
    let (code, sql, stderr) = queue.outcome(&["schema", "--queue", "jobs", "-s", away]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(sql.contains("CREATE TABLE \"jobs\"") && stderr.contains("any state"), "{stderr}");
}
