//! Sweeping: makes jobs available again whose lease or delay has ended.

use std::time::Duration;

use tenure_core::Time;
use tenure_core::jobs::LeaseAhead;
use tokio_postgres::types::Type;

use super::shared::QueueShared;
use crate::store::pg::clock::{Reading, micros};
use crate::store::pg::connect::Parameter;
use crate::{Result, telemetry};

/// Sweeping, and counting, may take at most one part in this many of the time.
pub(super) const SWEEP_TIME_DIVISOR: u32 = 20;
/// Maximum number of rows per statement of a sweep.
const MAX_SWEEP_ROWS: i64 = 1_000;

/// Result of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// Jobs that became available.
    pub freed: u64,
    /// Jobs that were marked as failed because their attempts were used up.
    pub failed: u64,
    /// Jobs, of both kinds, whose worker lost them when the lease ended. The rest were delayed jobs.
    pub reclaimed: u64,
}

impl QueueShared {
    /// Time at which the next sweep is due.
    pub(super) fn next_sweep(&self) -> Time {
        self.state().next_sweep
    }

    pub(super) fn sweep_is_due(&self) -> bool {
        let now = self.db.clock.now();
        let mut state = self.state();
        let due = now >= state.next_sweep;
        if due {
            state.next_sweep = now + self.db.options.sweep_every;
        }
        due
    }

    pub(super) async fn sweep(&self) -> Result<Swept> {
        let mut all = Swept::default();
        let lease = micros(self.db.lease.ttl());
        loop {
            let (now, by) = (self.db.clock.now(), self.db.by());
            let window = self.db.db_clock.window(now, by.since(now));
            let parameters: [Parameter<'_>; 5] = [
                (&MAX_SWEEP_ROWS, Type::INT8),
                (&window.expected, Type::INT8),
                (&window.steady, Type::INT8),
                (&window.ahead, Type::INT8),
                (&lease, Type::INT8),
            ];
            let (rows, reading) = self.db.ask(&self.sql.sweep, &parameters, by).await?;
            let Some(row) = rows.first() else { return Ok(all) };
            let count = |column: &str| row.get::<_, i64>(column).unsigned_abs();
            let (freed, failed, reclaimed) = (count("freed"), count("failed"), count("had"));
            all.freed += freed;
            all.failed += failed;
            all.reclaimed += reclaimed;
            if reclaimed > 0 {
                telemetry::job_reclaimed(&self.db.table.shown(), reclaimed);
            }
            if freed > 0 {
                self.restart_scan();
            }
            if freed + failed < MAX_SWEEP_ROWS.unsigned_abs() {
                self.sweep_next(row.get("next_end"), reading);
                if row.get("has_leases_ahead") {
                    self.end_leases_ahead().await?;
                } else {
                    self.state().leases_ahead.clear();
                }
                return Ok(all);
            }
        }
    }

    /// Ends leases that end later than they can last, once their workers have certainly lost them. The next sweep makes
    /// their jobs available.
    async fn end_leases_ahead(&self) -> Result<()> {
        let parameters: [Parameter<'_>; 1] = [(&MAX_SWEEP_ROWS, Type::INT8)];
        let (rows, reading) =
            self.db.ask(&self.sql.leases_ahead, &parameters, self.db.by()).await?;
        let read = |row: &tokio_postgres::Row| {
            let (id, worker) = (row.try_get("id").ok()?, row.try_get("locked_by").ok()?);
            let (token, until) = (row.get("lease_token"), row.get("locked_until"));
            Some(LeaseAhead { id, token, until, worker })
        };
        let rows: Vec<LeaseAhead> = rows.iter().filter_map(read).collect();
        let over = self.state().leases_ahead.observe(rows, reading.sent, reading.replied);
        if over.is_empty() {
            return Ok(());
        }
        let ids: Vec<&str> = over.iter().map(|row| row.id.as_str()).collect();
        let tokens: Vec<i64> = over.iter().map(|row| row.token).collect();
        let workers: Vec<&str> = over.iter().map(|row| row.worker.as_str()).collect();
        let ends: Vec<i64> = over.iter().map(|row| row.until).collect();
        let parameters: [Parameter<'_>; 4] = [
            (&ids, Type::TEXT_ARRAY),
            (&tokens, Type::INT8_ARRAY),
            (&workers, Type::TEXT_ARRAY),
            (&ends, Type::INT8_ARRAY),
        ];
        let (ended, _) = self.db.ask(&self.sql.end_leases_ahead, &parameters, self.db.by()).await?;
        tracing::warn!(name: "tenure.leases_ahead_ended", store = %self.db, jobs = ended.len());
        // At once: the rows are available after it.
        self.state().next_sweep = Time::ZERO;
        Ok(())
    }

    /// Schedules the next sweep: when the next lease ends, after `sweep_every` at the latest, and no more often than
    /// [`SWEEP_TIME_DIVISOR`] allows.
    fn sweep_next(&self, next_end: Option<i64>, reading: Reading) {
        let usual = self.db.options.sweep_every;
        let left = next_end.map(|end| {
            let left = u64::try_from(end.saturating_sub(reading.db)).unwrap_or_default();
            // One millisecond after the end, so that the sweep does not come just too early.
            Duration::from_micros(left) + Duration::from_millis(1)
        });
        let trip = reading.replied.since(reading.sent);
        let pause = left.map_or(usual, |left| left.min(usual)).max(trip * SWEEP_TIME_DIVISOR);
        self.state().next_sweep = reading.replied + pause;
    }
}
