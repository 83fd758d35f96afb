//! `tenure work`: a command for each job of a queue.

mod job_command;
mod running_jobs;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::Signal;
use tenure::Key;
use tenure::jobs::{Job, JobOutcome, Options, Queue, Worker, WorkerStats};
use tenure::retry::ExponentialBackoff;
use tokio::sync::oneshot;

use crate::args::{Output, StoreUrl, duration, duration_or_zero, kill_after};
use crate::exit::{self, Exit};
use crate::health::MetricsArgs;
use crate::report::{self, Event, Reporter};
use crate::signals::{self, Signals};
use job_command::JobCommand;
use running_jobs::RunningJobs;

/// How often the progress line is brought up to date.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// How often the jobs are counted for the metrics, at most: that looks at every row.
const COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// The most connections; a heartbeat or a claim holds one for some milliseconds.
const MAX_CONNECTIONS: usize = 4;

#[derive(Args)]
#[command(after_help = exit::WORK)]
pub(crate) struct Work {
    #[command(flatten)]
    store: StoreUrl,
    /// How many commands to run at once
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=200))]
    concurrency: u16,
    /// How long a job is ours unless renewed; it is renewed five times in that time
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration, allow_hyphen_values = true)]
    lease: Duration,
    /// End when no job is left that could be claimed or will be tried again; jobs whose delay is not over are left
    #[arg(long)]
    until_empty: bool,
    /// The pause before a job whose command failed is tried again; it doubles with every attempt
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration)]
    retry_base: Duration,
    /// The longest of those pauses
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration)]
    retry_max: Duration,
    /// How long commands may go on when we are told to stop; then they are stopped and their jobs given back
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration_or_zero)]
    grace: Duration,
    /// The time from TERM to KILL when a lease ends, or the grace; by default 5s, or a fifth of the lease where that is less
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    kill_after: Option<Duration>,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    output: Output,
    /// The queue: the name of its table
    queue: String,
    /// The command to run, with its arguments; it reads the payload from stdin, and finds the job in `TENURE_JOB_ID`,
    /// `TENURE_JOB_ATTEMPT` and `TENURE_TOKEN`
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

impl Work {
    fn options(&self) -> Options {
        let (base, max) = (self.retry_base, self.retry_max.max(self.retry_base));
        let backoff = ExponentialBackoff { base, max, multiplier: 2.0, jitter: 0.1 };
        let options = Options::default().lease(self.lease).stop_grace(self.stop_grace());
        options.backoff(backoff).connections(MAX_CONNECTIONS)
    }

    fn stop_grace(&self) -> Duration {
        kill_after(self.kill_after, self.lease)
    }
}

pub(crate) fn run(arguments: Work) -> Exit {
    let name = match Key::new(&arguments.queue) {
        Ok(name) => name,
        Err(error) => {
            report::print_line(&format!("the queue's name is none: {error}"));
            return Exit::Usage;
        }
    };
    match super::listen_for_signals() {
        Ok(stream) => super::on_runtime(session(arguments, name, stream)),
        Err(error) => super::fail("cannot listen for signals", &error),
    }
}

async fn session(arguments: Work, name: Key, stream: UnixStream) -> Exit {
    let reporter = Arc::new(Reporter::new(name, arguments.output));
    let exit = match begin(&arguments, stream).await {
        Ok((queue, signals)) => work(arguments, queue, signals, &reporter).await,
        Err((message, exit)) => {
            reporter.error(&message);
            exit
        }
    };
    reporter.clear_progress();
    reporter.flush().await;
    exit
}

async fn begin(arguments: &Work, stream: UnixStream) -> Result<(Queue, Signals), (String, Exit)> {
    let Some(url) = arguments.store.postgres_url() else {
        let message = "jobs live on PostgreSQL: name it with --store postgres://…";
        return Err((message.to_owned(), Exit::Usage));
    };
    let signals = Signals::new(stream).map_err(|error| (error.to_string(), Exit::Failed))?;
    let health = arguments.metrics.start().map_err(|message| (message, Exit::Failed))?;
    let queue = Queue::connect_with(url, &arguments.queue, arguments.options()).await;
    let queue = queue.map_err(|error| (report::chain(&error), super::exit_for(&error)))?;
    health.set_ready();
    if arguments.metrics.is_enabled() {
        let counted = queue.clone();
        tokio::spawn(async move { counted.record_counts(COUNT_INTERVAL).await });
    }
    Ok((queue, signals))
}

async fn work(
    arguments: Work,
    queue: Queue,
    mut signals: Signals,
    reporter: &Arc<Reporter>,
) -> Exit {
    let running_jobs = Arc::new(RunningJobs::default());
    let (concurrency, until_empty) = (usize::from(arguments.concurrency), arguments.until_empty);
    let (grace, stop_time) = (arguments.grace, arguments.stop_grace());
    let output = arguments.output;
    let job_command = Arc::new(JobCommand {
        environment: job_command::environment(&queue, arguments.lease),
        command: arguments.command,
        ttl: arguments.lease,
        kill_after: stop_time,
        reporter: Arc::clone(reporter),
        running_jobs: Arc::clone(&running_jobs),
    });
    let worker = Worker::new(queue.clone(), move |job: Job| Arc::clone(&job_command).run(job));
    let worker = worker.concurrency(concurrency).until_empty(until_empty).watchful(true);
    let worker = worker.on_outcome({
        let reporter = Arc::clone(reporter);
        move |job, outcome| report_outcome(&reporter, job, outcome)
    });
    let progress = worker.progress();
    let (stop, stopped) = oneshot::channel::<()>();
    let mut stop = Some(stop);
    let mut running = pin!(worker.run(async { drop(stopped.await) }));
    let (begun, table) = (Instant::now(), queue.table());
    // When patience with those that run is over: first they are asked, then they are killed.
    let mut next_step: Option<(tokio::time::Instant, Signal)> = None;
    let ended = loop {
        let due = async {
            match next_step {
                Some((at, signal)) => {
                    tokio::time::sleep_until(at).await;
                    signal
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            ended = &mut running => break ended,
            signal = due => {
                running_jobs.stop(signal);
                let again = tokio::time::Instant::now() + stop_time;
                next_step = (signal == Signal::SIGTERM).then_some((again, Signal::SIGKILL));
            }
            () = running_jobs.gave_up() => drop(stop.take()),
            signal = signals.next() => match signal {
                Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT => {
                    let first = stop.take().is_some();
                    if first {
                        let signal = Some(signal.as_str());
                        reporter.event(&Event::Stopped { signal, reason: None });
                    }
                    // Whoever insists does not wait.
                    let patience = if first { grace } else { Duration::ZERO };
                    next_step = Some((tokio::time::Instant::now() + patience, Signal::SIGTERM));
                }
                Signal::SIGTSTP => drop(signals::raise_with_default_action(signal)),
                Signal::SIGUSR1 | Signal::SIGUSR2 => running_jobs.forward(signal),
                _ => {}
            },
            () = tokio::time::sleep(PROGRESS_INTERVAL), if reporter.shows_progress() => {
                reporter.show_progress(&progress_line(&table, &progress.stats(), begun.elapsed()));
            }
        }
    };
    if !output.json && !output.quiet {
        reporter.clear_progress();
        reporter.info(&progress_line(&table, &progress.stats(), begun.elapsed()));
    }
    match (ended, running_jobs.exit()) {
        (_, Some(exit)) => exit,
        (Ok(_), None) => Exit::Success,
        (Err(error), None) => {
            reporter.error(&report::chain(&error));
            super::exit_for(&error)
        }
    }
}

/// `sync_jobs: 12 done, 1 failed, 3 running, 4.1/s`
fn progress_line(table: &str, tally: &WorkerStats, elapsed: Duration) -> String {
    let mut text = format!("{table}: {} done, {} failed", tally.completed, tally.failed);
    for (count, what) in
        [(tally.retried, "to be tried again"), (tally.lost, "lost"), (tally.released, "given back")]
    {
        if count > 0 {
            let _ = write!(text, ", {count} {what}");
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let rate = (tally.completed + tally.failed) as f64 / elapsed.as_secs_f64().max(0.001);
    let _ = write!(text, ", {} running, {rate:.1}/s", tally.running);
    text
}

/// Tells what became of a job: all to machines, what went wrong to people.
fn report_outcome(reporter: &Reporter, job: &Job, outcome: &JobOutcome) {
    let (outcome, reason) = match outcome {
        JobOutcome::Completed => ("completed", None),
        JobOutcome::Retried(why) => ("retried", Some(why.clone())),
        JobOutcome::Failed(why) => ("failed", Some(why.clone())),
        JobOutcome::Lost(why) => ("lost", Some(why.clone())),
        JobOutcome::Unsettled(error) => ("unsettled", Some(report::chain(error))),
        _ => ("released", None),
    };
    let (id, attempt) = (job.id().to_owned(), job.attempt());
    let quiet = reason.is_none();
    let event = Event::JobEnded { job: id, attempt, outcome, reason };
    if quiet {
        reporter.event(&event);
    } else {
        reporter.clear_progress();
        reporter.log(&event);
    }
}
