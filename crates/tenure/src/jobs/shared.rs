//! State that the clones of a queue, its guards and its tasks share.

#[cfg(feature = "schedules")]
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::Time;
use tenure_core::jobs::{JobOrder, LeasesAhead, RenewalOutcome, refused_renewal, worker_name};
use tokio::sync::{RwLock, oneshot};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::batcher::Batcher;
use super::controls::{Controls, PauseCallbacks};
use super::copy_rows::ImportStatement;
use super::db::JobDb;
use super::heart::{Holds, RowName, Rows, Ticket};
use super::job::Job;
use super::notifications::JobNotifications;
use super::optional_columns::OptionalColumns;
use super::options::Options;
use super::set_aside::RowsSetAside;
use super::sql::{self, BulkStatements, JobStatements, JobTable};
use crate::mutex::Mutex;
use crate::outage::{OutageCallbacks, OutageMonitor};
use crate::store::pg::clock::{Reading, micros};
use crate::store::pg::job_columns::JOBS;
use crate::store::pg::probe::HeldQuestion;
use crate::store::pg::renewer::{RenewalStatement, outcomes_with};
use crate::{Result, telemetry};

/// Maximum number of jobs per claim, and per statement that enqueues.
pub(super) const MAX_BATCH_JOBS: usize = 1_000;

pub(super) struct QueueShared {
    pub(super) db: JobDb,
    pub(super) holds: Arc<Holds>,
    pub(super) sql: JobStatements,
    pub(super) bulk_sql: BulkStatements,
    pub(super) prune_sql: String,
    pub(super) import_sql: ImportStatement,
    #[cfg(feature = "schedules")]
    pub(super) fire_sql: String,
    #[cfg(feature = "schedules")]
    pub(super) unreadable_schedules: Mutex<HashSet<String>>,
    /// True if ids grow with time.
    pub(super) has_counted_ids: bool,
    pub(super) notifications: JobNotifications,
    /// Settings that operators change while the queue runs.
    pub(super) controls: Controls,
    state: Mutex<QueueState>,
    pub(super) claim_batches: Batcher<ClaimRequest>,
    pub(super) completion_batches: Batcher<CompleteRequest>,
    /// Read-locked by claims in flight, write-locked by the cleanup after an unanswered claim. The cleanup must not run
    /// beside a claim: it would release rows that were just claimed and are not yet in `holds`.
    pub(super) claims: RwLock<()>,
    /// A claim got no answer. It may have locked rows in our name that `holds` does not know.
    pub(super) unanswered_claim: AtomicBool,
    /// Rows that claims leave out.
    pub(super) set_aside: RowsSetAside,
    /// Outage of the server, as workers and renewals see it.
    pub(super) outage: OutageMonitor,
    /// Optional columns that the table has.
    pub(super) optional: OptionalColumns,
}

/// A caller that waits for jobs.
pub(super) struct ClaimRequest {
    pub(super) limit: usize,
    pub(super) reply: oneshot::Sender<Result<Vec<ClaimedJob>>>,
}

/// A job that was just claimed. Dropping it releases the job.
pub(super) struct ClaimedJob {
    pub(super) ticket: Ticket,
    pub(super) job: Job,
}

/// A caller that waits for the completion of a job. The reply is true if its worker still held the job.
pub(super) struct CompleteRequest {
    pub(super) id: String,
    pub(super) number: i64,
    pub(super) reply: oneshot::Sender<Result<bool>>,
}

pub(super) struct QueueState {
    /// Position of the last claimed job, and the time until which the next claim may resume there.
    pub(super) resume_from: Option<(JobOrder<String>, Time)>,
    /// Jobs that are held at an older primary, and the time until which claims leave them out.
    pub(super) elsewhere: Option<(Vec<String>, Time)>,
    pub(super) next_sweep: Time,
    /// Rows whose lease ends later than it can last.
    pub(super) leases_ahead: LeasesAhead,
}

impl QueueShared {
    /// Connects to the queue in this table. With `patience`, waits that long for a server that is away.
    pub(super) async fn connect(
        url: &str,
        table: &str,
        options: Options,
        patience: Option<Duration>,
        on_outage: OutageCallbacks,
        set_aside: RowsSetAside,
        on_pause: PauseCallbacks,
    ) -> Result<Arc<Self>> {
        static QUEUES: AtomicU64 = AtomicU64::new(0);
        let mut db = JobDb::new(url, table, options, JOBS)?;
        // The cleanup after an unanswered claim releases the rows of a worker name that `holds` does not know. Two
        // queues of one process therefore need different names, or one would release the jobs of the other.
        let nth = QUEUES.fetch_add(1, Ordering::Relaxed);
        db.worker = worker_name(&db.worker, nth, db.lease.ttl());
        let outage = OutageMonitor::new(db.clock.clone(), db.table.shown(), &db, on_outage);
        let shape = match patience {
            Some(limit) => outage.connect(limit, || db.shape()).await?,
            None => db.shape().await?,
        };
        let shape = shape.clone();
        db.fit_worker(&shape);
        let kind = |column: &str| shape.get(column).map_or("text", |column| &column.kind);
        let optional = OptionalColumns::of(&shape);
        let jobs = JobTable {
            table: &db.table,
            id: kind("id"),
            payload: kind("payload"),
            priority_may_be_null: shape.get("priority").is_some_and(|column| column.may_be_null),
            error_chars: shape.get("error_message").and_then(|column| column.max_chars),
            makes_ids: shape.get("id").is_some_and(|id| {
                !id.has_default && ["uuid", "text", "character varying"].contains(&&*id.kind)
            }),
            optional,
        };
        let (sql, bulk_sql) = (JobStatements::new(jobs), BulkStatements::new(&jobs));
        let import_sql = ImportStatement::new(&jobs, kind("priority"));
        let (has_counted_ids, prune_sql) = (jobs.has_counted_ids(), sql::prune(&jobs));
        #[cfg(feature = "schedules")]
        let fire_sql = sql::fire(&jobs);
        let holds = Holds::new(db.lease, db.clock.clone());
        let shared = Arc::new(Self {
            holds: Arc::clone(&holds),
            sql,
            bulk_sql,
            prune_sql,
            import_sql,
            #[cfg(feature = "schedules")]
            fire_sql,
            #[cfg(feature = "schedules")]
            unreadable_schedules: Mutex::default(),
            has_counted_ids,
            notifications: JobNotifications::default(),
            controls: Controls::new(on_pause, db.clock.now()),
            claim_batches: Batcher::default(),
            completion_batches: Batcher::default(),
            state: Mutex::new(QueueState {
                resume_from: None,
                elsewhere: None,
                next_sweep: Time::ZERO,
                leases_ahead: LeasesAhead::default(),
            }),
            claims: RwLock::new(()),
            unanswered_claim: AtomicBool::new(false),
            set_aside,
            outage,
            optional,
            db,
        });
        // Exported as 0 from the start: a counter that first appears with a value of 1 shows no increase on dashboards.
        telemetry::job_reclaimed(&shared.db.table.shown(), 0);
        let rows: Weak<dyn Rows> = Arc::<Self>::downgrade(&shared);
        holds.keep(rows);
        Ok(shared)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock()
    }

    /// Makes the next claim scan from the top.
    pub(super) fn restart_scan(&self) {
        self.state().resume_from = None;
    }
}

#[async_trait]
impl RenewalStatement for QueueShared {
    type Name = RowName;

    async fn renew(&self, names: &[RowName], by: Time) -> Result<(Reading, Vec<RenewalOutcome>)> {
        let ids: Vec<&str> = names.iter().map(|name| name.id.as_str()).collect();
        let numbers: Vec<i64> = names.iter().map(|name| name.number).collect();
        let ttl = micros(self.db.lease.ttl());
        let mut parameters: Vec<(&(dyn tokio_postgres::types::ToSql + Sync), Type)> = vec![
            (&ids, Type::TEXT_ARRAY),
            (&numbers, Type::INT8_ARRAY),
            (&self.db.worker, Type::TEXT),
            (&ttl, Type::INT8),
        ];
        let progress: Vec<Option<&str>> = names.iter().map(|it| it.progress.as_deref()).collect();
        let sql = if progress.iter().any(Option::is_some) {
            parameters.push((&progress, Type::TEXT_ARRAY));
            &self.sql.heartbeat_with_progress
        } else {
            &self.sql.heartbeat
        };
        let held: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] =
            [(&ids, Type::TEXT_ARRAY), (&self.db.worker, Type::TEXT)];
        let held = HeldQuestion { sql: &self.sql.held, parameters: &held };
        self.outage.sent();
        let read = |rows: &[Row]| {
            outcomes_with(names.len(), rows, |row| {
                refused_renewal(row.get("completed"), row.get("failed"), row.get("same_token"))
            })
        };
        let answer = self.db.renew(sql, &parameters, held, read, by).await;
        self.outage.ended_beside(&answer);
        answer
    }
}

#[async_trait]
impl Rows for QueueShared {
    async fn drop_one(&self, name: RowName) {
        let (none, why) = (0_i64, "the worker dropped it");
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 5] = [
            (&name.id, Type::TEXT),
            (&name.number, Type::INT8),
            (&self.db.worker, Type::TEXT),
            (&why, Type::TEXT),
            (&none, Type::INT8),
        ];
        // If this fails, the job is available again when its lease ends.
        if let Err(error) = self.db.ask(&self.sql.retry, &parameters, self.db.by()).await {
            tracing::warn!(name: "tenure.release_failed", id = name.id, %error);
        }
    }
}

impl Drop for QueueShared {
    fn drop(&mut self) {
        self.holds.leave();
        self.notifications.stop_listening();
    }
}
