//! Summary of a queue, for operators and dashboards.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio_postgres::types::Type;

use super::Queue;
use super::controls::QueuePause;
use super::counters::{JobCounts, MAX_COUNTED};
use super::job::JobRow;
#[cfg(feature = "metrics")]
use super::sweep::SWEEP_TIME_DIVISOR;
use crate::Result;
use crate::store::pg::connect::Parameter;

/// Maximum number of jobs of each kind in a summary.
const MAX_SUMMARY_JOBS: usize = 100;

/// Summary of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueSummary {
    /// Number of jobs by state.
    pub counts: BTreeMap<String, u64>,
    /// Jobs that a worker holds, including those whose lease has expired; in the order in which their leases end.
    pub running: Vec<JobRow>,
    /// Failed jobs, the latest first. Neither listed nor counted in a large table that lacks the index for them, which
    /// `tenure schema` adds.
    pub failed: Vec<JobRow>,
    /// States of which there may be more jobs than `counts` has: in a large table at most 10,000 are counted.
    pub at_least: BTreeSet<String>,
    /// True if the number of completed jobs is an estimate of the server, as in a large table.
    pub completed_is_estimate: bool,
    /// Age of the oldest available job, see [`Queue::oldest_available`].
    pub oldest_available: Option<Duration>,
    /// Pause of the queue, if it is paused.
    pub paused: Option<QueuePause>,
}

impl Queue {
    /// Reads the number of jobs by state, and up to `limit` running and `limit` failed jobs, at most a hundred of each.
    /// The cost does not grow with the table: see [`counts`](Self::counts).
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn summary(&self, limit: usize) -> Result<QueueSummary> {
        let limit = i64::try_from(limit.clamp(1, MAX_SUMMARY_JOBS)).unwrap_or(1);
        let parameters: [Parameter<'_>; 1] = [(&limit, Type::INT8)];
        let counted = i64::try_from(MAX_COUNTED).unwrap_or(i64::MAX);
        let JobCounts { by_state: counts, at_least, completed_is_estimate, finds_failed } =
            self.count().await?;
        let held: [Parameter<'_>; 2] = [(&limit, Type::INT8), (&counted, Type::INT8)];
        let running = self.request(&self.0.sql.running, &held).await?;
        let failed = if finds_failed {
            self.request(&self.0.sql.failures, &parameters).await?
        } else {
            Vec::new()
        };
        let read = |rows: Vec<tokio_postgres::Row>| rows.iter().map(JobRow::read).collect();
        let (running, failed) = (read(running), read(failed));
        let (oldest_available, paused) = (self.oldest_available().await?, self.paused().await?);
        Ok(QueueSummary {
            counts,
            running,
            failed,
            at_least,
            completed_is_estimate,
            oldest_available,
            paused,
        })
    }

    /// Age of the oldest available job, by the database's clock; `None` if no job is available. Reads one entry of the
    /// index per priority, of the hundred highest priorities.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn oldest_available(&self) -> Result<Option<Duration>> {
        let rows = self.request(&self.0.sql.oldest, &[]).await?;
        let age: Option<i64> = rows.first().and_then(|row| row.get("age"));
        // Negative if the job was created by a clock that is ahead of the database's.
        Ok(age.map(|micros| Duration::from_micros(u64::try_from(micros).unwrap_or_default())))
    }

    /// SQL that counts and lists jobs of a large table, for tests of its plans.
    #[doc(hidden)]
    pub fn counting_statements(&self) -> [&str; 3] {
        let sql = &self.0.sql;
        [&sql.bounded_counts, &sql.running, &sql.failures]
    }

    /// Updates the metric `tenure_jobs` until the future is dropped: now, and then at intervals of `every`, or of
    /// twenty times the duration of a count if that is longer. While the server cannot be reached the values are `NaN`:
    /// a stale value would look current.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    #[cfg(feature = "metrics")]
    pub async fn record_counts(&self, every: Duration) {
        let (queue, clock) = (self.table(), &self.0.db.clock);
        loop {
            let begun = clock.now();
            let counts = self.counts().await;
            if let Err(error) = &counts {
                tracing::warn!(name: "tenure.request_failed", %error);
            }
            for state in super::JobState::ALL {
                let number =
                    |counts: &BTreeMap<String, u64>| counts.get(&state.to_string()).copied();
                let number = counts.as_ref().ok().map(|counts| number(counts).unwrap_or(0));
                crate::telemetry::jobs(&queue, state, number);
            }
            let now = clock.now();
            clock.sleep_until(now + every.max(now.since(begun) * SWEEP_TIME_DIVISOR)).await;
        }
    }
}
