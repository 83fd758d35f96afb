//! A job queue: enqueue, claim, complete.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::jobs::{JobOrder, RenewalOutcome};
use tenure_core::{FencingToken, Time};
use tokio::sync::{RwLock, oneshot};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::batcher::Batcher;
use super::db::{JobDb, invalid};
use super::heart::{Holds, RowName, Rows};
use super::job::{Enqueued, Job, JobData, NewJob};
use super::notifications::JobNotifications;
use super::sql::JobStatements;
use super::{JobGuard, Options, schema};
use crate::outage::{OutageCallbacks, OutageMonitor, StoreOutage};
use crate::store::pg::clock::{Reading, micros};
use crate::store::pg::connect::Parameter;
use crate::store::pg::renewer::{RenewalStatement, outcomes};
use crate::{Error, ErrorKind, Result, telemetry};

/// Maximum number of jobs per claim, and per statement that enqueues.
const MAX_BATCH_JOBS: usize = 1_000;
/// Time during which a claim may resume at the position where the last claim ended, instead of scanning from the top.
///
/// A job of a higher priority that is enqueued meanwhile is overtaken for at most this time.
const RESUME_WINDOW: Duration = Duration::from_millis(50);
/// Timeout of a batched completion. If another transaction has locked one of its rows, the whole batch waits for that
/// row; after the timeout each job is completed in a statement of its own.
const BATCH_COMPLETE_TIMEOUT: Duration = Duration::from_secs(3);

/// A queue of jobs in a table of PostgreSQL. Clones share one queue.
///
/// ```
/// use tenure::jobs::{NewJob, Queue, Schema};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else { return Ok(()) };
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

pub(super) struct QueueShared {
    pub(super) db: JobDb,
    pub(super) holds: Arc<Holds>,
    pub(super) sql: JobStatements,
    pub(super) notifications: JobNotifications,
    state: Mutex<QueueState>,
    claim_batches: Batcher<ClaimRequest>,
    pub(super) completion_batches: Batcher<CompleteRequest>,
    /// Read-locked by claims in flight, write-locked by the cleanup after an unanswered claim. The cleanup must not run
    /// beside a claim: it would release rows that were just claimed and are not yet in `holds`.
    claims: RwLock<()>,
    /// A claim got no answer. It may have locked rows in our name that `holds` does not know.
    unanswered_claim: AtomicBool,
    /// Outage of the server, as workers and renewals see it.
    pub(super) outage: OutageMonitor,
}

/// A caller that waits for jobs.
struct ClaimRequest {
    limit: usize,
    reply: oneshot::Sender<Result<Vec<JobGuard>>>,
}

/// A caller that waits for the completion of a job. The reply is true if its worker still held the job.
pub(super) struct CompleteRequest {
    pub(super) id: String,
    pub(super) number: i64,
    pub(super) reply: oneshot::Sender<Result<bool>>,
}

pub(super) struct QueueState {
    /// Position of the last claimed job, and the time until which the next claim may resume there.
    resume_from: Option<(JobOrder<String>, Time)>,
    pub(super) next_sweep: Time,
}

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
    /// while the queue connects, while a [`Worker`](super::Worker) runs, and for renewals of claimed jobs. `f` must
    /// return soon.
    pub fn on_outage(mut self, f: impl Fn(&StoreOutage) + Send + Sync + 'static) -> Self {
        self.on_outage.push(f);
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
        let Self { options, patience, on_outage } = self;
        Queue::open(url, table, options, patience, on_outage).await
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

    /// Connects with all settings of the builder.
    async fn open(
        url: &str,
        table: &str,
        options: Options,
        patience: Option<Duration>,
        on_outage: OutageCallbacks,
    ) -> Result<Self> {
        static QUEUES: AtomicU64 = AtomicU64::new(0);
        let mut db = JobDb::new(url, table, options, || Box::new(schema::job_columns()))?;
        // The cleanup after an unanswered claim releases the rows of a worker name that `holds` does not know. Two
        // queues of one process therefore need different names, or one would release the jobs of the other.
        db.worker = format!("{}:{}", db.worker, QUEUES.fetch_add(1, Ordering::Relaxed));
        let outage = OutageMonitor::new(db.clock.clone(), db.table.shown(), &db, on_outage);
        let shape = match patience {
            Some(limit) => outage.connect(limit, || db.shape()).await?,
            None => db.shape().await?,
        };
        let kind = |column: &str| shape.get(column).map_or("text", String::as_str);
        let sql = JobStatements::new(&db.table, kind("id"), kind("payload"));
        let holds = Holds::new(db.lease, db.clock.clone());
        let shared = Arc::new(QueueShared {
            holds: Arc::clone(&holds),
            sql,
            notifications: JobNotifications::default(),
            claim_batches: Batcher::default(),
            completion_batches: Batcher::default(),
            state: Mutex::new(QueueState { resume_from: None, next_sweep: Time::ZERO }),
            claims: RwLock::new(()),
            unanswered_claim: AtomicBool::new(false),
            outage,
            db,
        });
        // Exported as 0 from the start: a counter that first appears with a value of 1 shows no increase on dashboards.
        telemetry::job_reclaimed(&shared.db.table.shown(), 0);
        let rows: Weak<dyn Rows> = Arc::<QueueShared>::downgrade(&shared);
        holds.keep(rows);
        Ok(Self(shared))
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
        claimed.map_err(|error| self.at(error))
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
        let completed = run_detached(async move { shared.complete_many(jobs).await });
        completed.await.map_err(|error| self.at(error))
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

/// Runs `work` to its end in a task of its own, even if the caller drops the future.
pub(super) async fn run_detached<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(work).await.unwrap_or_else(|_| Err(runtime_ended()))
}

fn runtime_ended() -> Error {
    Error::new(ErrorKind::Shutdown, "the runtime was shut down")
}

/// Copies an error for each of `count` callers.
fn repeat_error(error: Error, count: usize) -> impl Iterator<Item = Error> {
    let kind = error.kind();
    let cause = Arc::new(error);
    (0..count)
        .map(move |_| Error::new(kind, "the batched request failed").because(Arc::clone(&cause)))
}

impl QueueShared {
    pub(super) fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the next claim scan from the top.
    pub(super) fn restart_scan(&self) {
        self.state().resume_from = None;
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let payloads: Vec<&str> = jobs.iter().map(|job| job.payload.as_str()).collect();
        let priorities: Vec<i32> = jobs.iter().map(|job| job.priority).collect();
        let delays: Vec<i64> = jobs.iter().map(|job| micros(job.delay)).collect();
        let attempts: Vec<i32> = jobs.iter().map(|job| job.max_attempts).collect();
        let keys: Vec<Option<&str>> = jobs.iter().map(|job| job.unique_key.as_deref()).collect();
        let notify = jobs.iter().any(|job| job.delay.is_zero());
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 6] = [
            (&payloads, Type::TEXT_ARRAY),
            (&priorities, Type::INT4_ARRAY),
            (&delays, Type::INT8_ARRAY),
            (&attempts, Type::INT4_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&notify, Type::BOOL),
        ];
        let (rows, _) = self.db.ask(&self.sql.enqueue, &parameters, self.db.by()).await?;
        self.restart_scan();
        let mut new: HashMap<String, String> = HashMap::new();
        let mut unnamed = Vec::new();
        for row in &rows {
            match row.get::<_, Option<String>>(2) {
                Some(key) => drop(new.insert(key, row.get(1))),
                None => unnamed.push(row.get(1)),
            }
        }
        let known = self.existing(jobs, &new).await?;
        let mut unnamed = unnamed.into_iter();
        let enqueued = |job: &NewJob| match &job.unique_key {
            None => Some(Enqueued { id: unnamed.next()?, new: true }),
            Some(key) => match new.remove(key) {
                Some(id) => Some(Enqueued { id, new: true }),
                None => Some(Enqueued { id: known.get(key)?.clone(), new: false }),
            },
        };
        let all: Option<Vec<Enqueued>> = jobs.iter().map(enqueued).collect();
        // The open job of that key ended between the two statements: the first did not insert, the second finds no row.
        let gone = "the open job of the same unique key ended while this one was enqueued: enqueue it again";
        all.ok_or_else(|| Error::new(ErrorKind::Contention, gone))
    }

    /// Ids of the open jobs, by unique key, that kept jobs of `jobs` from being inserted. A key may occur twice in
    /// `jobs`.
    async fn existing(
        &self,
        jobs: &[NewJob],
        new: &HashMap<String, String>,
    ) -> Result<HashMap<String, String>> {
        let named: Vec<&str> = jobs.iter().filter_map(|job| job.unique_key.as_deref()).collect();
        if named.len() == new.len() {
            return Ok(HashMap::new());
        }
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 1] =
            [(&named, Type::TEXT_ARRAY)];
        let (rows, _) = self.db.ask(&self.sql.existing, &parameters, self.db.by()).await?;
        Ok(rows.iter().map(|row| (row.get(2), row.get(1))).collect())
    }

    /// Serves claim requests batch by batch until none waits. Guards whose caller is gone are dropped, which releases
    /// their jobs.
    async fn serve_claims(self: Arc<Self>) {
        while let Some(mut batch) = self.claim_batches.next_batch() {
            batch.retain(|request| !request.reply.is_closed());
            let limit =
                batch.iter().map(|request| request.limit).sum::<usize>().min(MAX_BATCH_JOBS);
            if limit > 0 {
                match self.claim(limit).await {
                    Ok(jobs) => {
                        let mut jobs = jobs.into_iter();
                        for request in batch {
                            let share = jobs.by_ref().take(request.limit).collect();
                            drop(request.reply.send(Ok(share)));
                        }
                    }
                    Err(error) => {
                        let errors = repeat_error(error, batch.len());
                        for (request, error) in batch.into_iter().zip(errors) {
                            drop(request.reply.send(Err(error)));
                        }
                    }
                }
            }
        }
    }

    /// Serves completion requests batch by batch until none waits.
    pub(super) async fn serve_completions(self: Arc<Self>) {
        while let Some(batch) = self.completion_batches.next_batch() {
            match self.complete_batch(&batch).await {
                Ok(done) => {
                    for request in batch {
                        let completed = done.contains(&request.id);
                        drop(request.reply.send(Ok(completed)));
                    }
                }
                Err(error) => {
                    let errors = repeat_error(error, batch.len());
                    for (request, error) in batch.into_iter().zip(errors) {
                        drop(request.reply.send(Err(error)));
                    }
                }
            }
        }
    }

    /// Completes a batch and returns the ids of the completed jobs.
    async fn complete_batch(&self, batch: &[CompleteRequest]) -> Result<HashSet<String>> {
        let by = self.db.clock.now() + self.db.lease.request_limit().min(BATCH_COMPLETE_TIMEOUT);
        if let [CompleteRequest { id, number, .. }] = batch {
            let parameters: [Parameter<'_>; 3] =
                [(id, Type::TEXT), (number, Type::INT8), (&self.db.worker, Type::TEXT)];
            let (rows, _) = self.db.ask(&self.sql.complete, &parameters, by).await?;
            return Ok(rows.iter().map(|_| id.clone()).collect());
        }
        let mut names: Vec<(&str, i64)> =
            batch.iter().map(|request| (request.id.as_str(), request.number)).collect();
        self.complete_named(&mut names, by).await
    }

    /// Completes rows by id and token, and returns the ids of the completed rows.
    ///
    /// The rows are named in the order of their ids. Two batches that overlap, as when a late worker completes jobs
    /// that another worker has claimed since, then lock the rows in one order and do not deadlock.
    async fn complete_named(&self, names: &mut [(&str, i64)], by: Time) -> Result<HashSet<String>> {
        names.sort_unstable();
        let (ids, numbers): (Vec<&str>, Vec<i64>) = names.iter().copied().unzip();
        let parameters: [Parameter<'_>; 3] =
            [(&ids, Type::TEXT_ARRAY), (&numbers, Type::INT8_ARRAY), (&self.db.worker, Type::TEXT)];
        let (rows, _) = self.db.ask(&self.sql.complete_many, &parameters, by).await?;
        Ok(rows.iter().map(|row| row.get(1)).collect())
    }

    async fn claim(self: &Arc<Self>, limit: usize) -> Result<Vec<JobGuard>> {
        if self.unanswered_claim.load(Ordering::Relaxed) {
            self.release_unanswered().await?;
        }
        if self.sweep_is_due() {
            self.sweep().await?;
        }
        let claims = self.claims.read().await;
        let mut claimed = self.claim_resuming(limit).await?;
        if claimed.len() < limit {
            let left = limit - claimed.len();
            match self.claim_from(left, None).await {
                Ok(more) => claimed.extend(more),
                // The jobs that were claimed matter more than the error of the second statement.
                Err(_) if !claimed.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        drop(claims);
        Ok(claimed)
    }

    /// Claims from the position where the last claim ended; nothing if that was longer ago than [`RESUME_WINDOW`].
    async fn claim_resuming(self: &Arc<Self>, limit: usize) -> Result<Vec<JobGuard>> {
        let resume_from = self.state().resume_from.clone();
        match resume_from.filter(|(_, until)| self.db.clock.now() < *until) {
            Some((place, until)) => self.claim_from(limit, Some((&place, until))).await,
            None => Ok(Vec::new()),
        }
    }

    async fn claim_from(
        self: &Arc<Self>,
        limit: usize,
        from: Option<(&JobOrder<String>, Time)>,
    ) -> Result<Vec<JobGuard>> {
        let (ttl, max_rows) = (micros(self.db.lease.ttl()), i64::try_from(limit).unwrap_or(1));
        let mut parameters: Vec<(&(dyn tokio_postgres::types::ToSql + Sync), Type)> =
            vec![(&self.db.worker, Type::TEXT), (&ttl, Type::INT8), (&max_rows, Type::INT8)];
        let sql = match from {
            None => &self.sql.claim,
            Some((place, _)) => {
                parameters.push((&place.priority, Type::INT8));
                parameters.push((&place.created_at, Type::INT8));
                parameters.push((&place.id, Type::TEXT));
                &self.sql.claim_on
            }
        };
        let by = self.db.clock.now() + self.db.lease.request_limit().min(super::REQUEST_TIMEOUT);
        let answer = self.db.grant(sql, &parameters, by).await;
        let (rows, reading) = answer.inspect_err(|error| {
            if error.kind() == ErrorKind::Unknown {
                self.unanswered_claim.store(true, Ordering::Relaxed);
            }
        })?;
        let mut placed: Vec<(JobOrder<String>, &Row)> =
            rows.iter().map(|row| (place(row), row)).collect();
        placed.sort_by(|a, b| a.0.cmp(&b.0));
        let last = placed.last().map(|(place, _)| place.clone()).filter(|_| rows.len() == limit);
        self.state().resume_from = last.map(|last| {
            let until =
                from.map_or_else(|| self.db.clock.now() + RESUME_WINDOW, |(_, until)| until);
            (last, until)
        });
        let guards: Vec<JobGuard> =
            placed.into_iter().filter_map(|(_, row)| self.guard(row, reading)).collect();
        if guards.len() < rows.len() {
            // The answer arrived after the deadline of these leases: no worker may start on them. The next claim
            // releases them, and their attempts do not count, as after a claim without an answer.
            self.unanswered_claim.store(true, Ordering::Relaxed);
            if guards.is_empty() {
                let message = "the answer to the claim arrived after the deadline of its lease";
                return Err(Error::new(ErrorKind::Unknown, message));
            }
        }
        Ok(guards)
    }

    /// Makes the guard of a claimed row; `None` if the deadline of its lease has passed already.
    fn guard(self: &Arc<Self>, row: &Row, reading: Reading) -> Option<JobGuard> {
        let (id, number): (String, i64) = (row.get(1), row.get(2));
        let count = |n: i32| u32::try_from(n).unwrap_or_default();
        let name = RowName { id: id.clone(), part: String::new(), number };
        let rows: Arc<dyn Rows> = Arc::<Self>::clone(self);
        let ticket = self.holds.admit(name, reading, rows)?;
        let (epoch, low) = (row.get::<_, i64>(8).unsigned_abs(), number.unsigned_abs());
        let data = JobData {
            id,
            payload: row.get::<_, Option<String>>(7).unwrap_or_else(|| "null".to_owned()),
            attempt: count(row.get(3)),
            max_attempts: row.get::<_, Option<i32>>(4).map(count),
            number,
            token: FencingToken::new(epoch, low),
            clock: self.db.clock.clone(),
            stop_grace: self.db.lease.stop_grace(),
            look: ticket.look.clone(),
            pid: std::process::id(),
        };
        Some(JobGuard::new(Job(Arc::new(data)), ticket, Arc::clone(self)))
    }

    /// Releases the rows that a claim without an answer may have locked.
    async fn release_unanswered(&self) -> Result<()> {
        // Waits for claims in flight, whose rows are not in `holds` yet.
        let exclusive = self.claims.write().await;
        let known = self.holds.ids();
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] =
            [(&self.db.worker, Type::TEXT), (&known, Type::TEXT_ARRAY)];
        let (rows, _) = self.db.ask(&self.sql.unanswered, &parameters, self.db.by()).await?;
        if !rows.is_empty() {
            // In the order of ids, as in `complete_named`.
            let mut names: Vec<(&str, i64)> =
                rows.iter().map(|row| (row.get(1), row.get(2))).collect();
            names.sort_unstable();
            let (ids, numbers): (Vec<&str>, Vec<i64>) = names.into_iter().unzip();
            let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] = [
                (&ids, Type::TEXT_ARRAY),
                (&numbers, Type::INT8_ARRAY),
                (&self.db.worker, Type::TEXT),
            ];
            self.db.ask(&self.sql.clean_up, &parameters, self.db.by()).await?;
        }
        self.unanswered_claim.store(false, Ordering::Relaxed);
        drop(exclusive);
        Ok(())
    }

    async fn complete_many(&self, jobs: Vec<JobGuard>) -> Result<Vec<Job>> {
        let mut lost = Vec::new();
        for chunk in jobs.chunks(MAX_BATCH_JOBS) {
            let mut names: Vec<(&str, i64)> =
                chunk.iter().map(|job| (job.id(), job.lease_token())).collect();
            let done = self.complete_named(&mut names, self.db.by()).await?;
            for job in chunk {
                job.mark_settled();
                if !done.contains(job.id()) {
                    lost.push((**job).clone());
                }
            }
        }
        Ok(lost)
    }
}

/// Position of a claimed row in the order of claims.
fn place(row: &Row) -> JobOrder<String> {
    JobOrder { priority: row.get(5), created_at: row.get(6), id: row.get(1) }
}

#[async_trait]
impl RenewalStatement for QueueShared {
    type Name = RowName;

    async fn renew(&self, names: &[RowName], by: Time) -> Result<(Reading, Vec<RenewalOutcome>)> {
        let ids: Vec<&str> = names.iter().map(|name| name.id.as_str()).collect();
        let numbers: Vec<i64> = names.iter().map(|name| name.number).collect();
        let ttl = micros(self.db.lease.ttl());
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 4] = [
            (&ids, Type::TEXT_ARRAY),
            (&numbers, Type::INT8_ARRAY),
            (&self.db.worker, Type::TEXT),
            (&ttl, Type::INT8),
        ];
        self.outage.sent();
        let answer = self.db.ask(&self.sql.heartbeat, &parameters, by).await;
        self.outage.ended(&answer);
        let (rows, reading) = answer?;
        Ok((reading, outcomes(names.len(), &rows)))
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

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("table", &self.table()).finish_non_exhaustive()
    }
}
