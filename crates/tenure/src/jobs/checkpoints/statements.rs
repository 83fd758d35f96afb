//! Statements on chunks that are held without a process, and lists of chunks.

use crate::store::pg::clock::NOW;
use crate::store::pg::durable::durable;

/// Renews a claim, and stores the number of rows so far: `$1` the matrix, `$2` the chunk, `$3` the token, `$4` the
/// worker, `$5` the lease, `$6` the number of rows or null.
///
/// As with any renewal, a lease that has ended is not renewed: another worker may hold the chunk at any moment.
pub(super) fn save(table: &str, id: &str) -> String {
    durable(&format!(
        "UPDATE {table} AS t SET locked_until = clock_timestamp() + $5::int8 * interval '1 microsecond', \
             row_count = coalesce($6::int8, t.row_count) \
         WHERE t.matrix_id = $1::text::{id} AND t.chunk_hash = $2 AND t.lease_token = $3 AND t.locked_by = $4 \
             AND t.locked_until > clock_timestamp() RETURNING {NOW} AS now"
    ))
}

/// Lists chunks: `$1` a matrix or null for all, `$2` the limit.
pub(super) fn list(table: &str, id: &str) -> String {
    let time = |column: &str| {
        format!(
            "(extract(epoch FROM CASE WHEN isfinite(t.{column}) THEN t.{column} END) * 1000000)::int8 AS {column}"
        )
    };
    format!(
        "SELECT {NOW} AS now, t.matrix_id::text AS matrix_id, t.chunk_hash, t.row_count::int8 AS row_count, \
             t.locked_by, coalesce(t.lease_token, 0) AS lease_token, {}, {}, \
             coalesce(t.locked_until > clock_timestamp(), false) AS held \
         FROM {table} AS t WHERE $1::text IS NULL OR t.matrix_id = $1::text::{id} \
         ORDER BY t.matrix_id, t.chunk_hash LIMIT $2::int8",
        time("last_synced_at"),
        time("locked_until")
    )
}
