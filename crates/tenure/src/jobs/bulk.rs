//! Changes of many jobs at once, by state, age and key.
//!
//! The jobs are found by walking the table's key from its beginning, a window of rows per statement. So a statement locks
//! and changes a bounded number of rows, whatever the size of the table, and needs no index of its own.

use std::time::Duration;

use tenure_core::jobs::JobState;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::Queue;
use super::sql::{BulkStatements, ChangeStatements};
use crate::store::pg::clock::micros;
use crate::store::pg::connect::Parameter;
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

impl JobChange<'_> {
    fn statements(self, sql: &BulkStatements) -> &ChangeStatements {
        match self {
            Self::Requeue => &sql.requeue,
            Self::Cancel(_) => &sql.cancel,
            Self::Remove => &sql.remove,
        }
    }
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
        let sql = &change.statements(&self.0.bulk_sql).change;
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
        self.walk(&change.statements(&self.0.bulk_sql).count, filter, change).await
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
