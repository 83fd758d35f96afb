//! `tenure work`: runs a command for each job of a queue.

mod job_command;
mod job_outputs;
mod job_record;
mod running_jobs;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::Signal;
use tenure::Key;
use tenure::jobs::{Job, JobOutcome, Options, Queue, QueuePause, Worker, WorkerStats};
use tenure::retry::ExponentialBackoff;
use tokio::sync::oneshot;

use super::job::pause::described;
use super::job::prune::RetentionArgs;
use super::session::{self, Session};
use crate::args::hold::kill_after;
use crate::args::output::Output;
use crate::args::store::DatabaseUrl;
use crate::args::value::{duration, duration_or_zero};
use crate::exit::{self, Exit};
use crate::health::MetricsArgs;
use crate::report::{self, Event, Reporter};
use crate::signals::{self, Signals};
use job_command::JobCommand;
pub(crate) use job_record::release_job;
use running_jobs::RunningJobs;

/// Interval between updates of the progress line.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// Shortest interval between two counts of the jobs for the metrics.
const COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of connections; a heartbeat or a claim uses one for some milliseconds.
const MAX_CONNECTIONS: usize = 4;

#[derive(Args)]
#[command(after_help = exit::WORK)]
pub(crate) struct Work {
    #[command(flatten)]
    store: DatabaseUrl,
    /// Number of commands to run at once
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=200))]
    concurrency: u16,
    /// Time that the claim of a job lasts without a renewal; tenure renews it five times in that time
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration, allow_hyphen_values = true)]
    lease: Duration,
    /// Exit when no job is left to claim or to retry; jobs whose delay has not passed are left
    #[arg(long)]
    until_empty: bool,
    /// Pause before a failed job is retried; it doubles with every attempt
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration)]
    retry_base: Duration,
    /// The longest pause before a retry
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration)]
    retry_max: Duration,
    /// Time that running commands have to finish after tenure is told to stop; then they are stopped and their jobs released
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration_or_zero)]
    grace: Duration,
    /// The longest time that a command may run; then it is stopped, and its attempt has failed
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    max_run: Option<Duration>,
    /// Time from TERM to KILL when a lease, the grace or --max-run ends, or a job is cancelled; by default a fifth of the
    /// lease, at most 5s
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero)]
    kill_after: Option<Duration>,
    #[command(flatten)]
    retention: RetentionArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    output: Output,
    /// Name of the queue, which is the name of its table
    queue: String,
    /// The command to run, with its arguments. Its stdin is the payload; its environment describes the job in
    /// `TENURE_JOB_ID`, `TENURE_JOB_ATTEMPT` and `TENURE_TOKEN`. SQL of its own that completes the job needs
    /// `TENURE_LEASE_TOKEN` and `TENURE_HOLDER`. Lines that it writes to the descriptor `$TENURE_PROGRESS_FD` are the
    /// progress of the job, and JSON that it writes to `$TENURE_RESULT_FD` is its result
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
            report::print_line(&format!("invalid queue name: {error}"));
            return Exit::Usage;
        }
    };
    let (output, metrics) = (arguments.output, arguments.metrics.clone());
    session::run(
        output,
        |events| Reporter::new(name, output, events),
        Some(&metrics),
        async |mut session| match open_queue(&arguments, &mut session).await {
            Ok(queue) => work(arguments, queue, session.signals, &session.reporter).await,
            Err(exit) => exit,
        },
    )
}

/// Opens the queue. A database that is away is waited for until a signal ends the wait. Reports an error and returns its
/// exit code.
async fn open_queue(arguments: &Work, session: &mut Session) -> Result<Queue, Exit> {
    let reporter = &session.reporter;
    let fail = |message: &str, exit| {
        reporter.error(message);
        exit
    };
    let url = arguments.store.postgres_url().map_err(|(message, exit)| fail(&message, exit))?;
    let outages = Arc::clone(reporter);
    let builder = Queue::builder().options(arguments.options()).wait_for_store(Duration::MAX);
    let builder = builder.on_outage(move |outage| outages.outage(outage));
    let jobs_aside = Arc::clone(reporter);
    let builder = builder.on_set_aside(move |job| jobs_aside.error(&job.to_string()));
    let pauses = Arc::clone(reporter);
    let name = arguments.queue.clone();
    let builder = builder.on_pause(move |pause| report_pause(&pauses, &name, pause));
    let connecting = builder.connect(url, &arguments.queue);
    let connected = session::unless_stopped(connecting, &mut session.signals, reporter).await;
    let connected = connected.map_err(|_| Exit::Success)?;
    let queue = connected.map_err(|error| fail(&error.chain(), super::exit_for(&error)))?;
    session.health.set_ready();
    if arguments.metrics.is_enabled() {
        let counted = queue.clone();
        tokio::spawn(async move { counted.record_counts(COUNT_INTERVAL).await });
    }
    Ok(queue)
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
    let (output, retention) = (arguments.output, arguments.retention.retention());
    let Ok(url) = arguments.store.postgres_url() else { return Exit::Usage };
    let job_command = Arc::new(JobCommand {
        environment: job_command::environment(&queue, arguments.lease),
        queue: queue.clone(),
        url: url.to_owned(),
        output,
        command: arguments.command,
        ttl: arguments.lease,
        kill_after: stop_time,
        max_run: arguments.max_run,
        reporter: Arc::clone(reporter),
        running_jobs: Arc::clone(&running_jobs),
    });
    let worker = Worker::new(queue.clone(), move |job: Job| Arc::clone(&job_command).run(job));
    let worker = worker.concurrency(concurrency).until_empty(until_empty).watchful(true);
    let worker = worker.keep(retention);
    let worker = worker.on_outcome({
        let reporter = Arc::clone(reporter);
        move |job, outcome| report_outcome(&reporter, job, outcome)
    });
    let progress = worker.progress();
    let (stop, stopped) = oneshot::channel::<()>();
    let mut stop = Some(stop);
    let mut running = pin!(worker.run(async { drop(stopped.await) }));
    let (begun, table) = (Instant::now(), queue.table());
    // Next signal for the running commands, and when: TERM once the grace is over, then KILL.
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
                    // A second signal ends the grace at once: the operator insists.
                    let delay = if first { grace } else { Duration::ZERO };
                    next_step = Some((tokio::time::Instant::now() + delay, Signal::SIGTERM));
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
    if !output.has_events() && !output.quiet {
        reporter.clear_progress();
        reporter.info(&progress_line(&table, &progress.stats(), begun.elapsed()));
    }
    match (ended, running_jobs.exit()) {
        (_, Some(exit)) => exit,
        (Ok(_), None) => Exit::Success,
        (Err(error), None) => {
            reporter.error(&error.chain());
            super::exit_for(&error)
        }
    }
}

/// `sync_jobs: 12 done, 1 failed, 3 running, 4.1/s`
fn progress_line(table: &str, stats: &WorkerStats, elapsed: Duration) -> String {
    let mut text = format!("{table}: {} done, {} failed", stats.completed, stats.failed);
    for (count, state) in
        [(stats.retried, "to be retried"), (stats.lost, "lost"), (stats.released, "released")]
    {
        if count > 0 {
            let _ = write!(text, ", {count} {state}");
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "for display only")]
    let rate = (stats.completed + stats.failed) as f64 / elapsed.as_secs_f64().max(0.001);
    let _ = write!(text, ", {} running, {rate:.1}/s", stats.running);
    text
}

/// Reports that the queue is paused, or was resumed.
fn report_pause(reporter: &Reporter, queue: &str, pause: Option<&QueuePause>) {
    match pause {
        Some(pause) => reporter.warn(
            &Event::Paused { reason: pause.reason.clone() },
            &format!("{queue} {}", described(pause)),
        ),
        None => reporter.warn(&Event::Resumed, &format!("{queue} was resumed")),
    }
}

/// Reports the outcome of a job: every outcome as a JSON event, failures also as a log line.
fn report_outcome(reporter: &Reporter, job: &Job, outcome: &JobOutcome) {
    let (outcome, reason) = match outcome {
        JobOutcome::Completed => ("completed", None),
        JobOutcome::Retried(why) => ("retried", Some(why.clone())),
        JobOutcome::Failed(why) => ("failed", Some(why.clone())),
        JobOutcome::Lost(why) => ("lost", Some(why.clone())),
        JobOutcome::Unsettled(error) => ("unsettled", Some(error.chain())),
        _ => ("released", None),
    };
    let (id, attempt) = (job.id().to_owned(), job.attempt());
    let succeeded = reason.is_none();
    let event = Event::JobEnded { job: id, attempt, outcome, reason };
    if succeeded {
        reporter.event(&event);
    } else {
        reporter.clear_progress();
        reporter.log(&event);
    }
}
