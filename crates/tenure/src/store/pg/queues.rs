//! Check of the job tables in the same database, for `tenure doctor`.

use tokio_postgres::SimpleQueryRow;

use super::table::Table;
use crate::store::Finding;

/// SQL for [`finding`]: tables with the columns of a queue that have partitions or inheriting tables, in the schema of
/// `locks` or on the search path. Each row has the name, whether the table is partitioned, and the first inheriting
/// table that lacks the trigger of `tenure schema`.
pub(crate) fn query(locks: &Table) -> String {
    format!(
        "\
WITH RECURSIVE tree AS ( \
    SELECT i.inhparent AS root, i.inhrelid AS oid FROM pg_inherits AS i \
    WHERE NOT EXISTS (SELECT FROM pg_inherits AS up WHERE up.inhrelid = i.inhparent) \
    UNION SELECT t.root, i.inhrelid FROM pg_inherits AS i JOIN tree AS t ON t.oid = i.inhparent \
) \
SELECT c.oid::regclass AS queue, (c.relkind = 'p')::int AS is_partitioned, \
       (SELECT min(t.oid::regclass::text) FROM tree AS t WHERE t.root = c.oid AND NOT EXISTS ( \
           SELECT FROM pg_trigger AS g WHERE g.tgrelid = t.oid AND g.tgname LIKE '%\\_tenure\\_claimed')) AS bare_child \
FROM pg_class AS c \
WHERE c.oid IN (SELECT t.root FROM tree AS t) AND c.relkind IN ('r', 'p') \
      AND (pg_table_is_visible(c.oid) OR c.relnamespace = \
           (SELECT l.relnamespace FROM pg_class AS l WHERE l.oid = to_regclass('{}'))) \
      AND (SELECT count(*) FROM pg_attribute AS a WHERE a.attrelid = c.oid AND NOT a.attisdropped AND a.attname IN \
           ('completed_at', 'failed_at', 'locked_until', 'locked_by', 'lease_token', 'attempts')) = 6 \
ORDER BY 1",
        locks.quoted()
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
    if let Some(row) = rows.iter().find(|row| row.get("bare_child").is_some()) {
        let (queue, child) = (text(row, "queue"), text(row, "bare_child"));
        let detail = format!(
            "{child}, which inherits from {queue}, lacks indexes or the trigger that raises tokens"
        );
        return Finding::warning("queues", detail)
            .advise(format!("run tenure schema --queue {queue} --apply"));
    }
    Finding::ok("queues", "no table of jobs is partitioned")
}
