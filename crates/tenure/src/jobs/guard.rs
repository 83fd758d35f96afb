//! A claimed job, to complete, fail, retry or release.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::keeper::Loss;
use tokio::sync::oneshot;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};

use super::detached::run_detached;
use super::heart::Ticket;
use super::job::{Job, lost};
use super::options::REQUEST_TIMEOUT;
use super::shared::{ClaimedJob, CompleteRequest, QueueShared};
use crate::store::pg::clock::micros;
use crate::store::pg::connect::Parameter;
use crate::store::pg::failure::{self, RequestStage};
use crate::{Error, ErrorKind, Result};

/// Maximum length of a stored error, in characters.
const MAX_ERROR_CHARS: usize = 10_000;

/// A claimed job. Its lease is renewed until the job is completed, failed, retried or released.
///
/// Dropping the guard releases the job in the background, as a failed attempt. Dropping the guard of a job that was
/// completed in a [transaction](Self::complete_in) changes nothing.
///
/// ```
/// # use std::time::Duration;
/// # use tenure::jobs::{NewJob, Queue, Schema};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
/// # let Some(url) = service("TENURE_TEST_POSTGRES") else { return Ok(()) };
/// # let table = format!("doc_guard_{}", std::process::id());
/// # Schema::of_queue(&table)?.apply(&url).await?;
/// # let queue = Queue::connect(&url, &table).await?;
/// # queue.enqueue(NewJob::json("7")?.max_attempts(2)).await?;
/// # async fn build(_: &str) -> Result<(), std::io::Error> { Err(std::io::ErrorKind::Other.into()) }
/// let job = queue.claim().await?.expect("there is one");
/// match job.run(build(job.payload())).await? {
///     Ok(()) => job.complete().await?,
///     Err(error) => {
///         let again = job.retry_in(Duration::from_secs(60), error.to_string()).await?;
///         assert!(again, "it has attempts left");
///     }
/// }
/// # Ok(()) }
/// ```
#[must_use = "a dropped guard releases its job"]
pub struct JobGuard {
    // Fields are dropped in this order. The ticket comes before the queue: its drop hands the job to the queue, which
    // releases it.
    ticket: Ticket,
    job: Job,
    queue: Arc<QueueShared>,
}

/// Final update of a claimed job.
enum JobUpdate {
    Complete,
    Fail { why: String },
    Retry { why: String, delay: Duration },
    Release,
}

impl JobGuard {
    pub(super) fn new(claimed: ClaimedJob, queue: &Arc<QueueShared>) -> Self {
        let ClaimedJob { ticket, job } = claimed;
        Self { ticket, job, queue: Arc::clone(queue) }
    }

    /// The job, for its handler.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Marks the job as completed. While the server cannot be reached, the request is retried until the lease ends. A
    /// job that was completed with the token of this claim before, by [`complete_in`](Self::complete_in) or in SQL, is
    /// completed.
    ///
    /// # Errors
    ///
    /// `Lost` if another worker has claimed the job, or an operator has cancelled it: nothing was changed. `Unknown` or
    /// `Unavailable` if no definite answer arrived: the job is released unless it was completed.
    ///
    /// # Cancel safety
    ///
    /// The job is completed even if the future is dropped.
    pub async fn complete(self) -> Result<()> {
        self.apply_update(JobUpdate::Complete).await.map(drop)
    }

    /// Marks the job as completed, with a result: JSON that its row keeps.
    ///
    /// # Errors
    ///
    /// As for [`complete`](Self::complete) and [`Job::set_result`]. A result that cannot be stored leaves the job as it was:
    /// dropping the guard releases it.
    ///
    /// # Cancel safety
    ///
    /// The job is completed even if the future is dropped.
    pub async fn complete_with(self, result: impl Into<String>) -> Result<()> {
        self.set_result(result).map_err(|error| error.at(&self.queue.db))?;
        self.complete().await
    }

    /// Marks the job as failed for good, with the reason. [`Queue::requeue`](super::Queue::requeue) makes it available
    /// again.
    ///
    /// # Errors
    ///
    /// As for [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// The job is marked as failed even if the future is dropped.
    pub async fn fail(self, why: impl Into<String>) -> Result<()> {
        self.apply_update(JobUpdate::Fail { why: why.into() }).await.map(drop)
    }

    /// Makes the job available again after `delay`, and records the reason. Returns true if the job will be retried,
    /// false if its attempts are used up and it was marked as failed.
    ///
    /// # Errors
    ///
    /// As for [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// The job is updated even if the future is dropped.
    pub async fn retry_in(self, delay: Duration, why: impl Into<String>) -> Result<bool> {
        let row = self.apply_update(JobUpdate::Retry { why: why.into(), delay }).await?;
        Ok(row.is_none_or(|row| !row.get::<_, bool>("failed")))
    }

    /// Releases the job as if it had not been claimed: the attempt does not count.
    ///
    /// # Errors
    ///
    /// As for [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// The job is released even if the future is dropped.
    pub async fn release(self) -> Result<()> {
        self.apply_update(JobUpdate::Release).await.map(drop)
    }

    /// Completes the job in the caller's transaction, so that it is completed together with its effect or not at all.
    /// After the commit drop the guard. After a rollback the job is still held.
    ///
    /// # Errors
    ///
    /// `Lost` if this worker no longer holds the job: roll back. `NotHeld` in a forked copy of the process.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the completion in the transaction or not: roll back.
    pub async fn complete_in(&self, transaction: &impl GenericClient) -> Result<()> {
        self.queue.db.check_process()?;
        let (id, number, worker) = (self.id(), self.lease_token(), self.queue.db.worker.as_str());
        let mut parameters: Vec<(&(dyn ToSql + Sync), Type)> =
            vec![(&id, Type::TEXT), (&number, Type::INT8), (&worker, Type::TEXT)];
        let result = self.result();
        let sql = if result.is_some() {
            parameters.push((&result, Type::TEXT));
            &self.queue.sql.complete_with_in
        } else {
            &self.queue.sql.complete_in
        };
        let answer = transaction.query_typed(sql, &parameters).await;
        match answer {
            Ok(rows) if rows.is_empty() => Err(self.lost_error()),
            Ok(_) => Ok(()),
            Err(error) => Err(failure::explain(error, RequestStage::Asking).at(&self.queue.db)),
        }
    }

    /// SQL of [`complete_in`](Self::complete_in), for other drivers; [`sql`](super::sql) documents its parameters.
    pub fn complete_sql(&self) -> &str {
        &self.queue.sql.complete_in
    }

    pub(super) fn mark_settled(&self) {
        self.ticket.dealt_with();
    }

    fn lost_error(&self) -> Error {
        let why = match self.ticket.look.borrow().lost {
            Some(Loss::Cancelled) => "it was cancelled",
            _ => "another worker has claimed it, or it was cancelled",
        };
        lost(self.id(), why).at(&self.queue.db)
    }

    /// Result of an update that changed no row: the job was lost, an earlier attempt without an answer was applied, or
    /// the work has completed the job itself.
    fn unmatched(&self, update: &JobUpdate, unclear: bool, row: Option<&Row>) -> Result<()> {
        let Some(row) = row else { return Err(self.lost_error()) };
        if unclear && self.has_landed(update, row) {
            return Ok(());
        }
        let (completed, failed): (bool, bool) = (row.get("completed"), row.get("failed"));
        if completed {
            self.ticket.completed_elsewhere();
        }
        Err(match update {
            JobUpdate::Complete if completed => return Ok(()),
            _ if completed => lost(self.id(), "its work has completed it").at(&self.queue.db),
            _ if failed => lost(self.id(), "it was marked as failed").at(&self.queue.db),
            _ => self.lost_error(),
        })
    }

    /// Applies an update in a task of its own, with retries while no answer arrives and the lease may still run.
    async fn apply_update(self, update: JobUpdate) -> Result<Option<Row>> {
        let queue = Arc::clone(&self.queue);
        let applied = run_detached(async move {
            let applied = match update {
                JobUpdate::Complete if self.result().is_none() => self.complete_batched().await,
                update => self.retry_update(&update, false).await,
            };
            let settled =
                applied.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::Lost);
            // Without a definite answer the guard's drop releases the job; that changes nothing if the update was
            // applied.
            if settled {
                self.mark_settled();
            }
            applied
        });
        applied.await.map_err(|error| error.at(&queue.db))
    }

    /// Completes the job in one statement with other jobs that complete now; in a statement of its own if that fails.
    async fn complete_batched(&self) -> Result<Option<Row>> {
        let (reply, answer) = oneshot::channel();
        let (id, number) = (self.id().to_owned(), self.lease_token());
        if self.queue.completion_batches.join(CompleteRequest { id, number, reply }) {
            tokio::spawn(Arc::clone(&self.queue).serve_completions());
        }
        match answer.await {
            Ok(Ok(true)) => Ok(None),
            // Not completed by the batch: a statement of its own finds out why.
            Ok(Ok(false)) => self.retry_update(&JobUpdate::Complete, false).await,
            Ok(Err(error)) => {
                self.retry_update(&JobUpdate::Complete, error.kind() == ErrorKind::Unknown).await
            }
            Err(_) => self.retry_update(&JobUpdate::Complete, true).await,
        }
    }

    async fn retry_update(&self, update: &JobUpdate, mut unclear: bool) -> Result<Option<Row>> {
        let db = &self.queue.db;
        let end = db.clock.now() + self.remaining().max(REQUEST_TIMEOUT);
        loop {
            let by = end.min(db.clock.now() + db.lease.request_limit().min(REQUEST_TIMEOUT));
            let sent = self.send_update(update, unclear, by).await;
            // Not when it is sent: another transaction may have locked the row, and that is no outage.
            self.queue.outage.ended_beside(&sent);
            let error = match sent {
                Ok(Some(row)) => return Ok(Some(row)),
                Ok(None) => match self.row_of_claim(by).await {
                    Ok(row) => {
                        return self.unmatched(update, unclear, row.as_ref()).map(|()| None);
                    }
                    Err(error) => error,
                },
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::Unknown => unclear = true,
                ErrorKind::Unavailable => {}
                // Access may be granted again before the lease ends.
                _ if error.is_marked_transient() => {}
                _ => return Err(error),
            }
            let again = db.clock.now() + db.lease.retry_pause().min(Duration::from_millis(500));
            if again >= end {
                return Err(error);
            }
            db.clock.sleep_until(again).await;
        }
    }

    /// Sends the update; the row if it was applied.
    ///
    /// A release that may have been applied is not repeated: it would decrement the attempts twice.
    async fn send_update(
        &self,
        update: &JobUpdate,
        unclear: bool,
        by: tenure_core::Time,
    ) -> Result<Option<Row>> {
        if unclear && matches!(update, JobUpdate::Release) {
            let row = self.row_of_claim(by).await?;
            if row.is_some_and(|row| self.has_landed(update, &row)) {
                return Ok(None);
            }
        }
        let QueueShared { db, sql, .. } = &*self.queue;
        let (id, number) = (self.id(), self.lease_token());
        let mut parameters: Vec<Parameter<'_>> =
            vec![(&id, Type::TEXT), (&number, Type::INT8), (&db.worker, Type::TEXT)];
        let (why, delay, result);
        let sql = match update {
            JobUpdate::Complete => {
                result = self.result();
                if result.is_some() {
                    parameters.push((&result, Type::TEXT));
                    &sql.complete_with
                } else {
                    &sql.complete
                }
            }
            JobUpdate::Release => &sql.release,
            JobUpdate::Fail { why: error } => {
                why = sanitize_error(error);
                parameters.push((&why, Type::TEXT));
                &sql.fail
            }
            JobUpdate::Retry { why: error, delay: span } => {
                why = sanitize_error(error);
                delay = micros(*span);
                parameters.push((&why, Type::TEXT));
                parameters.push((&delay, Type::INT8));
                &sql.retry
            }
        };
        Ok(db.ask(sql, &parameters, by).await?.0.pop())
    }

    /// The final columns of the job's row, if it still has the token of this claim: no worker has claimed the job since.
    async fn row_of_claim(&self, by: tenure_core::Time) -> Result<Option<Row>> {
        let QueueShared { db, sql, .. } = &*self.queue;
        let (id, number) = (self.id(), self.lease_token());
        let parameters: [Parameter<'_>; 2] = [(&id, Type::TEXT), (&number, Type::INT8)];
        Ok(db.ask(&sql.settled, &parameters, by).await?.0.pop())
    }

    /// True if an earlier request without an answer was applied: the columns of the claim's row show its effect.
    fn has_landed(&self, update: &JobUpdate, row: &Row) -> bool {
        let worker = &self.queue.db.worker;
        let (completed, failed): (bool, bool) = (row.get("completed"), row.get("failed"));
        let released = row.get::<_, Option<String>>("locked_by").is_none_or(|by| by != *worker);
        match update {
            JobUpdate::Complete => completed,
            JobUpdate::Fail { .. } => failed,
            JobUpdate::Retry { .. } => !completed && (failed || released),
            JobUpdate::Release => !completed && !failed && released,
        }
    }
}

/// Shortens an error for storage and removes NUL, which PostgreSQL cannot store.
pub(super) fn sanitize_error(error: &str) -> String {
    error.chars().filter(|c| *c != '\0').take(MAX_ERROR_CHARS).collect()
}

impl Deref for JobGuard {
    type Target = Job;

    fn deref(&self) -> &Job {
        &self.job
    }
}

impl fmt::Debug for JobGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("JobGuard").field(&self.job).finish()
    }
}
