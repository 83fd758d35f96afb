//! A worker: claims jobs, runs a handler for each, and says what became of them.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tenure_core::Random;
use tenure_core::retry::{Retry as _, RetryContext};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::notifications::JobListener;
use super::{Job, JobGuard, Queue};
use crate::{Error, ErrorKind, Result, identity};

/// How long an idle worker pauses after the server could not be asked.
const ERROR_PAUSE_RANGE: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));
/// How long a handler that was stopped may take to be gone.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a handler did not do its job, and what to do about it.
///
/// Any error becomes one by `?`: the job is tried again after a pause.
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
    /// To be tried again after a pause that grows with every attempt.
    pub fn retry(why: impl Into<String>) -> Self {
        Self { why: why.into(), action: FailureAction::Retry }
    }

    /// To be tried again after this pause.
    pub fn retry_in(delay: Duration, why: impl Into<String>) -> Self {
        Self { why: why.into(), action: FailureAction::RetryIn(delay) }
    }

    /// To be given up: no attempt can do it.
    pub fn permanent(why: impl Into<String>) -> Self {
        Self { why: why.into(), action: FailureAction::Fail }
    }

    /// Not tried at all: the attempt does not count.
    pub fn released() -> Self {
        Self { why: String::new(), action: FailureAction::Release }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut why = error.to_string();
        let mut cause = error.source();
        while let Some(next) = cause {
            why = format!("{why}: {next}");
            cause = next.source();
        }
        Self::retry(why)
    }
}

/// What became of a claimed job.
#[derive(Debug)]
#[non_exhaustive]
pub enum JobOutcome {
    /// It is done.
    Completed,
    /// It will be tried again; why.
    Retried(String),
    /// It was given up; why.
    Failed(String),
    /// It was lost before that could be said; why.
    Lost(String),
    /// It was given back.
    Released,
    /// The server could not be told: the job is free when its lease ends, at the latest.
    Unsettled(Error),
}

/// How many jobs ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerStats {
    /// Being worked on.
    pub running: u64,
    /// Done.
    pub completed: u64,
    /// To be tried again.
    pub retried: u64,
    /// Given up.
    pub failed: u64,
    /// Lost while they were worked on.
    pub lost: u64,
    /// Given back.
    pub released: u64,
}

/// The counters of a worker, for whoever shows them.
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
    /// The figures of this moment.
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
/// A handler whose job is lost is dropped at its next await. When told to shut down, the worker claims no more, waits for
/// its handlers as long as its budget lasts, drops those that are left and gives their jobs back.
///
/// ```
/// use tenure::jobs::{Job, Worker};
/// # use tenure::jobs::{NewJob, Queue, Schema};
///
/// # async fn build(_: &str) -> Result<(), std::io::Error> { Ok(()) }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
/// # let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else { return Ok(()) };
/// # let table = format!("doc_worker_{}", std::process::id());
/// # Schema::of_queue(&table)?.apply(&url).await?;
/// # let queue = Queue::connect(&url, &table).await?;
/// # queue.enqueue(NewJob::json("7")?).await?;
/// let worker = Worker::new(queue, async |job: Job| {
///     build(job.payload()).await?; // an error: tried again after a pause
///     Ok(())
/// });
/// # let worker = worker.until_empty(true);
/// let ctrl_c = std::future::pending();
/// let tally = worker.concurrency(4).run(ctrl_c).await?;
/// println!("{} completed, {} failed", tally.completed, tally.failed);
/// # assert_eq!(tally.completed, 1);
/// # Ok(()) }
/// ```
pub struct Worker<H> {
    queue: Queue,
    handler: Arc<H>,
    concurrency: usize,
    budget: Duration,
    until_empty: bool,
    watchful: bool,
    progress: Progress,
    outcome_callback: Option<OutcomeCallback>,
}

impl<H> Worker<H> {
    /// A worker that runs one job at a time and has 30 s to shut down.
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
            progress: Progress::default(),
            outcome_callback: None,
        }
    }

    /// How many jobs to run at once.
    #[must_use]
    pub fn concurrency(self, jobs: usize) -> Self {
        Self { concurrency: jobs.max(1), ..self }
    }

    /// How long handlers may take to end after a shutdown was asked for.
    #[must_use]
    pub fn shutdown_budget(self, budget: Duration) -> Self {
        Self { budget, ..self }
    }

    /// Ends when no job is left that could be claimed or will be tried again.
    #[must_use]
    pub fn until_empty(self, until_empty: bool) -> Self {
        Self { until_empty, ..self }
    }

    /// The handler watches [`Job::ending`] and the shutdown by itself, and is never dropped: it has to see the work to its
    /// end.
    #[must_use]
    pub fn watchful(self, watchful: bool) -> Self {
        Self { watchful, ..self }
    }

    /// Tells `told` what became of each job.
    #[must_use]
    pub fn on_outcome(self, told: impl Fn(&Job, &JobOutcome) + Send + Sync + 'static) -> Self {
        Self { outcome_callback: Some(Arc::new(told)), ..self }
    }

    /// Its counters, to be read while it runs.
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

impl<H, F> Worker<H>
where
    H: Fn(Job) -> F + Send + Sync + 'static,
    F: Future<Output = Result<(), Failure>> + Send + 'static,
{
    /// Works until `shutdown` resolves, or the queue is empty where that was asked for. A server that cannot be reached
    /// is asked again.
    ///
    /// # Errors
    ///
    /// What no repetition can mend: missing rights, a table that is gone. The handlers are seen to their end first.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the handlers; their jobs are given back in the background.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<WorkerStats> {
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
                let asked = tokio::select! {
                    biased;
                    () = &mut shutdown => break Ok(()),
                    asked = self.queue.claim_many(free) => asked,
                };
                match asked {
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
            // Where more may be there, look at once.
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
        ended.map(|()| self.progress.stats())
    }

    /// Until it is time to look again.
    async fn pause(&self, failed: Option<Duration>) {
        let link = &self.queue.0.db;
        let now = link.clock.now();
        let until = match failed {
            Some(pause) => now + pause,
            None => (now + link.options.poll).min(self.queue.0.next_sweep()),
        };
        link.clock.sleep_until(until).await;
    }

    /// Waits for what runs; what is left when the budget is used up is stopped.
    async fn finish(&self, mut running: JoinSet<()>, stop: &watch::Sender<bool>) {
        let clock = &self.queue.0.db.clock;
        let until = if self.watchful { tenure_core::Time::MAX } else { clock.now() + self.budget };
        let mut over = pin!(clock.sleep_until(until));
        loop {
            tokio::select! {
                biased;
                ended = running.join_next() => if ended.is_none() { return },
                () = &mut over => break,
            }
        }
        stop.send_replace(true);
        while running.join_next().await.is_some() {}
    }

    /// Sees one job to its end.
    fn supervise(
        &self,
        guard: JobGuard,
        stopped: watch::Receiver<bool>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (handler, told) = (Arc::clone(&self.handler), self.outcome_callback.clone());
        let (progress, watchful) = (self.progress.clone(), self.watchful);
        let options = self.queue.options();
        async move {
            let job = guard.job().clone();
            let outcome = run_handler(guard, &*handler, stopped, watchful, &options).await;
            progress.record(&outcome);
            if let Some(told) = told {
                let told = std::panic::catch_unwind(AssertUnwindSafe(|| told(&job, &outcome)));
                if told.is_err() {
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
    options: &super::Options,
) -> JobOutcome
where
    H: Fn(Job) -> F,
    F: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let job = guard.job().clone();
    let mut handling = AbortOnDrop(tokio::spawn(handler(job.clone())));
    let stopping = async {
        let told = stopped.wait_for(|stopped| *stopped).await.is_ok();
        // Whoever could tell is gone, and we with it.
        if !told {
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
        return outcome_or_error(guard.release().await, JobOutcome::Released);
    };
    let failure = match done {
        Ok(Ok(())) => return outcome_or_error(guard.complete().await, JobOutcome::Completed),
        Ok(Err(failure)) => failure,
        Err(_) => Failure::retry("the handler panicked"),
    };
    let delay = match failure.action {
        FailureAction::Release => {
            return outcome_or_error(guard.release().await, JobOutcome::Released);
        }
        FailureAction::Fail => {
            let failed = guard.fail(failure.why.clone()).await;
            return outcome_or_error(failed, JobOutcome::Failed(failure.why));
        }
        FailureAction::RetryIn(delay) => delay,
        FailureAction::Retry => backoff(options, guard.attempt()),
    };
    match guard.retry_in(delay, failure.why.clone()).await {
        Ok(true) => JobOutcome::Retried(failure.why),
        Ok(false) => JobOutcome::Failed(failure.why),
        Err(error) => outcome_or_error(Err(error), JobOutcome::Released),
    }
}

/// A handler that goes with whoever attends to it.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn outcome_or_error(said: Result<()>, outcome: JobOutcome) -> JobOutcome {
    match said {
        Ok(()) => outcome,
        Err(error) if error.kind() == ErrorKind::Lost => JobOutcome::Lost(error.to_string()),
        Err(error) => JobOutcome::Unsettled(error),
    }
}

/// The pause before the next attempt.
fn backoff(options: &super::Options, attempt: u32) -> Duration {
    static RANDOM: Mutex<Option<Random>> = Mutex::new(None);
    let mut random = RANDOM.lock().unwrap_or_else(PoisonError::into_inner);
    let random =
        random.get_or_insert_with(|| Random::new(identity::random().map_or(1, u64::from_be_bytes)));
    let mut strategy = options.backoff;
    let context = RetryContext { attempt, elapsed: Duration::ZERO, last_error: None };
    strategy.next_delay(&context, random.unit()).unwrap_or(strategy.max)
}

fn is_permanent(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Invalid | ErrorKind::Misconfigured | ErrorKind::Denied | ErrorKind::Shutdown
    )
}

impl<H> fmt::Debug for Worker<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("queue", &self.queue)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}
