//! Retention: deletes jobs that ended long ago.
//!
//! No index has the times of all ended jobs: it would cost a write per job. Instead the table's key is walked from its
//! beginning, a window of rows per statement. Ids that are numbers grow with time, so the walk ends at the first window of
//! young jobs: it reads the jobs to delete, those that are kept before them, and one window more. A walk of a worker also
//! ends after a number of windows without anything to delete, and the next one continues there. So no run reads the whole
//! of a large table, with any kind of id.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::Queue;
use super::controls::{ControlPlace, QUEUES_TABLE};
use super::db::invalid;
use super::shared::QueueShared;
use crate::store::pg::clock::{NOW, micros};
use crate::store::pg::connect::Parameter;
use crate::{Error, ErrorKind, Result};

/// Maximum number of rows that one statement reads and deletes.
const PRUNE_WINDOW_ROWS: i64 = 2_000;
/// Maximum number of windows without anything to delete in one run of a worker.
const MAX_IDLE_WINDOWS: u32 = 20;
/// Interval between two runs, over all workers of a queue.
pub(super) const PRUNE_INTERVAL: Duration = Duration::from_secs(60);

/// Time for which ended jobs are kept. Without a time, jobs are kept for ever.
///
/// ```
/// use std::time::Duration;
/// use tenure::jobs::Retention;
///
/// let week = Duration::from_secs(7 * 24 * 3600);
/// let retention = Retention::new().completed(week).failed(4 * week);
/// # drop(retention);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "a retention does nothing by itself"]
pub struct Retention {
    completed: Option<Duration>,
    failed: Option<Duration>,
}

impl Retention {
    /// Creates a retention that keeps all jobs.
    pub const fn new() -> Self {
        Self { completed: None, failed: None }
    }

    /// Keeps completed jobs for this time after their completion.
    pub const fn completed(self, keep: Duration) -> Self {
        Self { completed: Some(keep), ..self }
    }

    /// Keeps failed jobs for this time after they failed.
    pub const fn failed(self, keep: Duration) -> Self {
        Self { failed: Some(keep), ..self }
    }

    /// True if jobs are deleted.
    pub(super) const fn is_limited(self) -> bool {
        self.completed.is_some() || self.failed.is_some()
    }
}

/// Result of a walk.
struct Walk {
    removed: u64,
    /// Id after which the next walk begins; `None` for the beginning.
    next: Option<String>,
}

impl QueueShared {
    /// Walks from an id, or from the beginning, over at most `idle_windows` windows without anything to delete.
    async fn walk_ended(
        &self,
        retention: Retention,
        from: Option<String>,
        idle_windows: u32,
    ) -> Result<Walk> {
        let (completed, failed) = (retention.completed.map(micros), retention.failed.map(micros));
        let mut walk = Walk { removed: 0, next: from };
        let mut idle = 0;
        while idle < idle_windows {
            let parameters: [Parameter<'_>; 4] = [
                (&walk.next, Type::TEXT),
                (&PRUNE_WINDOW_ROWS, Type::INT8),
                (&completed, Type::INT8),
                (&failed, Type::INT8),
            ];
            let (rows, _) = self.db.ask(&self.prune_sql, &parameters, self.db.by()).await?;
            let Some(row) = rows.first() else { break };
            let removed = row.get::<_, i64>("removed").unsigned_abs();
            walk.removed += removed;
            idle += u32::from(removed == 0);
            let is_last = row.get::<_, i64>("rows") < PRUNE_WINDOW_ROWS;
            if is_last || self.has_counted_ids && row.get("all_young") {
                walk.next = None;
                break;
            }
            walk.next = row.get("last_row");
        }
        Ok(walk)
    }

    /// Deletes old jobs, unless a worker did within [`PRUNE_INTERVAL`]. Continues where the last run ended.
    pub(super) async fn prune_in_turn(&self, retention: Retention) -> Result<()> {
        let Some(place) = self.control_place().await? else { return Ok(()) };
        let ControlPlace { schema, queue, .. } = &place;
        let pause = micros(PRUNE_INTERVAL);
        let take_turn = format!(
            "INSERT INTO {schema}.{QUEUES_TABLE} AS t (queue, pruned_at) VALUES ($1, clock_timestamp()) \
             ON CONFLICT (queue) DO UPDATE SET pruned_at = EXCLUDED.pruned_at \
                 WHERE t.pruned_at IS NULL OR t.pruned_at <= clock_timestamp() - $2::int8 * interval '1 microsecond' \
                     OR t.pruned_at > clock_timestamp() \
             RETURNING {NOW} AS now, t.prune_after"
        );
        let parameters: [Parameter<'_>; 2] = [(queue, Type::TEXT), (&pause, Type::INT8)];
        let (rows, _) = self.db.ask(&take_turn, &parameters, self.db.by()).await?;
        let Some(row) = rows.first() else { return Ok(()) };
        let walk = self.walk_ended(retention, row.get("prune_after"), MAX_IDLE_WINDOWS).await?;
        let keep_place = format!(
            "UPDATE {schema}.{QUEUES_TABLE} AS t SET prune_after = $2 WHERE t.queue = $1 RETURNING {NOW} AS now"
        );
        let parameters: [Parameter<'_>; 2] = [(queue, Type::TEXT), (&walk.next, Type::TEXT)];
        self.db.ask(&keep_place, &parameters, self.db.by()).await?;
        if walk.removed > 0 {
            tracing::info!(name: "tenure.jobs_pruned", queue = %self.db.table.shown(), jobs = walk.removed);
        }
        Ok(())
    }
}

impl Queue {
    /// Deletes jobs that ended longer ago than the retention keeps them, and returns their number. Walks the whole table
    /// if its ids are no numbers, in statements that read at most 2,000 rows each.
    ///
    /// # Errors
    ///
    /// `Invalid` if the retention keeps all jobs, `Denied` without the right to delete.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves some of the jobs deleted.
    pub async fn prune(&self, retention: Retention) -> Result<u64> {
        if !retention.is_limited() {
            return Err(self.at(invalid(
                "the retention keeps all jobs: give a time for completed or failed jobs",
            )));
        }
        let walk = self.0.walk_ended(retention, None, u32::MAX).await;
        walk.map(|walk| walk.removed).map_err(|error| self.deletion_error(self.at(error)))
    }

    /// Fails if a worker of this queue cannot delete jobs.
    pub(super) async fn check_can_prune(&self) -> Result<()> {
        self.control_place().await?;
        let table = self.0.db.table.quoted();
        let sql = format!(
            "SELECT {NOW} AS now, has_table_privilege(to_regclass($1), 'DELETE') AS allowed"
        );
        let rows = self.request(&sql, &[(&table, Type::TEXT)]).await?;
        if rows.iter().all(|row| row.get("allowed")) {
            return Ok(());
        }
        let message =
            format!("the role may not delete jobs: an owner must GRANT DELETE on {}", self.table());
        Err(self.at(Error::new(ErrorKind::Denied, message)))
    }
}
