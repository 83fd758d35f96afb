//! Statements that list jobs, the newest first.
//!
//! A page is read by an index, backwards: a large table is neither sorted nor scanned. Ids that the database counts grow
//! with time, so their key is that index. Other ids, such as random uuids, say nothing about age. An index over
//! `created_at` of all rows would cost a write per job for lists alone, so tenure does not create one, but uses one that
//! exists. Without it, such jobs are listed by descending id.

use super::parts::{JobTable, row_columns, state};
use crate::store::pg::clock::NOW;

/// Types of ids that grow with time.
const COUNTED_TYPES: [&str; 3] = ["bigint", "integer", "smallint"];

impl JobTable<'_> {
    /// True if the ids grow with time.
    pub(in super::super) fn has_counted_ids(&self) -> bool {
        COUNTED_TYPES.contains(&self.id)
    }
}

/// Lists jobs: `$1` a state or null for all, `$2` the limit, `$3` the id to continue after or null.
pub(super) fn by_id(jobs: &JobTable<'_>) -> String {
    let id = jobs.id;
    list(jobs, &format!("t.id < $3::text::{id}"), "t.id DESC")
}

/// As [`by_id`], by descending time of creation. Of an id that has no row any longer, no job comes after it.
pub(super) fn by_time(jobs: &JobTable<'_>) -> String {
    let (table, id) = (jobs.table.quoted(), jobs.id);
    let after = format!(
        "(t.created_at, t.id) < (SELECT a.created_at, a.id FROM {table} AS a WHERE a.id = $3::text::{id})"
    );
    list(jobs, &after, "t.created_at DESC, t.id DESC")
}

fn list(jobs: &JobTable<'_>, after: &str, order: &str) -> String {
    let (table, shown, state) = (jobs.table.quoted(), row_columns(jobs), state());
    format!(
        "SELECT {shown} FROM {table} AS t \
         WHERE ($1::text IS NULL OR {state} = $1) AND ($3::text IS NULL OR {after}) \
         ORDER BY {order} LIMIT $2::int8"
    )
}

/// True in the column `has_time_index` if an index has all jobs by `created_at`. Jobs without that time have no place in
/// the order, and rows of inheriting tables are in other indexes.
pub(super) fn has_time_index(jobs: &JobTable<'_>) -> String {
    let table = jobs.table.quoted();
    format!(
        "SELECT {NOW} AS now, EXISTS (SELECT FROM pg_index AS i \
             JOIN pg_class AS c ON c.oid = i.indexrelid JOIN pg_am AS m ON m.oid = c.relam \
             JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] \
             WHERE i.indrelid = to_regclass('{table}') AND i.indisvalid AND i.indpred IS NULL AND m.amname = 'btree' \
                 AND a.attname = 'created_at' AND a.attnotnull) \
             AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhparent = to_regclass('{table}')) AS has_time_index"
    )
}
