//! SQL that counts jobs by index: at most a bounded number of rows is read, however many the table has.

use super::parts::{JobTable, OPEN, state};
use crate::store::pg::clock::NOW;

/// Size of the table and the statistics about it, with those of tables that inherit from it.
pub(super) fn size(jobs: &JobTable<'_>) -> String {
    format!(
        "WITH RECURSIVE tree AS ( \
             SELECT to_regclass('{}')::oid AS oid \
             UNION SELECT i.inhrelid FROM pg_inherits AS i JOIN tree AS t ON t.oid = i.inhparent \
         ) \
         SELECT {NOW} AS now, sum(pg_relation_size(c.oid))::int8 AS bytes, \
             sum(greatest(pg_stat_get_live_tuples(c.oid), c.reltuples::int8, 0))::int8 AS rows, \
             bool_and(EXISTS (SELECT FROM pg_index AS i JOIN pg_class AS n ON n.oid = i.indexrelid \
                 WHERE i.indrelid = c.oid AND i.indisvalid AND n.relname LIKE '%\\_tenure\\_failed')) AS indexes_failed \
         FROM tree AS t JOIN pg_class AS c ON c.oid = t.oid",
        jobs.table.quoted()
    )
}

/// Counts jobs by state, by reading all rows: for small tables.
pub(super) fn exact(jobs: &JobTable<'_>) -> String {
    let (state, table) = (state(), jobs.table.quoted());
    format!(
        "SELECT {NOW} AS now, 'all' AS part, {state} AS state, count(*) AS jobs \
         FROM {table} AS t GROUP BY 3"
    )
}

/// Counts open and, with `failed`, failed jobs by state, at most `$1` of each part of the table. Each part is one partial
/// index, in whose order it is read: without the order the planner may prefer to read the whole table.
pub(super) fn bounded(jobs: &JobTable<'_>, failed: bool) -> String {
    let (state, table, order) = (state(), jobs.table.quoted(), jobs.order());
    let part = |name: &str, condition: &str, order: &str| {
        format!(
            "(SELECT '{name}' AS part, {state} AS state FROM {table} AS t \
              WHERE {condition} ORDER BY {order} LIMIT $1::int8)"
        )
    };
    let mut parts = vec![
        part("free", &format!("{OPEN} AND t.locked_by IS NULL"), &order),
        part("held", &format!("{OPEN} AND t.locked_by IS NOT NULL"), "t.id"),
    ];
    if failed {
        parts.push(part("failed", FAILED, "t.failed_at DESC, t.id DESC"));
    }
    format!(
        "SELECT {NOW} AS now, s.part, s.state, count(*) AS jobs FROM ({}) AS s GROUP BY 2, 3",
        parts.join(" UNION ALL ")
    )
}

/// Condition of a failed job: that of the index for failed jobs.
pub(super) const FAILED: &str = "t.failed_at IS NOT NULL AND t.completed_at IS NULL";
