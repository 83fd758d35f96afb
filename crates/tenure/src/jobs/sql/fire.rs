//! SQL that fires schedules.

use super::enqueue::insertion;
use super::parts::{JobTable, channel};
use crate::store::pg::clock::NOW;
use crate::store::pg::durable::DURABLE;

/// Statement that fires a schedule: `$1` the queue, `$2` the name, `$3` the slot that the worker read, `$4` the next slot or
/// null, `$5` the slots that are due, `$6` the unique keys of their jobs. `@schedules@` stands for the table.
pub(in crate::jobs) fn fire(jobs: &JobTable<'_>) -> String {
    let at = |value: &str| format!("'epoch'::timestamptz + {value} * interval '1 microsecond'");
    let (channel, insertion) = (channel(jobs.table), insertion(jobs, &[], ""));
    format!(
        "WITH due AS ( \
             SELECT t.* FROM @schedules@ AS t WHERE t.queue = $1 AND t.name = $2 AND t.next_at = {} \
             FOR UPDATE SKIP LOCKED \
         ), moved AS ( \
             UPDATE @schedules@ AS t SET next_at = coalesce({}, 'infinity'), \
                 last_at = coalesce((SELECT max({}) FROM unnest($5::int8[]) AS s (slot)), t.last_at) \
             FROM due AS d WHERE t.queue = d.queue AND t.name = d.name RETURNING t.name, {DURABLE} \
         ), asked AS ( \
             SELECT d.payload, d.priority, 0::int8 AS delay, d.max_attempts AS most, k.key, k.nth \
             FROM due AS d, unnest($6::text[]) WITH ORDINALITY AS k (key, nth) \
         ), made AS ( {insertion} ) \
         SELECT {NOW} AS now, (SELECT count(*) FROM moved) AS moved, (SELECT count(*) FROM made) AS jobs, \
             (SELECT pg_notify('{channel}', '')::text WHERE EXISTS (SELECT FROM made))",
        at("$3::int8"),
        at("$4::int8"),
        at("s.slot"),
    )
}
