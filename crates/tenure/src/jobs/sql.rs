//! The statements, for use inside transactions of your own.
//!
//! Every write names the job, its token and its worker: 0 rows mean that the job is not ours any more, and nothing was
//! changed. Parameters are the same in all: `$1` the job's id as text, `$2` the token's number
//! ([`Job::lease_token`](super::Job::lease_token)) as `bigint`, `$3` the worker ([`Queue::worker`](super::Queue::worker)).
//!
//! ```no_run
//! # async fn example(guard: tenure::jobs::JobGuard, db: &mut tokio_postgres::Client)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! let transaction = db.transaction().await?;
//! transaction.execute("UPDATE accounts SET balance = balance + 5 WHERE id = 1", &[]).await?;
//! guard.complete_in(&transaction).await?;      // `Lost` where another has the job: then roll back
//! transaction.commit().await?;
//! # Ok(()) }
//! ```

use tenure_core::jobs::DELAYED_HOLDER;

use super::db::invalid;
use super::schema;
use crate::Result;
use crate::store::pg::durable::{DURABLE, durable};
use crate::store::pg::incarnation::EPOCH;
use crate::store::pg::table::Table;

/// The database's clock in microseconds.
pub(super) const NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8";
/// Nobody can claim it any more otherwise.
const OPEN: &str = "t.completed_at IS NULL AND t.failed_at IS NULL";

/// All statements for one table, in which the type of an id is known. Those that claim have [`EPOCH`] in them.
#[derive(Debug)]
pub(super) struct JobStatements {
    pub(super) enqueue: String,
    pub(super) existing: String,
    pub(super) claim: String,
    pub(super) claim_on: String,
    pub(super) heartbeat: String,
    pub(super) complete: String,
    /// For a transaction of the caller's, whose commit is the caller's own.
    pub(super) complete_in: String,
    pub(super) complete_many: String,
    pub(super) fail: String,
    pub(super) retry: String,
    pub(super) release: String,
    pub(super) sweep: String,
    pub(super) settled: String,
    pub(super) show: String,
    pub(super) list: String,
    pub(super) counts: String,
    pub(super) running: String,
    pub(super) failures: String,
    pub(super) requeue: String,
    pub(super) cancel: String,
    pub(super) remove: String,
    pub(super) notify: String,
    pub(super) clean_up: String,
    pub(super) pending: String,
}

impl JobStatements {
    pub(super) fn new(table: &Table, id: &str, payload: &str) -> Self {
        let channel = channel(table);
        let table = table.quoted();
        Self {
            enqueue: enqueue(&table, payload, &channel),
            existing: format!(
                "SELECT {NOW}, t.id::text, t.unique_key FROM {table} AS t \
                 WHERE t.unique_key = ANY ($1::text[]) AND {OPEN}"
            ),
            claim: claim(&table, ""),
            claim_on: claim(
                &table,
                &format!(
                    "AND t.priority = $4 AND (t.created_at, t.id) >= \
                     ('epoch'::timestamptz + $5 * interval '1 microsecond', $6::text::{id}) "
                ),
            ),
            heartbeat: heartbeat(&table, id),
            complete: durable(&completing(&table, id)),
            complete_in: completing(&table, id),
            complete_many: durable(&complete_many(&table, id)),
            fail: durable(&failing(&table, id)),
            retry: durable(&retrying(&table, id)),
            release: durable(&releasing(&table, id)),
            sweep: sweep(&table, &channel),
            settled: format!(
                "SELECT {NOW}, t.completed_at IS NOT NULL, t.failed_at IS NOT NULL, t.locked_by \
                 FROM {table} AS t WHERE t.id = $1::text::{id} AND t.lease_token = $2"
            ),
            show: format!("SELECT {} FROM {table} AS t WHERE t.id = $1::text::{id}", row_columns()),
            list: list(&table, id),
            counts: counts(&table),
            running: running(&table),
            failures: failures(&table),
            requeue: requeue(&table, id, &channel),
            cancel: durable(&cancel(&table, id)),
            remove: format!(
                "DELETE FROM {table} AS t WHERE t.id = $1::text::{id} \
                 AND NOT ({OPEN} AND coalesce(t.locked_by <> '{DELAYED_HOLDER}' AND t.locked_until > clock_timestamp(), false)) \
                 RETURNING {NOW}, {DURABLE}"
            ),
            clean_up: format!(
                "UPDATE {table} AS t SET locked_until = NULL, locked_by = NULL, attempts = greatest(t.attempts - 1, 0) \
                 WHERE {OPEN} AND t.locked_by = $1 AND t.id::text <> ALL ($2::text[]) RETURNING {NOW}"
            ),
            pending: format!(
                "SELECT {NOW}, EXISTS (SELECT FROM {table} AS t WHERE {OPEN} AND t.locked_by IS NULL) \
                     OR EXISTS (SELECT FROM {table} AS t WHERE {OPEN} AND t.locked_by = '{DELAYED_HOLDER}' AND t.attempts > 0)"
            ),
            notify: format!("SELECT {NOW}, pg_notify('{channel}', $1)"),
        }
    }
}

/// Where workers hear of new jobs.
pub(super) fn channel(table: &Table) -> String {
    table.channel()
}

/// Whose it is, while it is: late is accepted as long as nobody else has claimed it.
fn held_by_us(id: &str) -> String {
    format!(
        "t.id = $1::text::{id} AND t.lease_token = $2 AND (t.locked_by = $3 OR t.locked_by IS NULL) AND {OPEN}"
    )
}

/// The statement that completes a job of this table, whose ids are of this type (`bigint`, `uuid`, `text`, …).
///
/// # Errors
///
/// `Invalid` where the table's name or the type is none that is known.
pub fn complete(table: &str, id: &str) -> Result<String> {
    checked(table, id).map(|table| completing(&table, id))
}

/// The statement that gives a job up for good; `$4` is why.
///
/// # Errors
///
/// As [`complete`].
pub fn fail(table: &str, id: &str) -> Result<String> {
    checked(table, id).map(|table| failing(&table, id))
}

/// The statement that lets a job be tried again: `$4` is why, `$5` after how many microseconds (`bigint`). Where its
/// attempts are used up it is given up; the second column of the answer says whether it was.
///
/// # Errors
///
/// As [`complete`].
pub fn retry(table: &str, id: &str) -> Result<String> {
    checked(table, id).map(|table| retrying(&table, id))
}

/// The statement that gives a job back as if it had not been claimed.
///
/// # Errors
///
/// As [`complete`].
pub fn release(table: &str, id: &str) -> Result<String> {
    checked(table, id).map(|table| releasing(&table, id))
}

fn checked(table: &str, id: &str) -> Result<String> {
    if !schema::NAME_TYPES.contains(&id) {
        let message =
            format!("{id:?} is no type of an id: one of {}", schema::NAME_TYPES.join(", "));
        return Err(invalid(&message));
    }
    Ok(Table::parse(table, "")?.quoted())
}

fn completing(table: &str, id: &str) -> String {
    let ours = held_by_us(id);
    format!(
        "UPDATE {table} AS t SET completed_at = clock_timestamp(), error_message = NULL, locked_until = NULL, \
             locked_by = NULL \
         WHERE {ours} RETURNING {NOW}"
    )
}

/// Many at once: `$1` ids, `$2` tokens, `$3` the worker. Those that were.
fn complete_many(table: &str, id: &str) -> String {
    format!(
        "UPDATE {table} AS t SET completed_at = clock_timestamp(), error_message = NULL, locked_until = NULL, \
             locked_by = NULL \
         FROM unnest($1::text[]::{id}[], $2::int8[]) AS a (id, token) \
         WHERE t.id = a.id AND t.lease_token = a.token AND (t.locked_by = $3 OR t.locked_by IS NULL) AND {OPEN} \
         RETURNING {NOW}, t.id::text"
    )
}

fn failing(table: &str, id: &str) -> String {
    let ours = held_by_us(id);
    format!(
        "UPDATE {table} AS t SET failed_at = clock_timestamp(), error_message = $4, locked_until = NULL, \
             locked_by = NULL \
         WHERE {ours} RETURNING {NOW}"
    )
}

fn retrying(table: &str, id: &str) -> String {
    let ours = held_by_us(id);
    let over = "t.attempts >= t.max_attempts";
    format!(
        "UPDATE {table} AS t SET error_message = $4, \
             failed_at = CASE WHEN {over} THEN clock_timestamp() END, \
             locked_until = CASE WHEN {over} OR $5::int8 <= 0 THEN NULL \
                            ELSE clock_timestamp() + $5::int8 * interval '1 microsecond' END, \
             locked_by = CASE WHEN {over} OR $5::int8 <= 0 THEN NULL ELSE '{DELAYED_HOLDER}' END \
         WHERE {ours} RETURNING {NOW}, t.failed_at IS NOT NULL"
    )
}

fn releasing(table: &str, id: &str) -> String {
    let ours = held_by_us(id);
    format!(
        "UPDATE {table} AS t SET locked_until = NULL, locked_by = NULL, attempts = greatest(t.attempts - 1, 0) \
         WHERE {ours} RETURNING {NOW}"
    )
}

/// `$1` payloads, `$2` priorities, `$3` delays, `$4` most attempts, `$5` keys, `$6` whether to tell workers.
fn enqueue(table: &str, payload: &str, channel: &str) -> String {
    format!(
        "WITH asked AS ( \
             SELECT * FROM unnest($1::text[], $2::int4[], $3::int8[], $4::int4[], $5::text[]) \
                 WITH ORDINALITY AS a (payload, priority, delay, most, key, nth) \
         ), made AS ( \
             INSERT INTO {table} AS t (payload, priority, created_at, max_attempts, unique_key, locked_until, locked_by) \
             SELECT a.payload::{payload}, a.priority, clock_timestamp(), a.most, a.key, \
                    CASE WHEN a.delay > 0 THEN clock_timestamp() + a.delay * interval '1 microsecond' END, \
                    CASE WHEN a.delay > 0 THEN '{DELAYED_HOLDER}' END \
             FROM asked AS a ORDER BY a.nth \
             ON CONFLICT (unique_key) \
                 WHERE completed_at IS NULL AND failed_at IS NULL AND unique_key IS NOT NULL DO NOTHING \
             RETURNING t.id, t.unique_key, {DURABLE} \
         ) \
         SELECT {NOW}, m.id::text, m.unique_key, (SELECT pg_notify('{channel}', '')::text WHERE $6) FROM made AS m"
    )
}

/// `$1` the worker, `$2` the lease in microseconds, `$3` how many; `$4` to `$6` where to begin, if not at the top.
///
/// An `ARRAY` of a subquery runs once: with a join the limit could be applied anew for every row. It also keeps the plan to
/// one fetch per row, since ten rows are expected of it whatever the limit.
///
/// A `ctid` alone is a place in *some* table: in partitions, and in tables that inherit from this one, other rows are at the
/// same places, completed ones among them. So a row is named by its table as well.
fn claim(table: &str, from: &str) -> String {
    format!(
        "UPDATE {table} AS t SET locked_until = clock_timestamp() + $2::int8 * interval '1 microsecond', \
             locked_by = $1, lease_token = t.lease_token + 1, attempts = t.attempts + 1 \
         FROM unnest(ARRAY( \
             SELECT ROW(t.tableoid, t.ctid) FROM {table} AS t \
             WHERE {OPEN} AND t.locked_by IS NULL \
                 AND (t.locked_until IS NULL OR t.locked_until <= clock_timestamp()) {from}\
             ORDER BY t.priority DESC, t.created_at, t.id \
             FOR UPDATE SKIP LOCKED LIMIT $3::int8)) AS f (part oid, place tid) \
         WHERE t.ctid = f.place AND t.tableoid = f.part \
         RETURNING {NOW}, t.id::text, t.lease_token, t.attempts, t.max_attempts, t.priority::int8, \
             (extract(epoch FROM t.created_at) * 1000000)::int8, t.payload::text, {EPOCH}, {DURABLE}"
    )
}

/// `$1` ids, `$2` tokens, `$3` the worker, `$4` the lease. A row that somebody else has locked is passed over.
fn heartbeat(table: &str, id: &str) -> String {
    format!(
        "WITH asked AS ( \
             SELECT * FROM unnest($1::text[]::{id}[], $2::int8[]) WITH ORDINALITY AS a (id, token, nth) \
         ), locked AS ( \
             SELECT t.id FROM {table} AS t JOIN asked AS a ON t.id = a.id \
             WHERE t.lease_token = a.token AND t.locked_by = $3 FOR UPDATE OF t SKIP LOCKED \
         ), renewed AS ( \
             UPDATE {table} AS t SET locked_until = clock_timestamp() + $4::int8 * interval '1 microsecond' \
             FROM asked AS a JOIN locked AS k ON k.id = a.id \
             WHERE t.id = a.id AND t.lease_token = a.token AND t.locked_by = $3 AND {OPEN} \
                 AND t.locked_until > clock_timestamp() \
             RETURNING a.nth, {DURABLE} \
         ) \
         SELECT {NOW}, a.nth, r.nth IS NOT NULL, \
                r.nth IS NULL AND k.id IS NULL AND t.id IS NOT NULL \
         FROM asked AS a LEFT JOIN renewed AS r ON r.nth = a.nth LEFT JOIN locked AS k ON k.id = a.id \
              LEFT JOIN {table} AS t ON t.id = a.id AND t.lease_token = a.token AND t.locked_by = $3 AND {OPEN}"
    )
}

/// Gives back what nobody holds any more; `$1` how many at most. How many a worker had, and when the next lease ends.
fn sweep(table: &str, channel: &str) -> String {
    let over = format!("t.attempts >= t.max_attempts AND t.locked_by <> '{DELAYED_HOLDER}'");
    format!(
        "WITH ended AS ( \
             SELECT t.tableoid AS part, t.ctid AS place, t.locked_by <> '{DELAYED_HOLDER}' AS had FROM {table} AS t \
             WHERE {OPEN} AND t.locked_by IS NOT NULL \
                 AND (t.locked_until IS NULL OR t.locked_until <= clock_timestamp()) \
             FOR UPDATE SKIP LOCKED LIMIT $1::int8 \
         ), swept AS ( \
             UPDATE {table} AS t SET locked_until = NULL, locked_by = NULL, \
                 failed_at = CASE WHEN {over} THEN clock_timestamp() END, \
                 error_message = CASE WHEN {over} THEN format('the lease of attempt %s ended: its worker (%s) was killed, \
frozen or cut off', t.attempts, t.locked_by) ELSE t.error_message END \
             FROM unnest(ARRAY(SELECT ROW(e.part, e.place, e.had) FROM ended AS e)) AS e (part oid, place tid, had bool) \
             WHERE t.ctid = e.place AND t.tableoid = e.part \
             RETURNING e.had, t.failed_at IS NOT NULL AS failed \
         ), told AS ( \
             SELECT count(*) FILTER (WHERE NOT s.failed) AS freed, count(*) FILTER (WHERE s.failed) AS failed, \
                 count(*) FILTER (WHERE s.had) AS had \
             FROM swept AS s \
         ) \
         SELECT {NOW}, s.freed, s.failed, s.had, \
             (SELECT (extract(epoch FROM min(t.locked_until)) * 1000000)::int8 FROM {table} AS t \
              WHERE {OPEN} AND t.locked_by IS NOT NULL AND t.locked_until > clock_timestamp() \
                  AND isfinite(t.locked_until)), \
             CASE WHEN s.freed > 0 THEN pg_notify('{channel}', '')::text END \
         FROM told AS s"
    )
}

/// What is shown of a job.
fn row_columns() -> String {
    let time = |column: &str| {
        format!(
            "(extract(epoch FROM CASE WHEN isfinite(t.{column}) THEN t.{column} END) * 1000000)::int8"
        )
    };
    format!(
        "{NOW}, t.id::text, t.priority::int8, {}, {}, {}, t.error_message, {}, t.locked_by, t.payload::text, \
         t.attempts, t.max_attempts, t.lease_token, t.unique_key, t.completed_at IS NOT NULL, t.failed_at IS NOT NULL, \
         t.locked_until IS NOT NULL AND t.locked_until > clock_timestamp()",
        time("created_at"),
        time("completed_at"),
        time("failed_at"),
        time("locked_until")
    )
}

/// What a state means in SQL, by the same rule as [`State::of`](tenure_core::jobs::State::of).
fn state() -> String {
    format!(
        "CASE WHEN t.completed_at IS NOT NULL THEN 'COMPLETED' WHEN t.failed_at IS NOT NULL THEN 'FAILED' \
              WHEN t.locked_until > clock_timestamp() AND t.locked_by = '{DELAYED_HOLDER}' THEN 'DELAYED' \
              WHEN t.locked_until > clock_timestamp() THEN 'RUNNING' \
              WHEN t.locked_until IS NULL OR t.locked_by = '{DELAYED_HOLDER}' THEN 'AVAILABLE' ELSE 'EXPIRED' END"
    )
}

/// `$1` a state or all, `$2` how many, `$3` after which id.
fn list(table: &str, id: &str) -> String {
    let (shown, state) = (row_columns(), state());
    format!(
        "SELECT {shown} FROM {table} AS t \
         WHERE ($1::text IS NULL OR {state} = $1) AND ($3::text IS NULL OR t.id > $3::text::{id}) \
         ORDER BY t.id LIMIT $2::int8"
    )
}

fn counts(table: &str) -> String {
    let state = state();
    format!("SELECT {NOW}, {state}, count(*) FROM {table} AS t GROUP BY 2")
}

/// `$1` how many of those that somebody has or had.
fn running(table: &str) -> String {
    let (shown, state) = (row_columns(), state());
    format!(
        "SELECT {shown} FROM {table} AS t WHERE {OPEN} AND {state} IN ('RUNNING', 'EXPIRED') \
         ORDER BY t.locked_until, t.id LIMIT $1::int8"
    )
}

/// `$1` how many of those that were given up last.
fn failures(table: &str) -> String {
    let (shown, state) = (row_columns(), state());
    format!(
        "SELECT {shown} FROM {table} AS t WHERE {state} = 'FAILED' ORDER BY t.failed_at DESC, t.id DESC LIMIT $1::int8"
    )
}

/// A failed job, or one that waits for its time, can be claimed at once and has all its attempts again.
fn requeue(table: &str, id: &str, channel: &str) -> String {
    format!(
        "WITH freed AS ( \
             UPDATE {table} AS t SET failed_at = NULL, attempts = 0, locked_until = NULL, locked_by = NULL \
             WHERE t.id = $1::text::{id} AND t.completed_at IS NULL \
                 AND (t.failed_at IS NOT NULL OR t.locked_by = '{DELAYED_HOLDER}') \
             RETURNING t.id, {DURABLE} \
         ) \
         SELECT {NOW}, pg_notify('{channel}', '')::text FROM freed"
    )
}

/// Gives up a job that is open; whoever runs it is refused from now on. `$2` why.
fn cancel(table: &str, id: &str) -> String {
    format!(
        "UPDATE {table} AS t SET failed_at = clock_timestamp(), error_message = $2, locked_until = NULL, \
             locked_by = NULL, lease_token = t.lease_token + 1 \
         WHERE t.id = $1::text::{id} AND {OPEN} RETURNING {NOW}"
    )
}
