//! A queue: enqueue, claim, complete.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tenure_core::jobs::{JobOrder, RenewalOutcome};
use tenure_core::keeper::Loss;
use tenure_core::{FencingToken, Time};
use tokio::sync::{RwLock, oneshot};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::batcher::Batcher;
use super::db::{JobDb, invalid};
use super::heart::{self, Holds, RowName, Rows};
use super::job::{Enqueued, Job, JobData, NewJob};
use super::notifications::JobNotifications;
use super::sql::JobStatements;
use super::{JobGuard, Options, schema};
use crate::store::pg::clock::{Reading, micros};
use crate::store::pg::connect::Parameter;
use crate::{Error, ErrorKind, Result, telemetry};

/// The most jobs of one claim, and of one statement that enqueues.
const MAX_BATCH_JOBS: usize = 1_000;
/// For how long a claim may begin where the last one ended: who is more important but came meanwhile waits no longer.
const RESUME_WINDOW: Duration = Duration::from_millis(50);
/// How long a completion may take that others wait for, too: one whose row somebody has locked is then tried alone.
const BATCH_COMPLETE_TIMEOUT: Duration = Duration::from_secs(3);

/// A queue of jobs in a table. A clone is the same queue.
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
/// job.complete().await?; // `Lost` where another has it by now
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
    /// Claims under way share it; whoever cleans up after one without an answer has it alone.
    claims: RwLock<()>,
    /// A claim had no answer: it may have left rows that nobody knows to be ours.
    unanswered_claim: AtomicBool,
}

/// One who asks for jobs.
struct ClaimRequest {
    limit: usize,
    reply: oneshot::Sender<Result<Vec<JobGuard>>>,
}

/// One who says that a job is done; whether it was still its own.
pub(super) struct CompleteRequest {
    pub(super) id: String,
    pub(super) number: i64,
    pub(super) reply: oneshot::Sender<Result<bool>>,
}

pub(super) struct QueueState {
    /// Where the last claim ended, and until when the next one may begin there.
    resume_from: Option<(JobOrder<String>, Time)>,
    pub(super) next_sweep: Time,
}

impl Queue {
    /// The queue in this table, as [`Options::default`] says. `url` is a `postgres:` URL, as for locks; `prepare=on` or
    /// `prepare=off` in it overrules what is found out of poolers.
    ///
    /// # Errors
    ///
    /// `Misconfigured` where the table is missing or of another shape, `Denied` without rights, `Unavailable` where the
    /// server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    pub async fn connect(url: &str, table: &str) -> Result<Self> {
        Self::connect_with(url, table, Options::default()).await
    }

    /// The same with other options.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect); `Invalid` also where the options contradict each other.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing.
    pub async fn connect_with(url: &str, table: &str, options: Options) -> Result<Self> {
        static QUEUES: AtomicU64 = AtomicU64::new(0);
        let mut link = JobDb::new(url, table, options, || Box::new(schema::job_columns()))?;
        // What one queue left behind must not be taken for what another has.
        link.worker = format!("{}:{}", link.worker, QUEUES.fetch_add(1, Ordering::Relaxed));
        let shape = link.shape().await?;
        let kind = |column: &str| shape.get(column).map_or("text", String::as_str);
        let sql = JobStatements::new(&link.table, kind("id"), kind("payload"));
        let holds = Holds::new(link.lease, link.clock.clone());
        let shared = Arc::new(QueueShared {
            holds: Arc::clone(&holds),
            sql,
            notifications: JobNotifications::default(),
            claim_batches: Batcher::default(),
            completion_batches: Batcher::default(),
            state: Mutex::new(QueueState { resume_from: None, next_sweep: Time::ZERO }),
            claims: RwLock::new(()),
            unanswered_claim: AtomicBool::new(false),
            db: link,
        });
        // Shown as 0 from the start: a counter that appears with its first count hides that count from boards.
        telemetry::job_reclaimed(&shared.db.table.shown(), 0);
        let rows: Weak<dyn Rows> = Arc::<QueueShared>::downgrade(&shared);
        tokio::spawn(heart::keep(holds, rows));
        Ok(Self(shared))
    }

    /// Who we are in `locked_by`.
    pub fn worker(&self) -> &str {
        &self.0.db.worker
    }

    /// Where the table is, without secrets.
    pub fn store(&self) -> String {
        self.0.db.pool.settings().to_string()
    }

    /// The table.
    pub fn table(&self) -> String {
        self.0.db.table.shown()
    }

    /// How the queue is kept.
    pub fn options(&self) -> Options {
        self.0.db.options
    }

    /// Enqueues a job. Idle workers are told.
    ///
    /// # Errors
    ///
    /// `Invalid` where it makes no sense, `Misconfigured` where the table has columns that must be given and that we do not
    /// know; `Unknown` where no answer came: it may be enqueued.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the job enqueued or not.
    pub async fn enqueue(&self, job: NewJob) -> Result<Enqueued> {
        let enqueued = self.enqueue_many(vec![job]).await?.pop();
        enqueued
            .ok_or_else(|| self.at(Error::new(ErrorKind::Unknown, "no answer came for the job")))
    }

    /// Enqueues many jobs, a thousand in one statement, and says what became of each in their order.
    ///
    /// # Errors
    ///
    /// As [`enqueue`](Self::enqueue). Nothing is enqueued where one makes no sense.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves whole statements done or not.
    pub async fn enqueue_many(&self, jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
        jobs.iter().try_for_each(NewJob::check).map_err(|error| self.at(error))?;
        let shared = Arc::clone(&self.0);
        let enqueued = run_detached(async move {
            let mut enqueued = Vec::with_capacity(jobs.len());
            for some in jobs.chunks(MAX_BATCH_JOBS) {
                enqueued.extend(shared.enqueue(some).await?);
            }
            Ok(enqueued)
        });
        enqueued.await.map_err(|error| self.at(error))
    }

    /// Claims the next job: the most important, and of those the oldest. `None` where there is none now.
    ///
    /// # Errors
    ///
    /// `Unknown` where no answer came: what may have been claimed is given back by the next claim, or when its lease ends.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives back what was claimed.
    pub async fn claim(&self) -> Result<Option<JobGuard>> {
        Ok(self.claim_many(1).await?.pop())
    }

    /// Claims up to so many jobs in one statement, in the order in which single claims would.
    ///
    /// # Errors
    ///
    /// As [`claim`](Self::claim); `Invalid` where it asks for none.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives back what was claimed.
    pub async fn claim_many(&self, limit: usize) -> Result<Vec<JobGuard>> {
        if limit == 0 {
            return Err(self.at(invalid("a claim of 0 jobs makes no sense")));
        }
        let (reply, answer) = oneshot::channel();
        let asking = ClaimRequest { limit: limit.min(MAX_BATCH_JOBS), reply };
        if self.0.claim_batches.join(asking) {
            tokio::spawn(Arc::clone(&self.0).serve_claims());
        }
        let claimed = answer.await.unwrap_or_else(|_| Err(runtime_ended()));
        claimed.map_err(|error| self.at(error))
    }

    /// Completes many jobs in one statement. Those of which another has become the holder are returned: they were left
    /// alone.
    ///
    /// # Errors
    ///
    /// `Unknown` or `Unavailable` where no clear answer came: the jobs are given back unless they were completed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future completes them all the same.
    pub async fn complete_many(&self, jobs: Vec<JobGuard>) -> Result<Vec<Job>> {
        let shared = Arc::clone(&self.0);
        let completed = run_detached(async move { shared.complete_many(jobs).await });
        completed.await.map_err(|error| self.at(error))
    }

    /// The statements of a claim and a completion, one by one and in batches, to measure the server alone with.
    #[doc(hidden)]
    pub async fn statements(&self) -> Result<[String; 3]> {
        let QueueShared { db: link, sql, .. } = &*self.0;
        let by = link.by();
        let mut lent = link.connection(by).await?;
        link.incarnation.ensure_epoch(&mut lent, by).await?;
        Ok([link.incarnation.fill(&sql.claim), sql.complete.clone(), sql.complete_many.clone()])
    }

    pub(super) fn at(&self, error: Error) -> Error {
        error.at(&self.0.db)
    }
}

/// Sees `work` through, whatever becomes of its caller.
pub(super) async fn run_detached<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(work).await.unwrap_or_else(|_| Err(runtime_ended()))
}

fn runtime_ended() -> Error {
    Error::new(ErrorKind::Shutdown, "the runtime was shut down")
}

/// The same error for each of several.
fn repeat_error(error: Error, among: usize) -> impl Iterator<Item = Error> {
    let kind = error.kind();
    let cause = Arc::new(error);
    (0..among).map(move |_| {
        Error::new(kind, "the request failed, with those of others").because(Arc::clone(&cause))
    })
}

impl QueueShared {
    pub(super) fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next claim begins at the top.
    pub(super) fn restart_scan(&self) {
        self.state().resume_from = None;
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let payloads: Vec<&str> = jobs.iter().map(|job| job.payload.as_str()).collect();
        let priorities: Vec<i32> = jobs.iter().map(|job| job.priority).collect();
        let delays: Vec<i64> = jobs.iter().map(|job| micros(job.delay)).collect();
        let attempts: Vec<i32> = jobs.iter().map(|job| job.max_attempts).collect();
        let keys: Vec<Option<&str>> = jobs.iter().map(|job| job.unique_key.as_deref()).collect();
        let tell = jobs.iter().any(|job| job.delay.is_zero());
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 6] = [
            (&payloads, Type::TEXT_ARRAY),
            (&priorities, Type::INT4_ARRAY),
            (&delays, Type::INT8_ARRAY),
            (&attempts, Type::INT4_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&tell, Type::BOOL),
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
        // Completed between the two statements: nobody can say more.
        let gone = "a job of the same unique key was there, and is done by now: enqueue it again";
        all.ok_or_else(|| Error::new(ErrorKind::Contention, gone))
    }

    /// The open jobs whose keys were taken; and those that are named twice.
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

    /// Claims for all who ask, group after group. What nobody waits for any more is given back.
    async fn serve_claims(self: Arc<Self>) {
        while let Some(mut group) = self.claim_batches.next_batch() {
            group.retain(|asking| !asking.reply.is_closed());
            let most = group.iter().map(|asking| asking.limit).sum::<usize>().min(MAX_BATCH_JOBS);
            if most > 0 {
                match self.claim(most).await {
                    Ok(jobs) => {
                        let mut jobs = jobs.into_iter();
                        for asking in group {
                            let some = jobs.by_ref().take(asking.limit).collect();
                            drop(asking.reply.send(Ok(some)));
                        }
                    }
                    Err(error) => {
                        let errors = repeat_error(error, group.len());
                        for (asking, error) in group.into_iter().zip(errors) {
                            drop(asking.reply.send(Err(error)));
                        }
                    }
                }
            }
        }
    }

    /// Completes for all who ask, group after group.
    pub(super) async fn serve_completions(self: Arc<Self>) {
        while let Some(group) = self.completion_batches.next_batch() {
            match self.complete_batch(&group).await {
                Ok(done) => {
                    for completing in group {
                        let ours = done.contains(&completing.id);
                        drop(completing.reply.send(Ok(ours)));
                    }
                }
                Err(error) => {
                    let errors = repeat_error(error, group.len());
                    for (completing, error) in group.into_iter().zip(errors) {
                        drop(completing.reply.send(Err(error)));
                    }
                }
            }
        }
    }

    /// The ids of those that were completed.
    async fn complete_batch(&self, group: &[CompleteRequest]) -> Result<HashSet<String>> {
        let by = self.db.clock.now() + self.db.lease.request_limit().min(BATCH_COMPLETE_TIMEOUT);
        if let [CompleteRequest { id, number, .. }] = group {
            let parameters: [Parameter<'_>; 3] =
                [(id, Type::TEXT), (number, Type::INT8), (&self.db.worker, Type::TEXT)];
            let (rows, _) = self.db.ask(&self.sql.complete, &parameters, by).await?;
            return Ok(rows.iter().map(|_| id.clone()).collect());
        }
        let mut names: Vec<(&str, i64)> =
            group.iter().map(|completing| (completing.id.as_str(), completing.number)).collect();
        self.complete_named(&mut names, by).await
    }

    /// Completes rows by name. In one order, whoever else completes some of them late.
    async fn complete_named(&self, names: &mut [(&str, i64)], by: Time) -> Result<HashSet<String>> {
        names.sort_unstable();
        let (ids, numbers): (Vec<&str>, Vec<i64>) = names.iter().copied().unzip();
        let parameters: [Parameter<'_>; 3] =
            [(&ids, Type::TEXT_ARRAY), (&numbers, Type::INT8_ARRAY), (&self.db.worker, Type::TEXT)];
        let (rows, _) = self.db.ask(&self.sql.complete_many, &parameters, by).await?;
        Ok(rows.iter().map(|row| row.get(1)).collect())
    }

    async fn claim(self: &Arc<Self>, most: usize) -> Result<Vec<JobGuard>> {
        if self.unanswered_claim.load(Ordering::Relaxed) {
            self.release_unanswered().await?;
        }
        if self.sweep_is_due() {
            self.sweep().await?;
        }
        let claims = self.claims.read().await;
        let mut claimed = self.claim_resuming(most).await?;
        if claimed.len() < most {
            let left = most - claimed.len();
            match self.claim_from(left, None).await {
                Ok(more) => claimed.extend(more),
                // What is there already is worth more than why there is no more.
                Err(_) if !claimed.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        drop(claims);
        Ok(claimed)
    }

    /// Claims from where the last claim ended, unless that was too long ago.
    async fn claim_resuming(self: &Arc<Self>, most: usize) -> Result<Vec<JobGuard>> {
        let onward = self.state().resume_from.clone();
        match onward.filter(|(_, until)| self.db.clock.now() < *until) {
            Some((place, until)) => self.claim_from(most, Some((&place, until))).await,
            None => Ok(Vec::new()),
        }
    }

    async fn claim_from(
        self: &Arc<Self>,
        most: usize,
        from: Option<(&JobOrder<String>, Time)>,
    ) -> Result<Vec<JobGuard>> {
        let (ttl, limit) = (micros(self.db.lease.ttl()), i64::try_from(most).unwrap_or(1));
        let mut parameters: Vec<(&(dyn tokio_postgres::types::ToSql + Sync), Type)> =
            vec![(&self.db.worker, Type::TEXT), (&ttl, Type::INT8), (&limit, Type::INT8)];
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
        let asked = self.db.grant(sql, &parameters, by).await;
        let (rows, reading) = asked.inspect_err(|error| {
            if error.kind() == ErrorKind::Unknown {
                self.unanswered_claim.store(true, Ordering::Relaxed);
            }
        })?;
        let mut placed: Vec<(JobOrder<String>, &Row)> =
            rows.iter().map(|row| (place(row), row)).collect();
        placed.sort_by(|a, b| a.0.cmp(&b.0));
        let last = placed.last().map(|(place, _)| place.clone()).filter(|_| rows.len() == most);
        self.state().resume_from = last.map(|last| {
            let until =
                from.map_or_else(|| self.db.clock.now() + RESUME_WINDOW, |(_, until)| until);
            (last, until)
        });
        let guards: Vec<JobGuard> =
            placed.into_iter().filter_map(|(_, row)| self.guard(row, reading)).collect();
        if guards.len() < rows.len() {
            // Their leases are as good as over: no worker may begin with them. The next claim gives them back, with their
            // attempts, as it does after a claim without an answer.
            self.unanswered_claim.store(true, Ordering::Relaxed);
            if guards.is_empty() {
                let message = "the answer to the claim came when its lease was as good as over";
                return Err(Error::new(ErrorKind::Unknown, message));
            }
        }
        Ok(guards)
    }

    /// The guard of a claimed row; `None` where its own deadline has passed already.
    fn guard(self: &Arc<Self>, row: &Row, reading: Reading) -> Option<JobGuard> {
        let (id, number): (String, i64) = (row.get(1), row.get(2));
        let count = |n: i32| u32::try_from(n).unwrap_or_default();
        let name = RowName { id: id.clone(), part: String::new(), number };
        let rows: Arc<dyn Rows> = Arc::<Self>::clone(self);
        let ticket = self.holds.admit(name, reading, rows)?;
        let (epoch, low) = (row.get::<_, i64>(8).unsigned_abs(), number.unsigned_abs());
        let about = JobData {
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
        Some(JobGuard::new(Job(Arc::new(about)), ticket, Arc::clone(self)))
    }

    /// Gives back what a claim without an answer may have left. No claim is under way meanwhile.
    async fn release_unanswered(&self) -> Result<()> {
        let alone = self.claims.write().await;
        let known = self.holds.ids();
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] =
            [(&self.db.worker, Type::TEXT), (&known, Type::TEXT_ARRAY)];
        self.db.ask(&self.sql.clean_up, &parameters, self.db.by()).await?;
        self.unanswered_claim.store(false, Ordering::Relaxed);
        drop(alone);
        Ok(())
    }

    async fn complete_many(&self, jobs: Vec<JobGuard>) -> Result<Vec<Job>> {
        let mut lost = Vec::new();
        for some in jobs.chunks(MAX_BATCH_JOBS) {
            let mut names: Vec<(&str, i64)> =
                some.iter().map(|job| (job.id(), job.lease_token())).collect();
            let done = self.complete_named(&mut names, self.db.by()).await?;
            for job in some {
                job.mark_settled();
                if !done.contains(job.id()) {
                    lost.push((**job).clone());
                }
            }
        }
        Ok(lost)
    }
}

/// Where a claimed row stood.
fn place(row: &Row) -> JobOrder<String> {
    JobOrder { priority: row.get(5), created_at: row.get(6), id: row.get(1) }
}

#[async_trait]
impl Rows for QueueShared {
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
        let (rows, reading) = self.db.ask(&self.sql.heartbeat, &parameters, by).await?;
        Ok((reading, verdicts(names.len(), &rows)))
    }

    async fn drop_one(&self, name: RowName) {
        let (none, why) = (0_i64, "the worker dropped it");
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 5] = [
            (&name.id, Type::TEXT),
            (&name.number, Type::INT8),
            (&self.db.worker, Type::TEXT),
            (&why, Type::TEXT),
            (&none, Type::INT8),
        ];
        // Its lease ends by itself where this fails.
        if let Err(error) = self.db.ask(&self.sql.retry, &parameters, self.db.by()).await {
            tracing::warn!(name: "tenure.release_failed", id = name.id, %error);
        }
    }
}

/// What a heartbeat's answer says of each row that it asked for.
pub(super) fn verdicts(asked: usize, rows: &[Row]) -> Vec<RenewalOutcome> {
    let mut verdicts = vec![RenewalOutcome::Refused(Loss::Taken); asked];
    for row in rows {
        let nth = usize::try_from(row.get::<_, i64>(1)).unwrap_or_default();
        let Some(verdict) = nth.checked_sub(1).and_then(|nth| verdicts.get_mut(nth)) else {
            continue;
        };
        if row.get(2) {
            *verdict = RenewalOutcome::Renewed;
        } else if row.get(3) {
            *verdict = RenewalOutcome::PassedOver;
        }
    }
    verdicts
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
