//! Check of the job tables in the same database, for `tenure doctor`.

use tokio_postgres::SimpleQueryRow;

use super::column_map::{self, ColumnMap};
use super::job_columns::{CHECKPOINTS, JOBS, TRIGGER_VERSION, problems};
use super::table::Table;
use crate::store::Finding;

/// SQL for [`finding`]: tables with the columns of a queue or of checkpoints, or views with tenure's names of them, in
/// the schema of `locks` or on the search path. Each row has the name, the problems of its columns, whether it is a partitioned queue, and, if `tenure schema`
/// was applied, the first table among it and those that inherit from it whose trigger is missing or of another version.
pub(crate) fn query(locks: &Table) -> String {
    let same = ColumnMap::default();
    let (queue, chunks) = (problems("c.oid", JOBS, &same), problems("c.oid", CHECKPOINTS, &same));
    let (map, table) = (column_map::map_of("c.oid"), column_map::table_of("c.oid"));
    let has = |columns: &[&str]| {
        format!(
            "(SELECT count(*) FROM pg_attribute AS a WHERE a.attrelid = c.oid AND NOT a.attisdropped \
              AND a.attname IN ('{}')) = {}",
            columns.join("', '"),
            columns.len()
        )
    };
    format!(
        "\
WITH RECURSIVE found AS ( \
    SELECT c.oid, CASE c.relkind WHEN 'v' THEN {table} ELSE c.oid END AS base, c.relkind, {} AS is_queue, {} AS is_ours \
    FROM pg_class AS c \
    WHERE (c.relkind IN ('r', 'p') OR c.relkind = 'v' AND ({map}) IS NOT NULL) AND NOT c.relispartition \
        AND NOT EXISTS (SELECT FROM pg_inherits AS up WHERE up.inhrelid = c.oid) \
        AND (pg_table_is_visible(c.oid) OR c.relnamespace = \
             (SELECT l.relnamespace FROM pg_class AS l WHERE l.oid = to_regclass('{}'))) \
        AND ({} OR {}) \
), tree AS ( \
    SELECT f.oid AS root, f.base AS oid FROM found AS f \
    UNION SELECT t.root, i.inhrelid FROM pg_inherits AS i JOIN tree AS t ON t.oid = i.inhparent \
) \
SELECT c.oid::regclass AS queue, c.is_queue::int AS is_queue, c.is_ours::int AS is_ours, (c.relkind = 'p' AND c.is_queue)::int AS is_partitioned, \
       (SELECT string_agg(p.problem, ', ') FROM (SELECT * FROM ({queue}) AS p WHERE c.is_queue \
           UNION ALL SELECT * FROM ({chunks}) AS p WHERE NOT c.is_queue) AS p) AS problems, \
       (SELECT min(t.oid::regclass::text) FROM tree AS t WHERE t.root = c.oid AND c.is_ours AND NOT EXISTS ( \
           SELECT FROM pg_trigger AS g WHERE g.tgrelid = t.oid AND g.tgname LIKE '%\\_tenure\\_claimed' \
               AND (g.tgparentid <> 0 OR obj_description(g.oid, 'pg_trigger') = '{TRIGGER_VERSION}'))) AS bare_table \
FROM found AS c ORDER BY 1",
        has(&["completed_at", "failed_at"]),
        has(&["lease_token"]),
        locks.quoted(),
        has(&["completed_at", "failed_at", "locked_until", "locked_by"]),
        has(&["matrix_id", "chunk_hash", "locked_until", "locked_by"]),
    )
}

/// The first problem of these tables: one finding, whatever their number.
pub(crate) fn finding(rows: &[SimpleQueryRow]) -> Finding {
    let text = |row: &SimpleQueryRow, column: &str| row.get(column).unwrap_or_default().to_owned();
    if let Some(row) = rows.iter().find(|row| row.get("is_partitioned") == Some("1")) {
        let detail = format!(
            "{} is partitioned: no index makes unique_key unique over all partitions, and jobs cannot be enqueued",
            text(row, "queue")
        );
        return Finding::failed("queues", detail).advise(
            "keep jobs in a table without partitions, made by tenure schema --queue NAME --apply",
        );
    }
    let mut with_problems = rows.iter().filter(|row| row.get("problems").is_some());
    let ours = with_problems.clone().find(|row| row.get("is_ours") == Some("1"));
    if let Some(row) = ours.or_else(|| with_problems.next()) {
        let detail =
            format!("{} cannot be used by tenure: {}", text(row, "queue"), text(row, "problems"));
        // Without the columns of tenure, the table may belong to another program.
        let finding =
            if row.get("is_ours") == Some("1") { Finding::failed } else { Finding::warning };
        return finding("queues", detail)
            .advise("alter the table; tenure schema refuses it as well");
    }
    if let Some(row) = rows.iter().find(|row| row.get("bare_table").is_some()) {
        let (queue, table) = (text(row, "queue"), text(row, "bare_table"));
        let option = if row.get("is_queue") == Some("1") { "--queue" } else { "--checkpoints" };
        let detail =
            format!("{table} lacks the trigger that counts claims, or has that of another version");
        return Finding::warning("queues", detail)
            .advise(format!("run tenure schema {option} {queue} --apply"));
    }
    Finding::ok("queues", "the tables of jobs and checkpoints can be used")
}
