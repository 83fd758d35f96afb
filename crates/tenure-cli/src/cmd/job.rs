//! `tenure job`: enqueues, inspects and changes jobs.

mod change;
mod checkpoint;
mod import;
pub(crate) mod pause;
pub(crate) mod prune;
mod queue_args;
mod schedule;

use std::fmt::Write as _;
use std::io::Read as _;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::value::RawValue;
use tenure::jobs::{JobChange, JobRow, JobState, NewJob, Queue};
use tenure::{Error, ErrorKind, Result};

use change::{Cancel, ChangeArgs};
use checkpoint::CheckpointSubcommand;
use pause::Pause;
use prune::Prune;
use queue_args::{QueueArgs, report_rejection};
use schedule::ScheduleSubcommand;

use crate::args::value::duration_or_zero;
use crate::exit::{self, Exit};
use crate::keys::columns;
use crate::{humanize, report};

#[derive(Subcommand)]
pub(crate) enum JobSubcommand {
    /// Enqueue a job and print its id
    #[command(after_help = exit::JOB)]
    Add(Add),
    /// List jobs, the newest first
    #[command(after_help = exit::JOB)]
    Ls(ListJobs),
    /// Show one job, with its payload and its last error
    #[command(after_help = exit::JOB)]
    Show(JobIdArgs),
    /// Make failed or delayed jobs claimable at once; their attempts are counted from zero again
    #[command(after_help = exit::JOB)]
    Retry(ChangeArgs),
    /// Cancel open jobs; the command of a running job is stopped at its next heartbeat: TERM, then KILL
    #[command(after_help = exit::JOB)]
    Cancel(Cancel),
    /// Delete jobs that are not running
    #[command(after_help = exit::JOB)]
    Rm(ChangeArgs),
    /// Pause a queue: workers of tenure claim no more jobs of it, running jobs go on
    #[command(after_help = exit::QUEUE)]
    Pause(Pause),
    /// Resume a paused queue
    #[command(after_help = exit::QUEUE)]
    Resume(QueueArgs),
    /// Delete jobs that ended long ago
    #[command(after_help = exit::QUEUE)]
    Prune(Prune),
    /// Add, list and remove schedules: jobs that are enqueued at the times of a cron expression
    #[command(subcommand)]
    Schedule(ScheduleSubcommand),
    /// Claim, save, complete and list chunks of a table of checkpoints
    #[command(subcommand)]
    Checkpoint(CheckpointSubcommand),
}

#[derive(Args)]
pub(crate) struct Add {
    #[command(flatten)]
    queue: QueueArgs,
    /// Enqueue the jobs of this file, or of stdin with `-`: one JSON object per line, with payload, priority, delay,
    /// `max_attempts`, `unique_key`, `group_key` and meta. All of them or none; at most a million
    #[arg(long, value_name = "FILE", conflicts_with_all = ["payload", "priority", "delay", "max_attempts", "unique_key", "meta", "traceparent"])]
    from: Option<String>,
    /// Payload of the job; `-` reads it from stdin
    #[arg(long, value_name = "JSON", default_value = "null")]
    payload: String,
    /// Priority; jobs with a higher number are claimed first
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true)]
    priority: i32,
    /// Time before which the job is not claimed
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration_or_zero)]
    delay: Duration,
    /// Maximum number of attempts, after which the job fails
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    max_attempts: u32,
    /// At most one job with this key is open at a time; if there is one already, its id is printed and no job is added
    #[arg(long, value_name = "KEY")]
    unique_key: Option<String>,
    /// Metadata of the job: a JSON object, apart from its payload
    #[arg(long, value_name = "JSON")]
    meta: Option<String>,
    /// The trace that the job belongs to, as the traceparent of the W3C Trace Context; by default `$TRACEPARENT`, if that is
    /// valid. Stored in the metadata, and passed to the command of the job
    #[arg(long, value_name = "TEXT")]
    traceparent: Option<String>,
}

#[derive(Args)]
pub(crate) struct ListJobs {
    #[command(flatten)]
    queue: QueueArgs,
    /// Only jobs in this state
    #[arg(long, value_name = "STATE")]
    state: Option<JobState>,
    /// Maximum number of jobs
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Only jobs after this id in the list, that is, older ones
    #[arg(long, value_name = "ID")]
    after: Option<String>,
}

#[derive(Args)]
pub(crate) struct JobIdArgs {
    #[command(flatten)]
    queue: QueueArgs,
    /// The job's id
    id: String,
}

pub(crate) fn run(command: &JobSubcommand) -> Exit {
    super::on_runtime(async {
        match command {
            JobSubcommand::Checkpoint(command) => checkpoint::run(command).await,
            JobSubcommand::Add(add) => self::add(add).await,
            JobSubcommand::Ls(ls) => list(ls).await,
            JobSubcommand::Show(one) => show(one).await,
            JobSubcommand::Retry(jobs) => change::run(jobs, JobChange::Requeue).await,
            JobSubcommand::Cancel(Cancel { jobs, reason }) => {
                change::run(jobs, JobChange::Cancel(reason)).await
            }
            JobSubcommand::Pause(pause) => pause::pause(pause).await,
            JobSubcommand::Resume(queue) => pause::resume(queue).await,
            JobSubcommand::Schedule(command) => schedule::run(command).await,
            JobSubcommand::Prune(prune) => prune::run(prune).await,
            JobSubcommand::Rm(jobs) => change::run(jobs, JobChange::Remove).await,
        }
    })
}

async fn add(arguments: &Add) -> Exit {
    if let Some(path) = &arguments.from {
        return import::run(&arguments.queue, path).await;
    }
    let job = match new_job(arguments) {
        Ok(job) => job,
        Err(error) => return super::report_error(&error),
    };
    let queue = match arguments.queue.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    match queue.enqueue(with_inherited_trace(arguments, job, &queue)).await {
        Ok(enqueued) if arguments.queue.json => {
            let line = serde_json::json!({ "id": enqueued.id, "new": enqueued.new });
            super::print(format!("{line}\n").as_bytes())
        }
        Ok(enqueued) => super::print(format!("{}\n", enqueued.id).as_bytes()),
        Err(error) => super::report_error(&error),
    }
}

fn new_job(arguments: &Add) -> Result<NewJob> {
    let mut payload = arguments.payload.clone();
    if payload == "-" {
        payload.clear();
        // Twice the limit of a payload: one that is too long is read far enough to be refused as such.
        let mut stdin = std::io::stdin().take(1 << 21);
        stdin.read_to_string(&mut payload).map_err(|error| {
            Error::new(ErrorKind::Invalid, "cannot read the payload from stdin").because(error)
        })?;
    }
    let job = NewJob::json(payload)?
        .priority(arguments.priority)
        .delay(arguments.delay)
        .max_attempts(arguments.max_attempts);
    let job = match &arguments.unique_key {
        Some(key) => job.unique_key(key),
        None => job,
    };
    let job = match &arguments.meta {
        Some(meta) => job.meta(meta)?,
        None => job,
    };
    match &arguments.traceparent {
        Some(parent) => job.traceparent(parent),
        None => Ok(job),
    }
}

/// The job with the trace of the environment, unless another is given. The variable belongs to tools around this one: a
/// value that is no trace context, and a table without metadata, are no errors.
fn with_inherited_trace(arguments: &Add, job: NewJob, queue: &Queue) -> NewJob {
    let inherited = std::env::var("TRACEPARENT").ok();
    let own = arguments.meta.as_ref().is_some_and(|meta| meta.contains("\"traceparent\""));
    let own = own || arguments.traceparent.is_some();
    match inherited.filter(|_| !own && queue.stores_meta()) {
        Some(parent) => job.clone().traceparent(&parent).unwrap_or(job),
        None => job,
    }
}

async fn list(arguments: &ListJobs) -> Exit {
    let queue = match arguments.queue.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    let mut jobs: Vec<JobRow> = Vec::new();
    let limit = usize::try_from(arguments.limit).unwrap_or(usize::MAX);
    while jobs.len() < limit {
        let after = jobs.last().map(|job| job.id.as_str()).or(arguments.after.as_deref());
        match queue.list(arguments.state, after, limit - jobs.len()).await {
            Ok(page) if page.is_empty() => break,
            Ok(page) => jobs.extend(page),
            Err(error) => return super::report_error(&error),
        }
    }
    if let Err(error) = pause::warn_of_pause(&queue).await {
        return super::report_error(&error);
    }
    let text = if arguments.queue.json {
        jobs.iter().map(line).collect()
    } else if jobs.is_empty() {
        "no jobs\n".to_owned()
    } else {
        table(&jobs)
    };
    super::print(text.as_bytes())
}

fn table(jobs: &[JobRow]) -> String {
    let heads = ["ID", "STATE", "PRIORITY", "ATTEMPTS", "AGE", "WORKER", "PROGRESS", "ERROR"];
    let mut rows = vec![heads.map(str::to_owned)];
    let now = SystemTime::now();
    for job in jobs {
        let attempts = match job.max_attempts {
            Some(max) => format!("{}/{max}", job.attempts),
            None => job.attempts.to_string(),
        };
        let age = job.created_at.and_then(|at| now.duration_since(at).ok());
        // Of an expired job, the worker that lost it.
        let has_worker = matches!(job.state, JobState::Running | JobState::Expired);
        let by = job.locked_by.as_deref().filter(|_| has_worker);
        rows.push([
            humanize::without_control_chars(&job.id),
            job.state.to_string(),
            job.priority.to_string(),
            attempts,
            humanize::optional_span(age),
            by.map_or_else(|| "-".to_owned(), humanize::without_control_chars),
            job.progress.as_deref().map_or_else(|| "-".to_owned(), brief),
            job.error.as_deref().map_or_else(|| "-".to_owned(), brief),
        ]);
    }
    columns(&rows)
}

/// The beginning of the last line of an error or a progress.
fn brief(error: &str) -> String {
    let last = error.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    humanize::without_control_chars(last).chars().take(60).collect()
}

async fn show(arguments: &JobIdArgs) -> Exit {
    let queue = match arguments.queue.connect().await {
        Ok(queue) => queue,
        Err(exit) => return exit,
    };
    match queue.show(&arguments.id).await {
        Ok(Some(job)) if arguments.queue.json => super::print(line(&job).as_bytes()),
        Ok(Some(job)) => super::print(described(&job).as_bytes()),
        Ok(None) => {
            report::print_line(&format!("there is no job {} in {}", arguments.id, queue.table()));
            Exit::Refused
        }
        Err(error) => report_rejection(&error),
    }
}

/// A job as text, one field per line.
fn described(job: &JobRow) -> String {
    let mut text = String::new();
    if let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(JobLine::of(job)) {
        for (name, value) in fields {
            match value {
                serde_json::Value::Null => {}
                serde_json::Value::String(value) => {
                    let value: Vec<String> =
                        value.lines().map(humanize::without_control_chars).collect();
                    let _ = writeln!(text, "{name}: {}", value.join("\n    "));
                }
                value => drop(writeln!(text, "{name}: {value}")),
            }
        }
    }
    text
}

#[derive(Serialize)]
struct JobLine<'a> {
    id: &'a str,
    state: String,
    priority: i64,
    attempts: i32,
    max_attempts: Option<i32>,
    created_at: Option<String>,
    completed_at: Option<String>,
    failed_at: Option<String>,
    locked_until: Option<String>,
    locked_by: Option<&'a str>,
    lease_token: i64,
    unique_key: Option<&'a str>,
    group_key: Option<&'a str>,
    progress: Option<&'a str>,
    error: Option<&'a str>,
    payload: Option<&'a RawValue>,
    result: Option<&'a RawValue>,
    meta: Option<&'a RawValue>,
}

impl<'a> JobLine<'a> {
    fn of(job: &'a JobRow) -> Self {
        let time = |at: Option<SystemTime>| at.and_then(humanize::rfc3339);
        let json = |text: &'a Option<String>| {
            text.as_deref().and_then(|text| serde_json::from_str(text).ok())
        };
        Self {
            id: &job.id,
            state: job.state.to_string(),
            priority: job.priority,
            attempts: job.attempts,
            max_attempts: job.max_attempts,
            created_at: time(job.created_at),
            completed_at: time(job.completed_at),
            failed_at: time(job.failed_at),
            locked_until: time(job.locked_until),
            locked_by: job.locked_by.as_deref(),
            lease_token: job.lease_token,
            unique_key: job.unique_key.as_deref(),
            group_key: job.group_key.as_deref(),
            progress: job.progress.as_deref(),
            error: job.error.as_deref(),
            payload: json(&job.payload),
            result: json(&job.result),
            meta: json(&job.meta),
        }
    }
}

fn line(job: &JobRow) -> String {
    serde_json::to_string(&JobLine::of(job)).map_or_else(|_| String::new(), |line| line + "\n")
}
