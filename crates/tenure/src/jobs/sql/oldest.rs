//! SQL of the age of the oldest available job, by index.

use super::parts::{FREE, JobTable};
use crate::store::pg::clock::NOW;

/// Maximum number of priorities that are looked at.
const MAX_PRIORITIES: usize = 100;

/// Age of the oldest available job in microseconds.
///
/// The index for claims is ordered by priority first, so the oldest job of one priority is one entry, and the oldest of
/// all is not. The recursion jumps from each priority to the next lower one, whatever the number of jobs between them.
/// A job with an infinite time of creation has no age.
pub(super) fn statement(jobs: &JobTable<'_>) -> String {
    let (table, priority) = (jobs.table.quoted(), jobs.priority());
    let first = |condition: &str| {
        format!(
            "SELECT {priority} AS priority, t.created_at FROM {table} AS t WHERE {FREE} {condition}\
             ORDER BY {priority} DESC, t.created_at, t.id LIMIT 1"
        )
    };
    let (highest, next) = (first(""), first(&format!("AND {priority} < l.priority ")));
    format!(
        "WITH RECURSIVE levels AS ( \
             (SELECT h.priority, h.created_at, 1 AS nth FROM ({highest}) AS h) \
             UNION ALL \
             SELECT n.priority, n.created_at, l.nth + 1 FROM levels AS l, LATERAL ({next}) AS n \
             WHERE l.nth < {MAX_PRIORITIES} \
         ) \
         SELECT {NOW} AS now, (extract(epoch FROM clock_timestamp() \
             - min(greatest(l.created_at, '0001-01-01 00:00:00+00'))) * 1000000)::int8 AS age \
         FROM levels AS l WHERE l.created_at < 'infinity'"
    )
}
