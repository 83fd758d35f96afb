//! SQL that deletes ended jobs.

use super::parts::JobTable;
use crate::store::pg::clock::NOW;
use crate::store::pg::durable::DURABLE;

/// Deletes old jobs of one window: `$1` the id after which it begins or null, `$2` the number of rows, `$3` and `$4` the
/// microseconds for which completed and failed jobs are kept, or null. Returns the number of rows and of deleted jobs, the
/// last id, and true in `all_young` if no job of the window was created so long ago.
pub(in crate::jobs) fn prune(jobs: &JobTable<'_>) -> String {
    let (table, id) = (jobs.table.quoted(), jobs.id);
    let before =
        |micros: &str| format!("clock_timestamp() - {micros}::int8 * interval '1 microsecond'");
    let (completed, failed) = (before("$3"), before("$4"));
    let is_old = format!(
        "(t.completed_at < {completed} OR t.failed_at < {failed} AND t.completed_at IS NULL)"
    );
    format!(
        "WITH rows AS MATERIALIZED ( \
             SELECT t.id, t.created_at, coalesce({is_old}, false) AS is_old FROM {table} AS t \
             WHERE $1::text IS NULL OR t.id > $1::text::{id} ORDER BY t.id LIMIT $2::int8 \
         ), removed AS ( \
             DELETE FROM {table} AS t WHERE t.id = ANY (ARRAY(SELECT r.id FROM rows AS r WHERE r.is_old)) AND {is_old} \
             RETURNING t.id, {DURABLE} \
         ) \
         SELECT {NOW} AS now, (SELECT count(*) FROM rows) AS rows, (SELECT count(*) FROM removed) AS removed, \
             (SELECT r.id::text FROM rows AS r ORDER BY r.id DESC LIMIT 1) AS last_row, \
             (SELECT coalesce(bool_and(r.created_at >= greatest({completed}, {failed})), false) FROM rows AS r) AS all_young"
    )
}
