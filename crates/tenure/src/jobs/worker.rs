//! A worker: claims jobs, runs a handler for each, and records the outcome.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tenure_core::Random;
use tenure_core::retry::{Retry as _, RetryContext};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::listener::JobListener;
use super::options::Options;
use super::retention::Retention;
use super::{Job, JobGuard, Queue};
use crate::mutex::Mutex;
use crate::race::{Either, race};
use crate::{Error, ErrorKind, Result, identity, telemetry};

/// Shortest and longest pause of a worker after a failed claim; the pause doubles with each failure.
const ERROR_PAUSE_RANGE: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));
/// Time that an aborted handler has to end before its job is released.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Failure of a handler: the reason, and what to do with the job.
///
/// The operator `?` converts any error into a failure that retries the job after a pause.
#[derive(Debug)]
pub struct Failure {
    why: String,
    action: FailureAction,
}

#[derive(Debug)]
enum FailureAction {
    Retry,
    RetryIn(Duration),
    Fail,
    Release,
}

impl Failure {
    /// Retries the job after a pause that grows with every attempt.
    pub fn retry(why: impl Into<String>) -> Self {
        Self { why: why.into(), action: FailureAction::Retry }
    }

    /// Retries the job after this pause.
    pub fn retry_in(delay: Duration, why: impl Into<String>) -> Self {
        Self { why: why.into(), action: FailureAction::RetryIn(delay) }
    }

    /// Marks the job as failed: no further attempt can succeed.
    pub fn permanent(why: impl Into<String>) -> Self {
        Self { why: why.into(), action: FailureAction::Fail }
    }

    /// Releases the job; the attempt does not count.
    pub fn released() -> Self {
        Self { why: String::new(), action: FailureAction::Release }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::retry(Error::chain_of(&error))
    }
}

/// Outcome of a claimed job.
#[derive(Debug)]
#[non_exhaustive]
pub enum JobOutcome {
    /// The job is completed.
    Completed,
    /// The attempt failed for this reason; the job will be retried.
    Retried(String),
    /// The job failed for good, for this reason.
    Failed(String),
    /// The job was lost before its outcome could be recorded, for this reason.
    Lost(String),
    /// The job was released; the attempt does not count.
    Released,
    /// The outcome could not be recorded: the job is available again when its lease ends, at the latest.
    Unsettled(Error),
}

impl JobOutcome {
    /// Label value in the metrics.
    const fn label(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Retried(_) => "retried",
            Self::Failed(_) => "failed",
            Self::Lost(_) => "lost",
            Self::Released => "released",
            Self::Unsettled(_) => "unsettled",
        }
    }
}

/// Number of jobs by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerStats {
    /// Jobs whose handler runs now.
    pub running: u64,
    /// Completed jobs.
    pub completed: u64,
    /// Failed attempts that will be retried.
    pub retried: u64,
    /// Jobs that failed for good.
    pub failed: u64,
    /// Jobs that were lost while their handler ran, or whose outcome could not be recorded.
    pub lost: u64,
    /// Released jobs.
    pub released: u64,
}

/// Counters of a worker, readable while it runs. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    begun: AtomicU64,
    completed: AtomicU64,
    retried: AtomicU64,
    failed: AtomicU64,
    lost: AtomicU64,
    released: AtomicU64,
}

impl Progress {
    /// Current values of the counters.
    pub fn stats(&self) -> WorkerStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { begun, completed, retried, failed, lost, released } = &*self.0;
        let [completed, retried, failed, lost, released] =
            [completed, retried, failed, lost, released].map(read);
        let ended = completed + retried + failed + lost + released;
        let running = read(begun).saturating_sub(ended);
        WorkerStats { running, completed, retried, failed, lost, released }
    }

    fn record(&self, outcome: &JobOutcome) {
        let counter = match outcome {
            JobOutcome::Completed => &self.0.completed,
            JobOutcome::Retried(_) => &self.0.retried,
            JobOutcome::Failed(_) => &self.0.failed,
            JobOutcome::Lost(_) | JobOutcome::Unsettled(_) => &self.0.lost,
            JobOutcome::Released => &self.0.released,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

type OutcomeCallback = Arc<dyn Fn(&Job, &JobOutcome) + Send + Sync>;

/// Runs a handler for each job of a queue.
///
/// A handler whose job is lost is dropped at its next await. A handler that completes its job itself, by
/// [`sql::complete`](super::sql::complete) in its own transaction, is left to end, and its job counts as completed. On shutdown the worker stops claiming and waits for its
/// handlers until its shutdown budget is used up. Then it drops the remaining handlers and releases their jobs.
///
/// ```
/// use tenure::jobs::{Job, Worker};
/// # use tenure::jobs::{NewJob, Queue, Schema};
///
/// # async fn build(_: &str) -> Result<(), std::io::Error> { Ok(()) }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let service = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/example.rs"));
/// # let Some(url) = service("TENURE_TEST_POSTGRES") else { return Ok(()) };
/// # let table = format!("doc_worker_{}", std::process::id());
/// # Schema::of_queue(&table)?.apply(&url).await?;
/// # let queue = Queue::connect(&url, &table).await?;
/// # queue.enqueue(NewJob::json("7")?).await?;
/// let worker = Worker::new(queue, async |job: Job| {
///     build(job.payload()).await?; // an error: retried after a pause
///     Ok(())
/// });
/// # let worker = worker.until_empty(true);
/// let ctrl_c = std::future::pending();
/// let stats = worker.concurrency(4).run(ctrl_c).await?;
/// println!("{} completed, {} failed", stats.completed, stats.failed);
/// # assert_eq!(stats.completed, 1);
/// # Ok(()) }
/// ```
pub struct Worker<H> {
    queue: Queue,
    handler: Arc<H>,
    concurrency: usize,
    budget: Duration,
    until_empty: bool,
    watchful: bool,
    retention: Retention,
    progress: Progress,
    outcome_callback: Option<OutcomeCallback>,
}

impl<H> Worker<H> {
    /// Creates a worker that runs one job at a time and has 30 s to shut down.
    pub fn new<F>(queue: Queue, handler: H) -> Self
    where
        H: Fn(Job) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        Self {
            queue,
            handler: Arc::new(handler),
            concurrency: 1,
            budget: Duration::from_secs(30),
            until_empty: false,
            watchful: false,
            retention: Retention::new(),
            progress: Progress::default(),
            outcome_callback: None,
        }
    }

    /// Sets the number of jobs to run at once.
    #[must_use]
    pub fn concurrency(self, jobs: usize) -> Self {
        Self { concurrency: jobs.max(1), ..self }
    }

    /// Sets the time that handlers have to end after a shutdown was requested.
    #[must_use]
    pub fn shutdown_budget(self, budget: Duration) -> Self {
        Self { budget, ..self }
    }

    /// Makes [`run`](Self::run) return when no job is available or waiting for a retry.
    #[must_use]
    pub fn until_empty(self, until_empty: bool) -> Self {
        Self { until_empty, ..self }
    }

    /// Never drops the handler: it watches [`Job::ending`] and the shutdown itself, and must end on its own. The
    /// shutdown budget does not apply.
    #[must_use]
    pub fn watchful(self, watchful: bool) -> Self {
        Self { watchful, ..self }
    }

    /// Deletes jobs that ended longer ago than `retention` keeps them, while the worker runs: once per minute over all
    /// workers of the queue, in bounded statements.
    #[must_use]
    pub fn keep(self, retention: Retention) -> Self {
        Self { retention, ..self }
    }

    /// Calls `callback` with the outcome of each job.
    #[must_use]
    pub fn on_outcome(self, callback: impl Fn(&Job, &JobOutcome) + Send + Sync + 'static) -> Self {
        Self { outcome_callback: Some(Arc::new(callback)), ..self }
    }

    /// Counters of this worker, to read while it runs.
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

impl<H, F> Worker<H>
where
    H: Fn(Job) -> F + Send + Sync + 'static,
    F: Future<Output = Result<(), Failure>> + Send + 'static,
{
    /// Runs until `shutdown` resolves, or with [`until_empty`](Self::until_empty) until the queue is empty. Requests to
    /// a server that cannot be reached are retried, and [`QueueBuilder::on_outage`](super::QueueBuilder::on_outage)
    /// reports it.
    ///
    /// # Errors
    ///
    /// Errors that no retry can resolve, such as missing rights or a missing table. The worker shuts down its handlers
    /// first.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the handlers; their jobs are released in the background, as failed attempts.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<WorkerStats> {
        if self.retention.is_limited() {
            self.queue.check_can_prune().await?;
        }
        let outage = self.queue.0.outage.clone();
        let serving = Box::pin(race(self.serve(shutdown), self.queue.0.maintain(self.retention)));
        let ended = match race(serving, outage.report()).await {
            Either::First(Either::First(ended)) => ended,
            Either::First(Either::Second(never)) | Either::Second(never) => match never {},
        };
        // No request of this worker is left that could find the server back.
        outage.clear();
        ended.map(|()| self.progress.stats())
    }

    /// Claims jobs and runs their handlers until the worker ends.
    async fn serve(&self, shutdown: impl Future<Output = ()>) -> Result<()> {
        let outage = &self.queue.0.outage;
        let _listener = JobListener::new(&self.queue.0);
        let (stop, stopped) = watch::channel(false);
        let mut running = JoinSet::new();
        let mut shutdown = pin!(shutdown);
        let mut trouble = ERROR_PAUSE_RANGE.0;
        let ended = loop {
            let free = self.concurrency - running.len();
            let mut claimed = 0;
            let mut failed = None;
            if free > 0 {
                outage.sent();
                let answer = tokio::select! {
                    biased;
                    () = &mut shutdown => {
                        // The claim is not awaited any longer: its silence is no outage.
                        outage.clear();
                        break Ok(());
                    }
                    answer = self.queue.claim_many(free) => answer,
                };
                outage.ended(&answer);
                match answer {
                    Ok(jobs) => {
                        claimed = jobs.len();
                        trouble = ERROR_PAUSE_RANGE.0;
                        for job in jobs {
                            self.progress.0.begun.fetch_add(1, Ordering::Relaxed);
                            running.spawn(self.supervise(job, stopped.clone()));
                        }
                    }
                    Err(error) if is_permanent(&error) => break Err(error),
                    Err(error) => {
                        tracing::warn!(name: "tenure.request_failed", %error);
                        failed = Some(trouble);
                        trouble = (trouble * 2).min(ERROR_PAUSE_RANGE.1);
                    }
                }
            }
            if self.until_empty && running.is_empty() && failed.is_none() && claimed == 0 {
                match self.queue.has_pending().await {
                    Ok(false) => break Ok(()),
                    Ok(true) => {}
                    Err(error) if is_permanent(&error) => break Err(error),
                    Err(_) => failed = Some(trouble),
                }
            }
            // A full batch: more jobs may be available. Claim again at once.
            if claimed > 0 && claimed == free && running.len() < self.concurrency {
                continue;
            }
            let idle = running.len() < self.concurrency;
            tokio::select! {
                biased;
                () = &mut shutdown => break Ok(()),
                Some(_) = running.join_next() => {}
                () = self.pause(failed), if idle => {}
                () = self.queue.0.notifications.notified(), if idle && failed.is_none() => {}
            }
        };
        self.finish(running, &stop).await;
        ended
    }

    /// Resolves when the next claim is due: after the pause of a failure, the poll interval, or at the next sweep.
    async fn pause(&self, failed: Option<Duration>) {
        let db = &self.queue.0.db;
        let now = db.clock.now();
        let until = match failed {
            Some(pause) => now + pause,
            None => (now + db.options.poll).min(self.queue.0.next_sweep()),
        };
        db.clock.sleep_until(until).await;
    }

    /// Waits for running handlers, and stops those that still run when the shutdown budget is used up.
    async fn finish(&self, mut running: JoinSet<()>, stop: &watch::Sender<bool>) {
        let clock = &self.queue.0.db.clock;
        let until = if self.watchful { tenure_core::Time::MAX } else { clock.now() + self.budget };
        let mut timeout = pin!(clock.sleep_until(until));
        loop {
            tokio::select! {
                biased;
                ended = running.join_next() => if ended.is_none() { return },
                () = &mut timeout => break,
            }
        }
        stop.send_replace(true);
        while running.join_next().await.is_some() {}
    }

    /// Runs the handler of one job and records its outcome.
    fn supervise(
        &self,
        guard: JobGuard,
        stopped: watch::Receiver<bool>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (handler, callback) = (Arc::clone(&self.handler), self.outcome_callback.clone());
        let (progress, watchful) = (self.progress.clone(), self.watchful);
        let (options, queue) = (self.queue.options(), self.queue.table());
        async move {
            let job = guard.job().clone();
            let begun = job.0.clock.now();
            let outcome = run_handler(guard, &*handler, stopped, watchful, &options).await;
            telemetry::job_run(&queue, outcome.label(), job.0.clock.now().since(begun));
            progress.record(&outcome);
            if let Some(callback) = callback {
                let called =
                    std::panic::catch_unwind(AssertUnwindSafe(|| callback(&job, &outcome)));
                if called.is_err() {
                    tracing::error!("a callback panicked; the worker goes on");
                }
            }
        }
    }
}

async fn run_handler<H, F>(
    guard: JobGuard,
    handler: &H,
    mut stopped: watch::Receiver<bool>,
    watchful: bool,
    options: &Options,
) -> JobOutcome
where
    H: Fn(Job) -> F,
    F: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let job = guard.job().clone();
    let mut handling = AbortOnDrop(tokio::spawn(handler(job.clone())));
    let stopping = async {
        let stop = stopped.wait_for(|stopped| *stopped).await.is_ok();
        // The sender was dropped with the worker's future, which aborts this task as well: that is no request to stop.
        if !stop {
            std::future::pending::<()>().await;
        }
    };
    let done = tokio::select! {
        biased;
        done = &mut handling.0 => Some(done),
        reason = job.lost(), if !watchful => return JobOutcome::Lost(reason.to_string()),
        () = stopping => None,
    };
    let Some(done) = done else {
        handling.0.abort();
        let clock = &job.0.clock;
        tokio::select! {
            _ = &mut handling.0 => {}
            () = clock.sleep_until(clock.now() + ABORT_TIMEOUT) => {}
        }
        return outcome_or_error(guard.release().await, JobOutcome::Released, &job);
    };
    let failure = match done {
        Ok(Ok(())) => return outcome_or_error(guard.complete().await, JobOutcome::Completed, &job),
        Ok(Err(failure)) => failure,
        Err(_) => Failure::retry("the handler panicked"),
    };
    let delay = match failure.action {
        FailureAction::Release => {
            return outcome_or_error(guard.release().await, JobOutcome::Released, &job);
        }
        FailureAction::Fail => {
            let failed = guard.fail(failure.why.clone()).await;
            return outcome_or_error(failed, JobOutcome::Failed(failure.why), &job);
        }
        FailureAction::RetryIn(delay) => delay,
        FailureAction::Retry => backoff(options, guard.attempt()),
    };
    match guard.retry_in(delay, failure.why.clone()).await {
        Ok(true) => JobOutcome::Retried(failure.why),
        Ok(false) => JobOutcome::Failed(failure.why),
        Err(error) => outcome_or_error(Err(error), JobOutcome::Released, &job),
    }
}

/// A handler task that is aborted when this is dropped.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The outcome, once it was recorded; else the error. A job that the handler has completed itself, in SQL, is completed
/// whatever the handler reports afterwards: the completion is final.
fn outcome_or_error(recorded: Result<()>, outcome: JobOutcome, job: &Job) -> JobOutcome {
    match recorded {
        Ok(()) => outcome,
        Err(_) if job.is_completed() => JobOutcome::Completed,
        Err(error) if error.kind() == ErrorKind::Lost => JobOutcome::Lost(error.to_string()),
        Err(error) => JobOutcome::Unsettled(error),
    }
}

/// Pause before the next attempt.
fn backoff(options: &Options, attempt: u32) -> Duration {
    static RANDOM: Mutex<Option<Random>> = Mutex::new(None);
    let mut random = RANDOM.lock();
    let random =
        random.get_or_insert_with(|| Random::new(identity::random().map_or(1, u64::from_be_bytes)));
    let mut strategy = options.backoff;
    let context = RetryContext { attempt, elapsed: Duration::ZERO, last_error: None };
    strategy.next_delay(&context, random.unit()).unwrap_or(strategy.max)
}

fn is_permanent(error: &Error) -> bool {
    let kind = matches!(
        error.kind(),
        ErrorKind::Invalid | ErrorKind::Misconfigured | ErrorKind::Denied | ErrorKind::Shutdown
    );
    kind && !error.is_marked_transient()
}

impl<H> fmt::Debug for Worker<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("queue", &self.queue)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}
