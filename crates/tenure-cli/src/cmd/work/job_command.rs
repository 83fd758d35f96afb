//! The command of a job: its environment, payload, stderr and outcome.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tenure::jobs::{Failure, Job, Queue};

use super::job_outputs::{JobOutputs, OUTPUT_DRAIN_TIMEOUT, async_pipe};
use super::job_record::JobRecord;
use super::running_jobs::RunningJobs;
use crate::args::output::Output;
use crate::child::{Child, JobDescriptors, Streams};
use crate::cmd::supervised_command::report_start_error;
use crate::hold::Hold;
use crate::mutex::Mutex;
use crate::report::{Event, OutputStream, Reporter};
use crate::supervise::{ChildOutcome, HandoffAction, Supervisor};
use crate::terminal::Terminal;

/// Number of bytes of a command's last output on stderr that are kept as its error.
const STDERR_TAIL_BYTES: usize = 2_000;
/// Maximum length of a line of output that is passed on as a whole.
const MAX_LINE_BYTES: usize = 64 << 10;

/// The command and settings that all jobs share.
pub(super) struct JobCommand {
    pub(super) queue: Queue,
    /// URL of the database, with its password.
    pub(super) url: String,
    pub(super) output: Output,
    pub(super) command: Vec<OsString>,
    pub(super) environment: Vec<(&'static str, String)>,
    pub(super) ttl: Duration,
    pub(super) kill_after: Duration,
    /// Maximum time that the command of a job may run.
    pub(super) max_run: Option<Duration>,
    pub(super) reporter: Arc<Reporter>,
    pub(super) running_jobs: Arc<RunningJobs>,
}

/// Environment variables that the commands of all jobs share.
pub(super) fn environment(queue: &Queue, lease: Duration) -> Vec<(&'static str, String)> {
    vec![
        ("TENURE_NAME", queue.table()),
        ("TENURE_HOLDER", queue.worker().to_owned()),
        ("TENURE_STORE", queue.store()),
        ("TENURE_TTL_MS", lease.as_millis().to_string()),
    ]
}

impl JobCommand {
    /// Runs the command for a job. The job succeeds if the command exits with 0.
    pub(super) async fn run(self: Arc<Self>, job: Job) -> Result<(), Failure> {
        let mut environment = self.environment.clone();
        environment.extend([
            ("TENURE_TOKEN", job.fencing_token().to_string()),
            ("TENURE_LEASE_TOKEN", job.lease_token().to_string()),
            ("TENURE_JOB_ID", job.id().to_owned()),
            ("TENURE_JOB_ATTEMPT", job.attempt().to_string()),
        ]);
        environment.extend(job.traceparent().map(|parent| ("TRACEPARENT", parent.to_string())));
        let (stdin, payload) = io::pipe()?;
        let (stderr_pipe, stderr) = io::pipe()?;
        // On a terminal with a progress line, stdout must not reach the terminal beside it.
        let terminal = self.reporter.shows_progress() && io::stdout().is_terminal();
        let (stdout_pipe, stdout) = terminal.then(io::pipe).transpose()?.unzip();
        let (progress_pipe, progress) = async_pipe()?;
        let (result_pipe, result) = async_pipe()?;
        let hold = Hold::Job(&job);
        let record = JobRecord::new(&self.url, &self.queue, &job, self.output);
        let streams = Streams {
            stdin: Some(OwnedFd::from(stdin)),
            stdout: stdout.map(OwnedFd::from),
            stderr: Some(OwnedFd::from(stderr)),
            job: Some(JobDescriptors { record: record.into_descriptor()?, progress, result }),
        };
        let started = Child::start_with(&self.command, &environment, hold, streams).await;
        let child = match started {
            Ok(child) => child,
            Err(error) => {
                let exit = report_start_error(&error, &self.command, &self.reporter);
                self.running_jobs.give_up(exit);
                return Err(Failure::released());
            }
        };
        self.reporter.event(&Event::JobStarted {
            job: job.id().to_owned(),
            attempt: job.attempt(),
            token: job.fencing_token().to_string(),
        });
        write_payload(payload, format!("{}\n", job.payload()));
        let tail = pass_on(stderr_pipe, OutputStream::Stderr, Arc::clone(&self.reporter));
        let stdout =
            stdout_pipe.map(|pipe| pass_on(pipe, OutputStream::Stdout, Arc::clone(&self.reporter)));
        let reporter = Arc::clone(&self.reporter);
        let outputs = JobOutputs::read(&job, progress_pipe, result_pipe, reporter);
        let mut running_job = self.running_jobs.register();
        let mut supervisor = Supervisor {
            hold,
            child,
            signals: &mut running_job.signals,
            terminal: Terminal::none(),
            reporter: &self.reporter,
            ttl: self.ttl,
            kill_after: self.kill_after,
            hard_end: None,
            max_run: self.max_run,
            on_request: HandoffAction::Ignore,
            stop_pending: false,
            stop_requested: false,
        };
        let ended = supervisor.run().await;
        if let Some(stdout) = stdout {
            stdout.last().await;
        }
        let why = match ended {
            ChildOutcome::Exited(0) => match outputs.set_result(&job).await {
                Ok(()) => return Ok(()),
                Err(why) => why,
            },
            _ if self.running_jobs.is_stopping() => return Err(Failure::released()),
            ChildOutcome::Exited(code) => format!("exit code {code}"),
            ChildOutcome::Killed { signal, .. } => format!("killed by signal {signal}"),
            ChildOutcome::Lost(reason) => format!("{reason}; the command was stopped"),
            ChildOutcome::GuardianDied => {
                "the guardian was killed; the command was killed with it".to_owned()
            }
        };
        Err(Failure::retry(match tail.last().await {
            stderr if stderr.is_empty() => why,
            stderr => format!("{why}: {stderr}"),
        }))
    }
}

/// Writes the payload to the command's stdin, on a separate thread: the command may never read it.
fn write_payload(mut pipe: PipeWriter, payload: String) {
    // A command that does not read its payload closes stdin, and the write fails. That is no error of the job.
    tokio::task::spawn_blocking(move || drop(pipe.write_all(payload.as_bytes())));
}

/// Output of a command that is passed on to the same stream of this process, and its last bytes.
struct PassedOutput {
    tail: Arc<Mutex<Vec<u8>>>,
    reading: tokio::task::JoinHandle<()>,
}

/// Passes on what a command writes to `pipe`.
fn pass_on(mut pipe: PipeReader, stream: OutputStream, reporter: Arc<Reporter>) -> PassedOutput {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let tail = Arc::clone(&kept);
    let reading = tokio::task::spawn_blocking(move || {
        // Whole lines on a terminal: the progress line is shown between any two of them.
        let by_line = reporter.shows_progress();
        let mut waiting = Vec::new();
        let mut bytes = [0; 8192];
        loop {
            let read = match pipe.read(&mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(read) => &bytes[..read],
            };
            waiting.extend_from_slice(read);
            let end = waiting.iter().rposition(|byte| *byte == b'\n').map(|last| last + 1);
            let ready = match end {
                Some(end) if by_line => end,
                None if by_line && waiting.len() < MAX_LINE_BYTES => 0,
                _ => waiting.len(),
            };
            if ready > 0 {
                reporter.pass_on(&waiting[..ready], stream);
                waiting.drain(..ready);
            }
            let mut tail = tail.lock();
            tail.extend_from_slice(read);
            let surplus = tail.len().saturating_sub(STDERR_TAIL_BYTES);
            tail.drain(..surplus);
        }
        if !waiting.is_empty() {
            reporter.pass_on(&waiting, stream);
        }
    });
    PassedOutput { tail: kept, reading }
}

impl PassedOutput {
    /// Waits until all output is passed on, and returns its last bytes.
    async fn last(self) -> String {
        let _ = tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, self.reading).await;
        let kept = self.tail.lock();
        String::from_utf8_lossy(&kept).trim().to_owned()
    }
}
