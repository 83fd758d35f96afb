//! SQL statements that end a claim, for use in the caller's own transactions.
//!
//! Every write names the job, its token and its worker. If it returns no row, the worker no longer holds the job and
//! nothing was changed. All statements share these parameters: `$1` is the job's id as text, `$2` the token
//! ([`Job::lease_token`](super::Job::lease_token)) as `bigint`, `$3` the worker
//! ([`Queue::worker`](super::Queue::worker)).
//!
//! ```no_run
//! # async fn example(guard: tenure::jobs::JobGuard, db: &mut tokio_postgres::Client)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! let transaction = db.transaction().await?;
//! transaction.execute("UPDATE accounts SET balance = balance + 5 WHERE id = 1", &[]).await?;
//! guard.complete_in(&transaction).await?;      // `Lost` if another worker has the job: roll back
//! transaction.commit().await?;
//! # Ok(()) }
//! ```

mod bulk;
mod counters;
mod enqueue;
#[cfg(feature = "schedules")]
mod fire;
mod listing;
mod oldest;
mod parts;
mod prune;
mod steps;

use tenure_core::jobs::DELAYED_HOLDER;

use super::db::invalid;
use super::optional_columns::OptionalColumns;
use crate::Result;
use crate::store::pg::clock::NOW;
use crate::store::pg::durable::{DURABLE, durable};
use crate::store::pg::incarnation::EPOCH;
use crate::store::pg::job_columns::NAME_TYPES;
use crate::store::pg::table::Table;

pub(super) use bulk::{BulkStatements, ChangeStatements};
#[cfg(feature = "schedules")]
pub(super) use fire::fire;
use parts::{FREE, OPEN, cut, row_columns, state};
pub(super) use parts::{JobTable, RAISED_TOKEN, channel, micros};
pub(super) use prune::prune;

/// The number of attempts after a claim.
const RAISED_ATTEMPTS: &str = "least(greatest(t.attempts, 0), 2147483646) + 1";
/// The number of attempts after a release.
const LOWERED_ATTEMPTS: &str = "greatest(t.attempts, 1) - 1";
/// Condition of a job without attempts left.
const USED_UP: &str = "greatest(t.attempts, 0) >= t.max_attempts";

/// Limits of the times of a position that a claim may resume at. Other times are rounded when they are sent, or out of
/// range.
pub(super) const PLACE_TIMES: [&str; 2] = ["1700-01-01 00:00:00+00", "2200-01-01 00:00:00+00"];

/// All statements for one table, for its type of id. Statements that claim contain the placeholder [`EPOCH`].
#[derive(Debug)]
pub(super) struct JobStatements {
    pub(super) enqueue: String,
    /// For a transaction of the caller, which decides itself how durable its commit is.
    pub(super) enqueue_in: String,
    /// Like `enqueue`, for jobs with values of optional columns.
    pub(super) enqueue_extended: String,
    pub(super) enqueue_extended_in: String,
    pub(super) existing: String,
    pub(super) claim: String,
    pub(super) claim_on: String,
    /// Claims leaving out rows that are set aside: `$4` their ids.
    pub(super) claim_except: String,
    /// Claims one row: `$4` its id.
    pub(super) claim_one: String,
    pub(super) candidates: String,
    pub(super) heartbeat: String,
    /// Also stores progress: `$5` the texts, null for rows whose progress is unchanged.
    pub(super) heartbeat_with_progress: String,
    pub(super) held: String,
    pub(super) complete: String,
    /// For a transaction of the caller, which decides itself how durable its commit is.
    pub(super) complete_in: String,
    /// Stores a result: `$4`.
    pub(super) complete_with: String,
    pub(super) complete_with_in: String,
    pub(super) complete_many: String,
    pub(super) fail: String,
    pub(super) retry: String,
    pub(super) release: String,
    pub(super) sweep: String,
    pub(super) leases_ahead: String,
    pub(super) end_leases_ahead: String,
    pub(super) settled: String,
    pub(super) show: String,
    pub(super) list: String,
    pub(super) size: String,
    /// The same by time of creation, for ids that say nothing about age.
    pub(super) list_by_time: String,
    pub(super) has_time_index: String,
    pub(super) counts: String,
    /// Counts open and failed jobs by index.
    pub(super) bounded_counts: String,
    /// Counts open jobs by index, for a table without the index for failed jobs.
    pub(super) bounded_open: String,
    pub(super) running: String,
    pub(super) failures: String,
    pub(super) oldest: String,
    pub(super) requeue: String,
    pub(super) cancel: String,
    pub(super) remove: String,
    pub(super) notify: String,
    pub(super) unanswered: String,
    pub(super) clean_up: String,
    pub(super) pending: String,
}

impl JobStatements {
    pub(super) fn new(jobs: JobTable<'_>) -> Self {
        let JobTable { table, id, .. } = jobs;
        let channel = channel(table);
        let table = table.quoted();
        let result = format!(", result = $4::text::{}", jobs.optional.result.unwrap_or("jsonb"));
        let not_aside = format!("AND t.id <> ALL ($4::text[]::{id}[]) ");
        Self {
            enqueue: enqueue::enqueue(&jobs, OptionalColumns::default(), &format!(", {DURABLE}")),
            enqueue_in: enqueue::enqueue(&jobs, OptionalColumns::default(), ""),
            enqueue_extended: enqueue::enqueue(&jobs, jobs.optional, &format!(", {DURABLE}")),
            enqueue_extended_in: enqueue::enqueue(&jobs, jobs.optional, ""),
            existing: format!(
                "SELECT {NOW} AS now, t.id::text AS id, t.unique_key FROM {table} AS t \
                 WHERE t.unique_key = ANY ($1::text[]) AND {OPEN}"
            ),
            claim: claim(&jobs, ""),
            claim_on: claim(
                &jobs,
                &format!(
                    "AND {} = $4 AND (t.created_at, t.id) >= \
                     ('epoch'::timestamptz + $5 * interval '1 microsecond', $6::text::{id}) ",
                    jobs.priority()
                ),
            ),
            claim_except: claim(&jobs, &not_aside),
            claim_one: claim(&jobs, &format!("AND t.id = $4::text::{id} ")),
            candidates: format!(
                "SELECT {NOW} AS now, t.id::text AS id FROM {table} AS t WHERE {FREE} \
                     AND t.id <> ALL ($2::text[]::{id}[]) ORDER BY {} LIMIT $1::int8",
                jobs.order()
            ),
            heartbeat: heartbeat(&table, id, "", ""),
            heartbeat_with_progress: heartbeat(
                &table,
                id,
                ", $5::text[]",
                ", progress = coalesce(a.progress, t.progress)",
            ),
            held: held(&table, id),
            complete: durable(&completing(&table, id, "")),
            complete_in: completing(&table, id, ""),
            complete_with: durable(&completing(&table, id, &result)),
            complete_with_in: completing(&table, id, &result),
            complete_many: durable(&complete_many(&table, id)),
            fail: durable(&failing(&table, id, jobs.error_chars)),
            retry: durable(&retrying(&table, id, jobs.error_chars)),
            release: durable(&releasing(&table, id)),
            sweep: sweep(&table, &channel, jobs.error_chars),
            leases_ahead: steps::leases_ahead(&table),
            end_leases_ahead: durable(&steps::end_leases_ahead(&table, id)),
            settled: format!(
                "SELECT {NOW} AS now, t.completed_at IS NOT NULL AS completed, t.failed_at IS NOT NULL AS failed, t.locked_by \
                 FROM {table} AS t WHERE t.id = $1::text::{id} AND t.lease_token = $2"
            ),
            show: format!(
                "SELECT {} FROM {table} AS t WHERE t.id = $1::text::{id}",
                row_columns(&jobs)
            ),
            list: listing::by_id(&jobs),
            list_by_time: listing::by_time(&jobs),
            has_time_index: listing::has_time_index(&jobs),
            size: counters::size(&jobs),
            counts: counters::exact(&jobs),
            bounded_counts: counters::bounded(&jobs, true),
            bounded_open: counters::bounded(&jobs, false),
            running: running(&jobs),
            failures: failures(&jobs),
            oldest: oldest::statement(&jobs),
            requeue: requeue(&table, id, &channel),
            cancel: durable(&cancel(&table, id, jobs.error_chars)),
            remove: format!(
                "DELETE FROM {table} AS t WHERE t.id = $1::text::{id} \
                 AND NOT ({OPEN} AND coalesce(t.locked_by <> '{DELAYED_HOLDER}' AND t.locked_until > clock_timestamp(), false)) \
                 RETURNING {NOW} AS now, {DURABLE}"
            ),
            unanswered: format!(
                "SELECT {NOW} AS now, t.id::text AS id, coalesce(t.lease_token, 0) AS lease_token \
                 FROM {table} AS t WHERE {OPEN} AND t.locked_by = $1 AND t.id::text <> ALL ($2::text[])"
            ),
            clean_up: clean_up(&table, id),
            pending: format!(
                "SELECT {NOW} AS now, EXISTS (SELECT FROM {table} AS t WHERE {OPEN} AND t.locked_by IS NULL \
                         AND t.id <> ALL ($1::text[]::{id}[])) \
                     OR EXISTS (SELECT FROM {table} AS t WHERE {OPEN} AND t.locked_by = '{DELAYED_HOLDER}' AND t.attempts > 0) \
                     AS pending"
            ),
            notify: format!("SELECT {NOW} AS now, pg_notify('{channel}', $1)"),
        }
    }
}

/// Condition of a job that this worker holds. A late update is accepted as long as no other worker has claimed the job:
/// the token in the row is then still ours.
fn held_by_us(id: &str) -> String {
    format!(
        "t.id = $1::text::{id} AND t.lease_token = $2 AND (t.locked_by = $3 OR t.locked_by IS NULL) AND {OPEN}"
    )
}

/// SQL that completes a job of this table, whose ids have this type (`bigint`, `uuid`, `text`, …).
///
/// # Errors
///
/// `Invalid` if the table's name is invalid or the type is not supported.
pub fn complete(table: &str, id: &str) -> Result<String> {
    checked(table, id).map(|table| completing(&table, id, ""))
}

/// SQL that marks a job as failed for good; `$4` is the reason.
///
/// # Errors
///
/// As for [`complete`].
pub fn fail(table: &str, id: &str) -> Result<String> {
    checked(table, id).map(|table| failing(&table, id, None))
}

/// SQL that retries a job: `$4` is the reason, `$5` the delay in microseconds (`bigint`). If the attempts are used up,
/// the job is marked as failed instead; the column `failed` of the answer is then true.
///
/// # Errors
///
/// As for [`complete`].
pub fn retry(table: &str, id: &str) -> Result<String> {
    checked(table, id).map(|table| retrying(&table, id, None))
}

/// SQL that releases a job as if it had not been claimed.
///
/// # Errors
///
/// As for [`complete`].
pub fn release(table: &str, id: &str) -> Result<String> {
    checked(table, id).map(|table| releasing(&table, id))
}

fn checked(table: &str, id: &str) -> Result<String> {
    if !NAME_TYPES.contains(&id) {
        let message = format!("invalid type of an id {id:?}; supported: {}", NAME_TYPES.join(", "));
        return Err(invalid(&message));
    }
    Ok(Table::parse(table, "")?.quoted())
}

fn completing(table: &str, id: &str, result: &str) -> String {
    let ours = held_by_us(id);
    format!(
        "UPDATE {table} AS t SET completed_at = clock_timestamp(), error_message = NULL, locked_until = NULL, \
             locked_by = NULL{result} \
         WHERE {ours} RETURNING {NOW} AS now"
    )
}

/// Completes many jobs: `$1` ids, `$2` tokens, `$3` the worker. Returns the ids of the completed jobs.
fn complete_many(table: &str, id: &str) -> String {
    format!(
        "UPDATE {table} AS t SET completed_at = clock_timestamp(), error_message = NULL, locked_until = NULL, \
             locked_by = NULL \
         FROM unnest($1::text[]::{id}[], $2::int8[]) AS a (id, token) \
         WHERE t.id = a.id AND t.lease_token = a.token AND (t.locked_by = $3 OR t.locked_by IS NULL) AND {OPEN} \
         RETURNING {NOW} AS now, t.id::text AS id"
    )
}

fn failing(table: &str, id: &str, error_chars: Option<i32>) -> String {
    let (ours, why) = (held_by_us(id), cut("$4", error_chars));
    format!(
        "UPDATE {table} AS t SET failed_at = clock_timestamp(), error_message = {why}, locked_until = NULL, \
             locked_by = NULL \
         WHERE {ours} RETURNING {NOW} AS now"
    )
}

fn retrying(table: &str, id: &str, error_chars: Option<i32>) -> String {
    let (ours, why) = (held_by_us(id), cut("$4", error_chars));
    let over = USED_UP;
    format!(
        "UPDATE {table} AS t SET error_message = {why}, \
             failed_at = CASE WHEN {over} THEN clock_timestamp() END, \
             locked_until = CASE WHEN {over} OR $5::int8 <= 0 THEN NULL \
                            ELSE clock_timestamp() + $5::int8 * interval '1 microsecond' END, \
             locked_by = CASE WHEN {over} OR $5::int8 <= 0 THEN NULL ELSE '{DELAYED_HOLDER}' END \
         WHERE {ours} RETURNING {NOW} AS now, t.failed_at IS NOT NULL AS failed"
    )
}

fn releasing(table: &str, id: &str) -> String {
    let ours = held_by_us(id);
    format!(
        "UPDATE {table} AS t SET locked_until = NULL, locked_by = NULL, attempts = {LOWERED_ATTEMPTS} \
         WHERE {ours} RETURNING {NOW} AS now"
    )
}

/// Releases jobs that a claim without an answer has locked: `$1` ids, `$2` tokens, `$3` the worker.
///
/// The tokens matter: this statement may itself get no answer, and be executed after a later claim of the same worker.
/// Without them it would release the job of that claim, which the worker is working on.
fn clean_up(table: &str, id: &str) -> String {
    format!(
        "UPDATE {table} AS t SET locked_until = NULL, locked_by = NULL, attempts = {LOWERED_ATTEMPTS} \
         FROM unnest($1::text[]::{id}[], $2::int8[]) AS a (id, token) \
         WHERE t.id = a.id AND t.lease_token = a.token AND t.locked_by = $3 AND {OPEN} RETURNING {NOW} AS now"
    )
}

/// Claims jobs: `$1` the worker, `$2` the lease in microseconds, `$3` the limit, `$4` to `$6` the position to start
/// from, if not the top.
///
/// An `ARRAY` of a subquery runs once. With a join, PostgreSQL could run the subquery again for every row, and apply
/// the limit anew each time. The array also keeps the plan at one fetch per row: the planner expects ten rows from it,
/// whatever the limit.
///
/// A `ctid` is unique within one table only. In partitions, and in tables that inherit from this one, other rows have
/// the same `ctid`, completed rows among them. So a row is identified by its table as well.
fn claim(jobs: &JobTable<'_>, from: &str) -> String {
    let (table, order) = (jobs.table.quoted(), jobs.order());
    let meta = jobs.optional.text("meta");
    let [first, last] = PLACE_TIMES;
    format!(
        "UPDATE {table} AS t SET locked_until = clock_timestamp() + $2::int8 * interval '1 microsecond', \
             locked_by = $1, lease_token = {RAISED_TOKEN}, attempts = {RAISED_ATTEMPTS} \
         FROM unnest(ARRAY( \
             SELECT ROW(t.tableoid, t.ctid) FROM {table} AS t \
             WHERE {FREE} {from}\
             ORDER BY {order} \
             FOR UPDATE SKIP LOCKED LIMIT $3::int8)) AS f (part oid, place tid) \
         WHERE t.ctid = f.place AND t.tableoid = f.part \
         RETURNING {NOW} AS now, t.id::text AS id, t.lease_token, t.attempts, t.max_attempts, \
             coalesce(t.priority, 0)::int8 AS priority, \
             (extract(epoch FROM greatest(least(coalesce(t.created_at, 'infinity'), '{last}'), '{first}')) \
                 * 1000000)::int8 AS created_at, \
             t.created_at > '{first}' AND t.created_at < '{last}' AS can_resume, \
             t.payload::text AS payload, {meta} AS meta, {EPOCH} AS epoch, {DURABLE}"
    )
}

/// Renews leases: `$1` ids, `$2` tokens, `$3` the worker, `$4` the lease. Rows that another transaction has locked are
/// skipped, and reported as skipped: one locked row must not delay the renewal of all the others. Of a row that refuses
/// the renewal, the answer has the columns that say why. `arrays` has further values of each row, and `changes` what they
/// change.
fn heartbeat(table: &str, id: &str, arrays: &str, changes: &str) -> String {
    let progress = if arrays.is_empty() { "" } else { "progress, " };
    format!(
        "WITH asked AS ( \
             SELECT * FROM unnest($1::text[]::{id}[], $2::int8[]{arrays}) WITH ORDINALITY AS a (id, token, {progress}nth) \
         ), locked AS ( \
             SELECT t.id FROM {table} AS t JOIN asked AS a ON t.id = a.id \
             WHERE t.lease_token = a.token AND t.locked_by = $3 FOR UPDATE OF t SKIP LOCKED \
         ), renewed AS ( \
             UPDATE {table} AS t SET locked_until = clock_timestamp() + $4::int8 * interval '1 microsecond'{changes} \
             FROM asked AS a JOIN locked AS k ON k.id = a.id \
             WHERE t.id = a.id AND t.lease_token = a.token AND t.locked_by = $3 AND {OPEN} \
                 AND t.locked_until > clock_timestamp() \
             RETURNING a.nth, {DURABLE} \
         ) \
         SELECT {NOW} AS now, a.nth, r.nth IS NOT NULL AS renewed, \
                r.nth IS NULL AND k.id IS NULL AND coalesce(t.lease_token = a.token AND t.locked_by = $3 AND {OPEN}, false) \
                    AS passed_over, \
                t.completed_at IS NOT NULL AS completed, t.failed_at IS NOT NULL AS failed, \
                coalesce(t.lease_token = a.token, false) AS same_token \
         FROM asked AS a LEFT JOIN renewed AS r ON r.nth = a.nth LEFT JOIN locked AS k ON k.id = a.id \
              LEFT JOIN {table} AS t ON t.id = a.id"
    )
}

/// Finds jobs of the request that another worker holds, as a question to another primary: `$1` ids, `$2` the worker.
fn held(table: &str, id: &str) -> String {
    format!(
        "SELECT a.nth FROM unnest($1::text[]::{id}[]) WITH ORDINALITY AS a (id, nth) JOIN {table} AS t ON t.id = a.id \
         WHERE t.locked_until > clock_timestamp() AND t.locked_by NOT IN ($2, '{DELAYED_HOLDER}') AND {OPEN}"
    )
}

/// Sweeps at most `$1` jobs whose lease or delay has ended; `$2` to `$5` are those of [`steps::is_over`]. Returns how many
/// became available, failed, and had a worker, when the next lease ends, and whether a lease ends later than it can last.
fn sweep(table: &str, channel: &str, error_chars: Option<i32>) -> String {
    let why = cut(
        "format('the lease of attempt %s ended: its worker (%s) was killed, frozen or cut off', t.attempts, t.locked_by)",
        error_chars,
    );
    let over = format!("{USED_UP} AND t.locked_by <> '{DELAYED_HOLDER}'");
    let (ended, ahead) = (steps::is_over(), steps::is_ahead());
    format!(
        "WITH ended AS ( \
             SELECT t.tableoid AS part, t.ctid AS place, t.locked_by <> '{DELAYED_HOLDER}' AS had FROM {table} AS t \
             WHERE {OPEN} AND t.locked_by IS NOT NULL AND {ended} \
             FOR UPDATE SKIP LOCKED LIMIT $1::int8 \
         ), swept AS ( \
             UPDATE {table} AS t SET locked_until = NULL, locked_by = NULL, \
                 failed_at = CASE WHEN {over} THEN clock_timestamp() END, \
                 error_message = CASE WHEN {over} THEN {why} ELSE t.error_message END \
             FROM unnest(ARRAY(SELECT ROW(e.part, e.place, e.had) FROM ended AS e)) AS e (part oid, place tid, had bool) \
             WHERE t.ctid = e.place AND t.tableoid = e.part \
             RETURNING e.had, t.failed_at IS NOT NULL AS failed \
         ), told AS ( \
             SELECT count(*) FILTER (WHERE NOT s.failed) AS freed, count(*) FILTER (WHERE s.failed) AS failed, \
                 count(*) FILTER (WHERE s.had) AS had \
             FROM swept AS s \
         ) \
         SELECT {NOW} AS now, s.freed, s.failed, s.had, \
             n.next_end, n.has_leases_ahead, \
             CASE WHEN s.freed > 0 THEN pg_notify('{channel}', '')::text END \
         FROM told AS s, \
             (SELECT {} AS next_end, coalesce(t.is_ahead, false) AS has_leases_ahead \
              FROM (SELECT min(t.locked_until) AS locked_until, bool_or({ahead}) AS is_ahead FROM {table} AS t \
                    WHERE {OPEN} AND t.locked_by IS NOT NULL AND t.locked_until > clock_timestamp()) AS t) AS n",
        micros("locked_until")
    )
}

/// Lists at most `$1` jobs that a worker holds, or held until the lease expired, of the first `$2` held jobs.
fn running(jobs: &JobTable<'_>) -> String {
    let (shown, state, table) = (row_columns(jobs), state(), jobs.table.quoted());
    format!(
        "SELECT {shown} FROM (SELECT * FROM {table} AS t WHERE {OPEN} AND t.locked_by IS NOT NULL \
             ORDER BY t.id LIMIT $2::int8) AS t \
         WHERE {state} IN ('RUNNING', 'EXPIRED') ORDER BY t.locked_until, t.id LIMIT $1::int8"
    )
}

/// Lists the latest failed jobs, at most `$1`.
fn failures(jobs: &JobTable<'_>) -> String {
    let (shown, table) = (row_columns(jobs), jobs.table.quoted());
    format!(
        "SELECT {shown} FROM {table} AS t WHERE {} ORDER BY t.failed_at DESC, t.id DESC LIMIT $1::int8",
        counters::FAILED
    )
}

/// Makes a failed or delayed job available at once, with all its attempts. So it does a job whose lease ends later than
/// it can last.
fn requeue(table: &str, id: &str, channel: &str) -> String {
    format!(
        "WITH freed AS ( \
             UPDATE {table} AS t SET failed_at = NULL, attempts = 0, locked_until = NULL, locked_by = NULL \
             WHERE t.id = $1::text::{id} AND t.completed_at IS NULL \
                 AND (t.failed_at IS NOT NULL OR t.locked_by = '{DELAYED_HOLDER}' OR {}) \
             RETURNING t.id, {DURABLE} \
         ) \
         SELECT {NOW} AS now, pg_notify('{channel}', '')::text FROM freed",
        steps::is_ahead()
    )
}

/// Marks an open job as failed; `$2` is the reason. The token is raised, so updates of a worker that runs it are
/// refused.
fn cancel(table: &str, id: &str, error_chars: Option<i32>) -> String {
    let why = cut("$2", error_chars);
    format!(
        "UPDATE {table} AS t SET failed_at = clock_timestamp(), error_message = {why}, locked_until = NULL, \
             locked_by = NULL, lease_token = {RAISED_TOKEN} \
         WHERE t.id = $1::text::{id} AND {OPEN} RETURNING {NOW} AS now"
    )
}
