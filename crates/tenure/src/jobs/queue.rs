//! A job queue: enqueue, claim, complete.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_postgres::GenericClient;

use super::controls::{PauseCallbacks, QueuePause};
use super::db::invalid;
use super::detached::{run_detached, runtime_ended};
use super::guard::JobGuard;
use super::job::{Enqueued, Job, NewJob};
use super::options::Options;
use super::set_aside::{JobSetAside, RowsSetAside};
use super::shared::{ClaimRequest, MAX_BATCH_JOBS, QueueShared};
use super::sweep::Swept;
use crate::outage::{OutageCallbacks, StoreOutage};
use crate::{Error, ErrorKind, Result};

/// A queue of jobs in a table of PostgreSQL. Clones share one queue.
///
/// ```
/// use tenure::jobs::{NewJob, Queue, Schema};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
/// # let Some(url) = service("TENURE_TEST_POSTGRES") else { return Ok(()) };
/// # let table = format!("doc_queue_{}", std::process::id());
/// # let table = table.as_str();
/// Schema::of_queue(table)?.apply(&url).await?; // once, or `tenure schema --apply`
/// let queue = Queue::connect(&url, table).await?;
/// queue.enqueue(NewJob::json(r#"{"report": 7}"#)?.priority(5)).await?;
///
/// let job = queue.claim().await?.expect("there is one");
/// assert_eq!(job.attempt(), 1);
/// job.complete().await?; // `Lost` if another worker has claimed it since
/// assert!(queue.claim().await?.is_none());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Queue(pub(super) Arc<QueueShared>);

/// Settings of a queue. Made by [`Queue::builder`].
///
/// ```no_run
/// use std::time::Duration;
/// use tenure::jobs::Queue;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// let queue = Queue::builder()
///     .wait_for_store(Duration::MAX) // a server that is not up yet is waited for
///     .on_outage(|outage| eprintln!("{outage}"))
///     .connect("postgres://app@db.example/app", "sync_jobs")
///     .await?;
/// # drop(queue);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct QueueBuilder {
    options: Options,
    /// Time to wait for the server; `None` to fail at once.
    patience: Option<Duration>,
    on_outage: OutageCallbacks,
    set_aside: RowsSetAside,
    on_pause: PauseCallbacks,
}

impl QueueBuilder {
    /// Sets the options of the queue; [`Options::default`] otherwise.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Waits up to `limit` for a server that is away; [`Duration::MAX`] waits for ever. Without this setting,
    /// connecting fails at once.
    pub fn wait_for_store(mut self, limit: Duration) -> Self {
        self.patience = Some(limit);
        self
    }

    /// Calls `f` within two seconds of an outage, every 30 s after that, and when the server is back. It is called
    /// while the queue connects and while a [`Worker`](super::Worker) runs. Without a worker, an outage is noticed by the
    /// next renewal of a claimed job. `f` must return soon.
    pub fn on_outage(mut self, f: impl Fn(&StoreOutage) + Send + Sync + 'static) -> Self {
        self.on_outage.push(f);
        self
    }

    /// Calls `f` once for each job that is set aside: its row cannot be read or claimed, and claims leave it out for ten
    /// minutes at a time. The other jobs are claimed as usual. `f` must return soon.
    pub fn on_set_aside(mut self, f: impl Fn(&JobSetAside) + Send + Sync + 'static) -> Self {
        self.set_aside.on_report(f);
        self
    }

    /// Calls `f` when the queue is [paused](Queue::pause), or was when it was first read, and without a pause when it is
    /// resumed: within two seconds while a [`Worker`](super::Worker) runs. `f` must return soon.
    pub fn on_pause(mut self, f: impl Fn(Option<&QueuePause>) + Send + Sync + 'static) -> Self {
        self.on_pause.push(f);
        self
    }

    /// Connects to the queue in this table, as [`Queue::connect`] does.
    ///
    /// # Errors
    ///
    /// As for [`Queue::connect`]; also `Invalid` if the options contradict each other. An error that waiting cannot
    /// cure (wrong credentials, a missing database or table) is returned at once; `Unavailable` if the server was away
    /// for the whole time.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn connect(self, url: &str, table: &str) -> Result<Queue> {
        let Self { options, patience, on_outage, set_aside, on_pause } = self;
        let connected =
            QueueShared::connect(url, table, options, patience, on_outage, set_aside, on_pause)
                .await;
        connected.map(Queue)
    }
}

impl Queue {
    /// Starts the settings of a queue: its options, the time to wait for a server that is away, and callbacks.
    pub fn builder() -> QueueBuilder {
        QueueBuilder::default()
    }

    /// Connects to the queue in this table, with [`Options::default`].
    ///
    /// `url` is a `postgres:` URL, as for locks. Statements are prepared unless a pooler is detected; `prepare=on` or
    /// `prepare=off` in the URL overrides the detection.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the table is missing or lacks columns, `Denied` if the role lacks rights, `Unavailable` if
    /// the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn connect(url: &str, table: &str) -> Result<Self> {
        Self::connect_with(url, table, Options::default()).await
    }

    /// Connects to the queue in this table, with the given options.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect); also `Invalid` if the options contradict each other.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn connect_with(url: &str, table: &str, options: Options) -> Result<Self> {
        Self::builder().options(options).connect(url, table).await
    }

    /// Name of this worker in the column `locked_by`.
    pub fn worker(&self) -> &str {
        &self.0.db.worker
    }

    /// URL of the database, without secrets.
    pub fn store(&self) -> String {
        self.0.db.pool.settings().to_string()
    }

    /// Name of the table, with its schema if one was given.
    pub fn table(&self) -> String {
        self.0.db.table.shown()
    }

    /// Options of this queue.
    pub fn options(&self) -> Options {
        self.0.db.options
    }

    /// Enqueues a job and notifies idle workers.
    ///
    /// # Errors
    ///
    /// `Invalid` if the job is invalid. `Misconfigured` if the table has further columns that are `NOT NULL` without a
    /// default. `Contention` if an open job of the same unique key ended during the call: enqueue it again. `Unknown`
    /// if no answer arrived: the job may be enqueued.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the job enqueued or not enqueued.
    pub async fn enqueue(&self, job: NewJob) -> Result<Enqueued> {
        let enqueued = self.enqueue_many(vec![job]).await?.pop();
        enqueued.ok_or_else(|| {
            self.at(Error::new(ErrorKind::Unknown, "the answer names no job: it may be enqueued"))
        })
    }

    /// Enqueues many jobs, up to a thousand per statement, and returns one result per job in their order.
    ///
    /// # Errors
    ///
    /// As for [`enqueue`](Self::enqueue). If one job is invalid, none is enqueued.
    ///
    /// # Cancel safety
    ///
    /// The statements run to their end even if the future is dropped.
    pub async fn enqueue_many(&self, jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
        jobs.iter().try_for_each(NewJob::check).map_err(|error| self.at(error))?;
        let shared = Arc::clone(&self.0);
        let enqueued = run_detached(async move {
            let mut enqueued = Vec::with_capacity(jobs.len());
            for chunk in jobs.chunks(MAX_BATCH_JOBS) {
                enqueued.extend(shared.enqueue(chunk).await?);
            }
            Ok(enqueued)
        });
        enqueued.await.map_err(|error| self.at(error))
    }

    /// Enqueues a job in the caller's transaction: it exists once the transaction commits, together with its other
    /// effects, or not at all. The commit notifies idle workers, once however many jobs the transaction enqueues.
    ///
    /// The transaction may be on any connection to the same database. It keeps its own `synchronous_commit`. Name the
    /// table of the queue with its schema if the connection has another `search_path`.
    ///
    /// ```
    /// # use tenure::jobs::{NewJob, Queue, Schema};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else { return Ok(()) };
    /// # let table = format!("doc_enqueue_in_{}", std::process::id());
    /// # Schema::of_queue(&table)?.apply(&url).await?;
    /// # let queue = Queue::connect(&url, &table).await?;
    /// # let (mut db, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
    /// # tokio::spawn(connection);
    /// # db.batch_execute("CREATE TEMPORARY TABLE orders (id int)").await?;
    /// let transaction = db.transaction().await?;
    /// transaction.execute("INSERT INTO orders (id) VALUES (7)", &[]).await?;
    /// queue.enqueue_in(&transaction, NewJob::json(r#"{"order": 7}"#)?).await?;
    /// transaction.commit().await?; // workers see the order and its job
    /// # assert!(queue.claim().await?.is_some());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`enqueue`](Self::enqueue). After an error of the server the transaction is aborted: roll back. `NotHeld`
    /// in a forked copy of the process.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the job in the transaction or not: roll back.
    pub async fn enqueue_in(
        &self,
        transaction: &impl GenericClient,
        job: NewJob,
    ) -> Result<Enqueued> {
        let enqueued = self.enqueue_many_in(transaction, std::slice::from_ref(&job)).await?.pop();
        enqueued.ok_or_else(|| self.at(Error::new(ErrorKind::Unknown, "the answer names no job")))
    }

    /// Enqueues many jobs in the caller's transaction, up to a thousand per statement, and returns one result per job in
    /// their order.
    ///
    /// # Errors
    ///
    /// As for [`enqueue_in`](Self::enqueue_in). If one job is invalid, none is enqueued.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves some of the jobs in the transaction: roll back.
    pub async fn enqueue_many_in(
        &self,
        transaction: &impl GenericClient,
        jobs: &[NewJob],
    ) -> Result<Vec<Enqueued>> {
        self.0.db.check_process()?;
        jobs.iter().try_for_each(NewJob::check).map_err(|error| self.at(error))?;
        let mut enqueued = Vec::with_capacity(jobs.len());
        for chunk in jobs.chunks(MAX_BATCH_JOBS) {
            let made = self.0.enqueue_in(transaction, chunk).await;
            enqueued.extend(made.map_err(|error| self.at(error))?);
        }
        Ok(enqueued)
    }

    /// Claims the next job: the highest priority first, and among equals the oldest. `None` if no job is available.
    ///
    /// # Errors
    ///
    /// `Unknown` if no answer arrived: a job that was claimed nevertheless is released by the next claim, or when its
    /// lease ends.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases a job that was claimed.
    pub async fn claim(&self) -> Result<Option<JobGuard>> {
        Ok(self.claim_many(1).await?.pop())
    }

    /// Claims up to `limit` jobs, at most a thousand, in the order of single claims.
    ///
    /// # Errors
    ///
    /// As for [`claim`](Self::claim); `Invalid` if `limit` is 0.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases the jobs that were claimed.
    pub async fn claim_many(&self, limit: usize) -> Result<Vec<JobGuard>> {
        if limit == 0 {
            return Err(self.at(invalid("cannot claim 0 jobs: give a limit of at least 1")));
        }
        let (reply, answer) = oneshot::channel();
        let request = ClaimRequest { limit: limit.min(MAX_BATCH_JOBS), reply };
        if self.0.claim_batches.join(request) {
            tokio::spawn(Arc::clone(&self.0).serve_claims());
        }
        let claimed = answer.await.unwrap_or_else(|_| Err(runtime_ended()));
        let claimed = claimed.map_err(|error| self.at(error))?;
        Ok(claimed.into_iter().map(|claimed| JobGuard::new(claimed, &self.0)).collect())
    }

    /// Completes many jobs, up to a thousand per statement. Returns the jobs that were lost: those are left unchanged.
    ///
    /// # Errors
    ///
    /// `Unknown` or `Unavailable` if no definite answer arrived: the jobs are released unless they were completed.
    ///
    /// # Cancel safety
    ///
    /// The jobs are completed even if the future is dropped.
    pub async fn complete_many(&self, jobs: Vec<JobGuard>) -> Result<Vec<Job>> {
        let shared = Arc::clone(&self.0);
        let completed = run_detached(async move { complete_many(&shared, jobs).await });
        completed.await.map_err(|error| self.at(error))
    }

    /// Makes jobs available whose lease has expired or whose delay is over. Claims do so regularly, see
    /// [`Options::sweep_every`](super::Options::sweep_every).
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// The sweep runs to its end even if the future is dropped.
    pub async fn sweep(&self) -> Result<Swept> {
        let shared = Arc::clone(&self.0);
        let swept = run_detached(async move { shared.sweep().await });
        swept.await.map_err(|error| self.at(error))
    }

    /// True if the table has the column `meta`, so that jobs can have metadata.
    pub fn stores_meta(&self) -> bool {
        self.0.optional.meta.is_some()
    }

    /// SQL of a claim, of a completion and of a batched completion, for benchmarks of the server alone.
    #[doc(hidden)]
    pub async fn statements(&self) -> Result<[String; 3]> {
        let QueueShared { db, sql, .. } = &*self.0;
        let by = db.by();
        let mut connection = db.connection(by).await?;
        db.incarnation.ensure_epoch(&mut connection, by).await?;
        Ok([db.incarnation.fill(&sql.claim), sql.complete.clone(), sql.complete_many.clone()])
    }

    pub(super) fn at(&self, error: Error) -> Error {
        error.at(&self.0.db)
    }
}

async fn complete_many(shared: &QueueShared, jobs: Vec<JobGuard>) -> Result<Vec<Job>> {
    let mut lost = Vec::new();
    // The batched statement stores no results.
    let (with_result, jobs): (Vec<_>, Vec<_>) =
        jobs.into_iter().partition(|job| job.result().is_some());
    for guard in with_result {
        let job = guard.job().clone();
        match guard.complete().await {
            Err(error) if error.kind() == ErrorKind::Lost => lost.push(job),
            completed => completed?,
        }
    }
    for chunk in jobs.chunks(MAX_BATCH_JOBS) {
        let mut names: Vec<(&str, i64)> =
            chunk.iter().map(|job| (job.id(), job.lease_token())).collect();
        let done = shared.complete_named(&mut names, shared.db.by()).await?;
        for job in chunk {
            job.mark_settled();
            if !done.contains(job.id()) {
                lost.push((**job).clone());
            }
        }
    }
    Ok(lost)
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("table", &self.table()).finish_non_exhaustive()
    }
}
