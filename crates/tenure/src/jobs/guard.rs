//! A claimed job, to be dealt with.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};

use super::heart::Ticket;
use super::job::{Job, lost};
use super::queue::{CompleteRequest, QueueShared, run_detached};
use crate::store::pg::clock::micros;
use crate::store::pg::connect::Parameter;
use crate::store::pg::failure::{self, RequestStage};
use crate::{Error, ErrorKind, Result};

/// The longest error that is kept, in characters.
const MAX_ERROR_CHARS: usize = 10_000;

/// A claimed job. Its lease is renewed until it is dealt with.
///
/// Dropping it gives the job back in the background, as a failed attempt; dropping the guard of a job that was completed
/// in a [transaction](Self::complete_in) changes nothing.
///
/// ```
/// # use std::time::Duration;
/// # use tenure::jobs::{NewJob, Queue, Schema};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else { return Ok(()) };
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
#[must_use = "a dropped guard gives its job back"]
pub struct JobGuard {
    // Before the queue: what is dropped is given back by it.
    ticket: Ticket,
    job: Job,
    queue: Arc<QueueShared>,
}

/// What to do with a job.
enum JobUpdate {
    Complete,
    Fail { why: String },
    Retry { why: String, delay: Duration },
    Release,
}

impl JobGuard {
    pub(super) fn new(job: Job, ticket: Ticket, queue: Arc<QueueShared>) -> Self {
        Self { ticket, job, queue }
    }

    /// The job, for whoever works on it.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Says that the job is done. While the server cannot be reached it is said again until the lease ends.
    ///
    /// # Errors
    ///
    /// `Lost` where another has claimed it, or somebody gave it up: nothing was changed. `Unknown` and `Unavailable` where
    /// no clear answer came: it is given back unless it was completed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future completes it all the same.
    pub async fn complete(self) -> Result<()> {
        self.apply_update(JobUpdate::Complete).await.map(drop)
    }

    /// Gives the job up for good, with the reason: [`Queue::requeue`](super::Queue::requeue) lets it be tried again.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives it up all the same.
    pub async fn fail(self, why: impl Into<String>) -> Result<()> {
        self.apply_update(JobUpdate::Fail { why: why.into() }).await.map(drop)
    }

    /// Lets the job be tried again after a pause, with the reason. Whether it will be: where its attempts are used up it
    /// is given up for good.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does it all the same.
    pub async fn retry_in(self, delay: Duration, why: impl Into<String>) -> Result<bool> {
        let row = self.apply_update(JobUpdate::Retry { why: why.into(), delay }).await?;
        Ok(row.is_none_or(|row| !row.get::<_, bool>(1)))
    }

    /// Gives the job back as if it had not been claimed: the attempt does not count.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives it back all the same.
    pub async fn release(self) -> Result<()> {
        self.apply_update(JobUpdate::Release).await.map(drop)
    }

    /// Completes the job as part of a transaction of yours: with its effect, or not at all. After the commit drop the
    /// guard; after a rollback the job is still ours.
    ///
    /// # Errors
    ///
    /// `Lost` where it is no longer ours: roll back. `NotHeld` in a forked copy of the process.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction with or without it: roll back.
    pub async fn complete_in(&self, transaction: &impl GenericClient) -> Result<()> {
        self.queue.db.check_process()?;
        let (id, number, worker) = (self.id(), self.lease_token(), self.queue.db.worker.as_str());
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&id, Type::TEXT), (&number, Type::INT8), (&worker, Type::TEXT)];
        let asked = transaction.query_typed(&self.queue.sql.complete_in, &parameters).await;
        match asked {
            Ok(rows) if rows.is_empty() => Err(self.lost_error()),
            Ok(_) => Ok(()),
            Err(error) => Err(failure::explain(error, RequestStage::Asking).at(&self.queue.db)),
        }
    }

    /// The statement of [`complete_in`](Self::complete_in), for other drivers; see [`sql`](super::sql) for its parameters.
    pub fn complete_sql(&self) -> &str {
        &self.queue.sql.complete_in
    }

    pub(super) fn mark_settled(&self) {
        self.ticket.dealt_with();
    }

    fn lost_error(&self) -> Error {
        lost(self.id(), "another has claimed it, or it was given up").at(&self.queue.db)
    }

    /// Does it, and does it again while nobody answers and it may still be ours.
    async fn apply_update(self, deed: JobUpdate) -> Result<Option<Row>> {
        let link = Arc::clone(&self.queue);
        let dealt = run_detached(async move {
            let dealt = match deed {
                JobUpdate::Complete => self.complete_batched().await,
                deed => self.retry_update(&deed, false).await,
            };
            let clear = dealt.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::Lost);
            if clear {
                self.mark_settled();
            }
            dealt
        });
        dealt.await.map_err(|error| error.at(&link.db))
    }

    /// Completes it in one statement with whoever else has done a job just now; alone where that fails.
    async fn complete_batched(&self) -> Result<Option<Row>> {
        let (reply, answer) = oneshot::channel();
        let (id, number) = (self.id().to_owned(), self.lease_token());
        if self.queue.completion_batches.join(CompleteRequest { id, number, reply }) {
            tokio::spawn(Arc::clone(&self.queue).serve_completions());
        }
        match answer.await {
            Ok(Ok(true)) => Ok(None),
            Ok(Ok(false)) => Err(self.lost_error()),
            Ok(Err(error)) => {
                self.retry_update(&JobUpdate::Complete, error.kind() == ErrorKind::Unknown).await
            }
            Err(_) => self.retry_update(&JobUpdate::Complete, true).await,
        }
    }

    async fn retry_update(&self, deed: &JobUpdate, mut unclear: bool) -> Result<Option<Row>> {
        let link = &self.queue.db;
        let end = link.clock.now() + self.remaining().max(super::REQUEST_TIMEOUT);
        loop {
            let by =
                end.min(link.clock.now() + link.lease.request_limit().min(super::REQUEST_TIMEOUT));
            let error = match self.send_update(deed, unclear, by).await {
                Ok(Some(row)) => return Ok(Some(row)),
                Ok(None) if unclear && self.has_landed(deed, by).await? => return Ok(None),
                Ok(None) => return Err(self.lost_error()),
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::Unknown => unclear = true,
                ErrorKind::Unavailable => {}
                _ => return Err(error),
            }
            let again = link.clock.now() + link.lease.retry_pause().min(Duration::from_millis(500));
            if again >= end {
                return Err(error);
            }
            link.clock.sleep_until(again).await;
        }
    }

    /// The row where it was done. A release that may have landed is not repeated: it would give back an attempt twice.
    async fn send_update(
        &self,
        deed: &JobUpdate,
        unclear: bool,
        by: tenure_core::Time,
    ) -> Result<Option<Row>> {
        if unclear && matches!(deed, JobUpdate::Release) && self.has_landed(deed, by).await? {
            return Ok(None);
        }
        let QueueShared { db: link, sql, .. } = &*self.queue;
        let (id, number) = (self.id(), self.lease_token());
        let mut parameters: Vec<Parameter<'_>> =
            vec![(&id, Type::TEXT), (&number, Type::INT8), (&link.worker, Type::TEXT)];
        let (why, delay);
        let sql = match deed {
            JobUpdate::Complete => &sql.complete,
            JobUpdate::Release => &sql.release,
            JobUpdate::Fail { why: told } => {
                why = sanitize_error(told);
                parameters.push((&why, Type::TEXT));
                &sql.fail
            }
            JobUpdate::Retry { why: told, delay: span } => {
                why = sanitize_error(told);
                delay = micros(*span);
                parameters.push((&why, Type::TEXT));
                parameters.push((&delay, Type::INT8));
                &sql.retry
            }
        };
        Ok(link.ask(sql, &parameters, by).await?.0.pop())
    }

    /// Whether an earlier sending, of which nothing was heard, was done: nobody has claimed the job since.
    async fn has_landed(&self, deed: &JobUpdate, by: tenure_core::Time) -> Result<bool> {
        let QueueShared { db: link, sql, .. } = &*self.queue;
        let (id, number) = (self.id(), self.lease_token());
        let parameters: [Parameter<'_>; 2] = [(&id, Type::TEXT), (&number, Type::INT8)];
        let (rows, _) = link.ask(&sql.settled, &parameters, by).await?;
        let Some(row) = rows.first() else { return Ok(false) };
        let (completed, failed): (bool, bool) = (row.get(1), row.get(2));
        let given_back = row.get::<_, Option<String>>(3).is_none_or(|by| by != link.worker);
        Ok(match deed {
            JobUpdate::Complete => completed,
            JobUpdate::Fail { .. } => failed,
            JobUpdate::Retry { .. } => !completed && (failed || given_back),
            JobUpdate::Release => !completed && !failed && given_back,
        })
    }
}

/// An error as it is kept: no longer than it is of use, and without what the database cannot hold.
fn sanitize_error(error: &str) -> String {
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
