//! SQL that changes many jobs, a window of rows per statement.

use tenure_core::jobs::DELAYED_HOLDER;

use super::parts::{JobTable, RAISED_TOKEN, channel, cut, state};
use crate::store::pg::clock::NOW;
use crate::store::pg::durable::DURABLE;

/// Statements of the changes. All have these parameters: `$1` the id after which the window begins or null, `$2` the
/// number of rows to read, `$3` a state or null, `$4` the age in microseconds or null, `$5` a pattern or null, `$6` the
/// maximum number of jobs, `$7` the reason.
#[derive(Debug)]
pub(in crate::jobs) struct BulkStatements {
    pub(in crate::jobs) requeue: ChangeStatements,
    pub(in crate::jobs) cancel: ChangeStatements,
    pub(in crate::jobs) remove: ChangeStatements,
}

/// Statements of one change: the change itself, and the number of jobs that it would change.
#[derive(Debug)]
pub(in crate::jobs) struct ChangeStatements {
    pub(in crate::jobs) change: String,
    pub(in crate::jobs) count: String,
}

impl BulkStatements {
    pub(in crate::jobs) fn new(jobs: &JobTable<'_>) -> Self {
        let (table, state) = (jobs.table.quoted(), state());
        let why = cut("$7::text", jobs.error_chars);
        let ours = "FROM chosen AS c WHERE t.id = c.id";
        let (open, done) = (
            "t.completed_at IS NULL AND t.failed_at IS NULL",
            format!("RETURNING t.id, {DURABLE}"),
        );
        let requeue = format!(
            "UPDATE {table} AS t SET failed_at = NULL, attempts = 0, locked_until = NULL, locked_by = NULL {ours} {done}"
        );
        let cancel = format!(
            "UPDATE {table} AS t SET failed_at = clock_timestamp(), error_message = {why}, locked_until = NULL, \
                 locked_by = NULL, lease_token = {RAISED_TOKEN} {ours} AND {open} {done}"
        );
        let remove = format!("DELETE FROM {table} AS t USING chosen AS c WHERE t.id = c.id {done}");
        let can_requeue = format!(
            "t.completed_at IS NULL AND (t.failed_at IS NOT NULL OR t.locked_by = '{DELAYED_HOLDER}')"
        );
        // A failed job of a key that has an open job cannot be opened again, and of two failed ones only one can.
        let has_duplicate = format!(
            "k.unique_key IS NOT NULL AND k.failed AND (k.nth > 1 OR EXISTS (SELECT FROM {table} AS t \
                 WHERE t.unique_key = k.unique_key AND {open} AND t.id <> k.id))"
        );
        let all = |allowed: &str, duplicate: &str, change: &str| ChangeStatements {
            change: window(jobs, allowed, duplicate, change, "FOR UPDATE OF t"),
            count: window(jobs, allowed, duplicate, "SELECT c.id FROM chosen AS c", ""),
        };
        Self {
            requeue: all(&can_requeue, &has_duplicate, &requeue),
            cancel: all(open, "false", &cancel),
            remove: all(&format!("{state} <> 'RUNNING'"), "false", &remove),
        }
    }
}

/// Changes the jobs of one window of rows. Returns the window's number of rows and its last id, how many jobs matched,
/// were duplicates and were changed, and the last one that matched.
///
/// Rows are locked in the byte order of their ids, as completions lock them: two statements that lock the same rows do
/// not wait for each other.
fn window(jobs: &JobTable<'_>, allowed: &str, duplicate: &str, change: &str, lock: &str) -> String {
    let (table, id, channel, state) = (jobs.table.quoted(), jobs.id, channel(jobs.table), state());
    let order = "ORDER BY t.id::text COLLATE \"C\"";
    let matches = format!(
        "{allowed} AND ($3::text IS NULL OR {state} = $3) \
         AND ($4::int8 IS NULL OR coalesce(t.completed_at, t.failed_at, t.created_at) \
             < clock_timestamp() - $4::int8 * interval '1 microsecond') \
         AND ($5::text IS NULL OR t.unique_key LIKE $5)"
    );
    format!(
        "WITH rows AS MATERIALIZED ( \
             SELECT t.id FROM {table} AS t WHERE $1::text IS NULL OR t.id > $1::text::{id} ORDER BY t.id LIMIT $2::int8 \
         ), wanted AS MATERIALIZED ( \
             SELECT t.id FROM {table} AS t JOIN rows AS r ON r.id = t.id WHERE {matches} ORDER BY t.id LIMIT $6::int8 \
         ), locked AS MATERIALIZED ( \
             SELECT t.id, t.unique_key, t.failed_at IS NOT NULL AS failed FROM {table} AS t \
             WHERE t.id = ANY (ARRAY(SELECT w.id FROM wanted AS w)) AND {matches} {order} {lock} \
         ), numbered AS ( \
             SELECT l.*, row_number() OVER (PARTITION BY l.unique_key ORDER BY l.id) AS nth FROM locked AS l \
         ), chosen AS MATERIALIZED ( \
             SELECT k.id FROM numbered AS k WHERE NOT ({duplicate}) \
         ), changed AS ( {change} ), counts AS ( \
             SELECT (SELECT count(*) FROM rows) AS rows, (SELECT count(*) FROM wanted) AS wanted, \
                 (SELECT count(*) FROM locked) - (SELECT count(*) FROM chosen) AS duplicates, \
                 (SELECT count(*) FROM changed) AS changed \
         ) \
         SELECT {NOW} AS now, n.*, (SELECT r.id::text FROM rows AS r ORDER BY r.id DESC LIMIT 1) AS last_row, \
             (SELECT w.id::text FROM wanted AS w ORDER BY w.id DESC LIMIT 1) AS last_wanted, \
             CASE WHEN n.changed > 0 AND $8 THEN pg_notify('{channel}', '')::text END \
         FROM counts AS n"
    )
}
