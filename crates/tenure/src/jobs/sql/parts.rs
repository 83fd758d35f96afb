//! Parts that the statements share: the table, and conditions and expressions of its rows.

use tenure_core::jobs::DELAYED_HOLDER;

use crate::jobs::optional_columns::OptionalColumns;
use crate::store::pg::clock::NOW;
use crate::store::pg::table::Table;

/// Condition of an open job: neither completed nor failed.
pub(super) const OPEN: &str = "t.completed_at IS NULL AND t.failed_at IS NULL";

/// Condition of a job that can be claimed.
pub(super) const FREE: &str = "t.completed_at IS NULL AND t.failed_at IS NULL AND t.locked_by IS NULL \
    AND (t.locked_until IS NULL OR t.locked_until <= clock_timestamp())";

/// The token after a claim. `greatest` reads null and negative numbers as 0. The largest number cannot be raised: such a
/// row is set aside after its claim, and must not fail the claim of other rows.
pub(in crate::jobs) const RAISED_TOKEN: &str =
    "least(greatest(t.lease_token, 0), 9223372036854775806) + 1";

/// A table, and the facts of its columns that statements depend on.
#[derive(Clone, Copy, Debug)]
pub(in crate::jobs) struct JobTable<'a> {
    pub(in crate::jobs) table: &'a Table,
    /// Type of `id`.
    pub(in crate::jobs) id: &'a str,
    /// Type of `payload`.
    pub(in crate::jobs) payload: &'a str,
    /// True if `priority` may be null.
    pub(in crate::jobs) priority_may_be_null: bool,
    /// Maximum number of characters of `error_message`, if there is one.
    pub(in crate::jobs) error_chars: Option<i32>,
    /// True if the database makes no ids, so that statements must.
    pub(in crate::jobs) makes_ids: bool,
    /// Optional columns that the table has.
    pub(in crate::jobs) optional: OptionalColumns,
}

impl JobTable<'_> {
    /// Priority of the row `t`: the expression of the index for claims.
    pub(super) fn priority(&self) -> &'static str {
        if self.priority_may_be_null { "coalesce(t.priority, 0)" } else { "t.priority" }
    }

    /// Order of claims. PostgreSQL sorts null last: a job without a time of creation counts as the youngest.
    pub(super) fn order(&self) -> String {
        format!("{} DESC, t.created_at, t.id", self.priority())
    }
}

/// Notification channel for new jobs.
pub(in crate::jobs) fn channel(table: &Table) -> String {
    table.channel()
}

/// Time of a column in microseconds since 1970. Null if it is infinite, or so far away that no calendar of the clients
/// has it.
pub(in crate::jobs) fn micros(column: &str) -> String {
    format!(
        "(extract(epoch FROM CASE WHEN t.{column} >= '0001-01-01 00:00:00+00' AND t.{column} < '10000-01-01 00:00:00+00' \
             THEN t.{column} END) * 1000000)::int8"
    )
}

/// State of a job in SQL, by the same rule as [`JobState::of`](tenure_core::jobs::JobState::of).
pub(in crate::jobs) fn state() -> String {
    format!(
        "CASE WHEN t.completed_at IS NOT NULL THEN 'COMPLETED' WHEN t.failed_at IS NOT NULL THEN 'FAILED' \
              WHEN t.locked_until > clock_timestamp() AND t.locked_by = '{DELAYED_HOLDER}' THEN 'DELAYED' \
              WHEN t.locked_until > clock_timestamp() THEN 'RUNNING' \
              WHEN t.locked_until IS NULL OR t.locked_by = '{DELAYED_HOLDER}' THEN 'AVAILABLE' ELSE 'EXPIRED' END"
    )
}

/// Columns that show a job.
pub(super) fn row_columns(jobs: &JobTable<'_>) -> String {
    let time = |column: &str| format!("{} AS {column}", micros(column));
    // As bytes: a database with the encoding SQL_ASCII has texts that are no UTF-8, and the server refuses to send those
    // as text. One such row would keep all others from being listed.
    let text = |value: &str| {
        format!(
            "convert_to({value}::text, CASE getdatabaseencoding() WHEN 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END)"
        )
    };
    format!(
        "{NOW} AS now, {} AS id, coalesce(t.priority, 0)::int8 AS priority, {}, {}, {}, {} AS error_message, {}, \
         {} AS locked_by, {} AS payload, coalesce(t.attempts, 0) AS attempts, t.max_attempts, \
         coalesce(t.lease_token, 0) AS lease_token, {} AS unique_key, {} AS group_key, {} AS progress, {} AS result, \
         {} AS meta, \
         t.completed_at IS NOT NULL AS completed, t.failed_at IS NOT NULL AS failed, \
         t.locked_until IS NOT NULL AND t.locked_until > clock_timestamp() AS lock_is_ahead",
        text("t.id"),
        time("created_at"),
        time("completed_at"),
        time("failed_at"),
        text("t.error_message"),
        time("locked_until"),
        text("t.locked_by"),
        text("t.payload"),
        text("t.unique_key"),
        text(jobs.optional.text("group_key")),
        text(jobs.optional.text("progress")),
        text(jobs.optional.text("result")),
        text(jobs.optional.text("meta")),
    )
}

/// A reason, cut to the column that holds it.
pub(super) fn cut(reason: &str, max_chars: Option<i32>) -> String {
    match max_chars {
        Some(limit) => format!("left({reason}, {limit})"),
        None => reason.to_owned(),
    }
}
