//! A queue at a glance, for people and for boards.

use std::collections::BTreeMap;

use tokio_postgres::types::Type;

use super::Queue;
use super::job::JobRow;
use crate::Result;
use crate::store::pg::connect::Parameter;

/// The most jobs of a glance, of each kind.
const MAX_SUMMARY_JOBS: usize = 100;

/// What a queue looks like now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueSummary {
    /// How many jobs are in which state.
    pub counts: BTreeMap<String, u64>,
    /// Jobs that somebody has, those first whose leases end first; also those whose leases have ended.
    pub running: Vec<JobRow>,
    /// Jobs that were given up, the last one first.
    pub failed: Vec<JobRow>,
}

impl Queue {
    /// How many jobs are in which state, and up to `most`, at most a hundred, of those that run and those that failed.
    /// Looks at every row.
    ///
    /// # Errors
    ///
    /// `Unavailable` where the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn summary(&self, limit: usize) -> Result<QueueSummary> {
        let most = i64::try_from(limit.clamp(1, MAX_SUMMARY_JOBS)).unwrap_or(1);
        let parameters: [Parameter<'_>; 1] = [(&most, Type::INT8)];
        let counts = self.counts().await?;
        let running = self.request(&self.0.sql.running, &parameters).await?;
        let failed = self.request(&self.0.sql.failures, &parameters).await?;
        let read = |rows: Vec<tokio_postgres::Row>| rows.iter().map(JobRow::read).collect();
        Ok(QueueSummary { counts, running: read(running), failed: read(failed) })
    }

    /// Keeps the metric `tenure_jobs` up to date until the future is dropped: counts now, and again after `every`, or
    /// after twenty times as long as counting took where that is more. While the server cannot be asked the numbers are
    /// `NaN`: an old one would look like a new one.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    #[cfg(feature = "metrics")]
    pub async fn record_counts(&self, every: std::time::Duration) {
        let (queue, clock) = (self.table(), &self.0.db.clock);
        loop {
            let asked = clock.now();
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
            clock
                .sleep_until(now + every.max(now.since(asked) * super::sweep::SWEEP_TIME_DIVISOR))
                .await;
        }
    }
}
