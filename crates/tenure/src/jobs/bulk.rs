//! Changes of many jobs at once, by state, age and key.
//!
//! The jobs are found by walking the table's key from its beginning, a window of rows per statement. So a statement locks
//! and changes a bounded number of rows, whatever the size of the table, and needs no index of its own.

use std::time::Duration;

use tenure_core::jobs::{DELAYED_HOLDER, JobState};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::Queue;
use super::sql::{JobTable, RAISED_TOKEN, channel, cut, state};
use crate::store::pg::clock::{NOW, micros};
use crate::store::pg::connect::Parameter;
use crate::store::pg::durable::DURABLE;
use crate::store::pg::failure;
use crate::{Error, Result};

/// Maximum number of rows that one statement reads.
const WINDOW_ROWS: i64 = 5_000;
/// Maximum number of jobs that one statement changes.
const MAX_CHANGED_JOBS: i64 = 1_000;
/// Maximum number of tries of a statement that meets a new job of the same unique key, or a deadlock.
const MAX_WINDOW_TRIES: usize = 5;
/// SQLSTATEs of these: `unique_violation` and `deadlock_detected`. The statement has changed nothing.
const COLLISIONS: [&str; 2] = ["23505", "40P01"];

/// Selection of jobs. An empty filter selects every job.
///
/// ```
/// use std::time::Duration;
/// use tenure::jobs::{JobFilter, JobState};
///
/// let filter = JobFilter::new().state(JobState::Failed).older_than(Duration::from_secs(3600)).key("report *");
/// # drop(filter);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a filter does nothing by itself"]
pub struct JobFilter {
    state: Option<JobState>,
    older_than: Option<Duration>,
    key: Option<String>,
    limit: Option<u64>,
}

impl JobFilter {
    /// Creates a filter that selects every job.
    pub fn new() -> Self {
        Self::default()
    }

    /// Selects only jobs in this state.
    pub fn state(self, state: JobState) -> Self {
        Self { state: Some(state), ..self }
    }

    /// Selects only jobs that were completed or failed longer ago than this, or if they are open, created longer ago.
    pub fn older_than(self, age: Duration) -> Self {
        Self { older_than: Some(age), ..self }
    }

    /// Selects only jobs whose unique key matches this pattern; `*` stands for any characters.
    pub fn key(self, pattern: impl Into<String>) -> Self {
        Self { key: Some(pattern.into()), ..self }
    }

    /// Selects at most this many jobs: those with the lowest ids.
    pub fn limit(self, jobs: u64) -> Self {
        Self { limit: Some(jobs), ..self }
    }

    /// Pattern of the key for `LIKE`.
    fn like(&self) -> Option<String> {
        let escaped = self.key.as_ref()?.chars().fold(String::new(), |mut pattern, c| {
            match c {
                '*' => pattern.push('%'),
                '%' | '_' | '\\' => pattern.extend(['\\', c]),
                c => pattern.push(c),
            }
            pattern
        });
        Some(escaped)
    }
}

/// Change of many jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobChange<'a> {
    /// Makes failed and delayed jobs available at once, with all their attempts, as [`Queue::requeue`] does.
    Requeue,
    /// Marks open jobs as failed for this reason, as [`Queue::cancel`] does.
    Cancel(&'a str),
    /// Deletes jobs that are not running, as [`Queue::remove`] does.
    Remove,
}

/// Number of jobs that a change concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobsChanged {
    /// Changed jobs.
    pub changed: u64,
    /// Failed jobs that were not requeued because another job of their unique key is open, or was requeued.
    pub duplicates: u64,
}

/// Statements of the changes. All have these parameters: `$1` the id after which the window begins or null, `$2` the
/// number of rows to read, `$3` a state or null, `$4` the age in microseconds or null, `$5` a pattern or null, `$6` the
/// maximum number of jobs, `$7` the reason.
#[derive(Debug)]
pub(super) struct BulkStatements {
    requeue: ChangeStatements,
    cancel: ChangeStatements,
    remove: ChangeStatements,
}

#[derive(Debug)]
struct ChangeStatements {
    change: String,
    count: String,
}

impl BulkStatements {
    pub(super) fn new(jobs: &JobTable<'_>) -> Self {
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

    fn of(&self, change: JobChange<'_>) -> &ChangeStatements {
        match change {
            JobChange::Requeue => &self.requeue,
            JobChange::Cancel(_) => &self.cancel,
            JobChange::Remove => &self.remove,
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

impl Queue {
    /// Changes all jobs that the filter selects and whose state allows the change, and returns their number. Other jobs
    /// are left as they are. Each statement reads at most 5,000 rows and changes at most 1,000: a part of the jobs may be
    /// changed when an error ends the walk.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached, `Denied` without the right to delete; the jobs of earlier
    /// statements are changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves some of the jobs changed.
    pub async fn change_many(
        &self,
        filter: &JobFilter,
        change: JobChange<'_>,
    ) -> Result<JobsChanged> {
        let sql = &self.0.bulk_sql.of(change).change;
        let changed = self.walk(sql, filter, change).await;
        changed.map_err(|error| match change {
            JobChange::Remove => self.deletion_error(error),
            _ => error,
        })
    }

    /// Number of jobs that [`change_many`](Self::change_many) would change at present. Reads every row of the table,
    /// unless the filter's limit is reached.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn count_many(
        &self,
        filter: &JobFilter,
        change: JobChange<'_>,
    ) -> Result<JobsChanged> {
        self.walk(&self.0.bulk_sql.of(change).count, filter, change).await
    }

    async fn walk(
        &self,
        sql: &str,
        filter: &JobFilter,
        change: JobChange<'_>,
    ) -> Result<JobsChanged> {
        let mut total = JobsChanged::default();
        let mut after: Option<String> = None;
        let mut left = filter.limit.unwrap_or(u64::MAX);
        while left > 0 {
            let most = i64::try_from(left).unwrap_or(i64::MAX).min(MAX_CHANGED_JOBS);
            let row = self.change_window(sql, filter, change, after.as_deref(), most).await?;
            let Some(row) = row else { break };
            let count = |column: &str| row.get::<_, i64>(column);
            let (rows, wanted) = (count("rows"), count("wanted"));
            total.changed += count("changed").unsigned_abs();
            total.duplicates += count("duplicates").unsigned_abs();
            left = left.saturating_sub(wanted.unsigned_abs());
            // A statement that reached its maximum may have left jobs of its window: the next one begins after the last
            // job that this one found.
            let is_full = wanted == most;
            if rows < WINDOW_ROWS && !is_full {
                break;
            }
            after = row.get(if is_full { "last_wanted" } else { "last_row" });
        }
        if matches!(change, JobChange::Requeue) && total.changed > 0 {
            self.0.restart_scan();
        }
        Ok(total)
    }

    async fn change_window(
        &self,
        sql: &str,
        filter: &JobFilter,
        change: JobChange<'_>,
        after: Option<&str>,
        most: i64,
    ) -> Result<Option<Row>> {
        let (state, age, key) = (
            filter.state.map(|state| state.to_string()),
            filter.older_than.map(micros),
            filter.like(),
        );
        let (why, notify) = match change {
            JobChange::Cancel(why) => (why, false),
            JobChange::Requeue => ("", true),
            JobChange::Remove => ("", false),
        };
        let parameters: [Parameter<'_>; 8] = [
            (&after, Type::TEXT),
            (&WINDOW_ROWS, Type::INT8),
            (&state, Type::TEXT),
            (&age, Type::INT8),
            (&key, Type::TEXT),
            (&most, Type::INT8),
            (&why, Type::TEXT),
            (&notify, Type::BOOL),
        ];
        let mut tries = 1;
        loop {
            match self.request(sql, &parameters).await {
                Err(error) if is_collision(&error) && tries < MAX_WINDOW_TRIES => tries += 1,
                answer => return answer.map(|rows| rows.into_iter().next()),
            }
        }
    }
}

fn is_collision(error: &Error) -> bool {
    failure::code(error).is_some_and(|code| COLLISIONS.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_asterisks_of_a_pattern_stand_for_other_characters() {
        let like = |pattern: &str| JobFilter::new().key(pattern).like().unwrap();
        assert_eq!(like("report *"), "report %");
        assert_eq!(like(r"100%_\*"), r"100\%\_\\%");
        assert_eq!(JobFilter::new().like(), None);
    }
}
