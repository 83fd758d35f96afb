//! SQL that enqueues jobs.

use std::fmt::Write as _;

use tenure_core::jobs::DELAYED_HOLDER;

use super::parts::{JobTable, channel};
use crate::jobs::optional_columns::OptionalColumns;
use crate::store::pg::clock::NOW;

/// Inserts jobs: `$1` payloads, `$2` priorities, `$3` delays, `$4` maximum attempts, `$5` keys, `$6` true to notify
/// workers, and `$7` groups and `$8` metadata, which are ignored unless `optional` has their columns. The server sends one
/// notification when the transaction commits, however often it enqueues.
pub(super) fn enqueue(jobs: &JobTable<'_>, optional: OptionalColumns, durable: &str) -> String {
    let extras = optional.enqueued();
    let (arrays, names) = match extras[..] {
        [] => ("", ""),
        _ => (", $7::text[], $8::text[]", "group_key, meta, "),
    };
    let (channel, insertion) = (channel(jobs.table), insertion(jobs, &extras, durable));
    format!(
        "WITH asked AS ( \
             SELECT * FROM unnest($1::text[], $2::int4[], $3::int8[], $4::int4[], $5::text[]{arrays}) \
                 WITH ORDINALITY AS a (payload, priority, delay, most, key, {names}nth) \
         ), made AS ( {insertion} ) \
         SELECT {NOW} AS now, m.id::text AS id, m.unique_key, (SELECT pg_notify('{channel}', '')::text WHERE $6) \
         FROM made AS m"
    )
}

/// Inserts the jobs of `asked`: payload, priority, delay, maximum attempts, key and number of each, and `extras`, which
/// are further columns with their types.
pub(in crate::jobs) fn insertion(
    jobs: &JobTable<'_>,
    extras: &[(&str, &str)],
    durable: &str,
) -> String {
    let (table, JobTable { payload, id, .. }) = (jobs.table.quoted(), jobs);
    let (id_column, new_id) = if jobs.makes_ids {
        ("id, ", format!("gen_random_uuid()::text::{id}, "))
    } else {
        ("", String::new())
    };
    let (mut columns, mut values) = (String::new(), String::new());
    for (column, kind) in extras {
        let _ = write!(columns, ", {column}");
        let _ = write!(values, ", a.{column}::{kind}");
    }
    format!(
        "INSERT INTO {table} AS t ({id_column}payload, priority, created_at, max_attempts, unique_key, locked_until, \
             locked_by{columns}) \
         SELECT {new_id}a.payload::{payload}, a.priority, clock_timestamp(), a.most, a.key, \
                CASE WHEN a.delay > 0 THEN clock_timestamp() + a.delay * interval '1 microsecond' END, \
                CASE WHEN a.delay > 0 THEN '{DELAYED_HOLDER}' END{values} \
         FROM asked AS a ORDER BY a.nth \
         ON CONFLICT (unique_key) \
             WHERE completed_at IS NULL AND failed_at IS NULL AND unique_key IS NOT NULL DO NOTHING \
         RETURNING t.id, t.unique_key{durable}"
    )
}
