//! One command for one job.

use std::ffi::OsString;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tenure::jobs::{Failure, Job, Queue};

use super::running_jobs::RunningJobs;
use crate::child::{Child, Streams};
use crate::hold::Hold;
use crate::report::{Event, Reporter};
use crate::supervise::{ChildOutcome, HandoffAction, Supervisor};
use crate::terminal::Terminal;

/// How much of what a command says last is kept as its error, in bytes.
const STDERR_TAIL_BYTES: usize = 2_000;
/// How long what a command has said may take to arrive after its end; what it left behind may go on speaking.
const STDERR_DRAIN_TIMEOUT: Duration = Duration::from_millis(200);

/// What all commands have in common.
pub(super) struct JobCommand {
    pub(super) command: Vec<OsString>,
    pub(super) environment: Vec<(&'static str, String)>,
    pub(super) ttl: Duration,
    pub(super) kill_after: Duration,
    pub(super) reporter: Arc<Reporter>,
    pub(super) running_jobs: Arc<RunningJobs>,
}

/// What every command is told.
pub(super) fn environment(queue: &Queue, lease: Duration) -> Vec<(&'static str, String)> {
    vec![
        ("TENURE_NAME", queue.table()),
        ("TENURE_HOLDER", queue.worker().to_owned()),
        ("TENURE_STORE", queue.store()),
        ("TENURE_TTL_MS", lease.as_millis().to_string()),
    ]
}

impl JobCommand {
    /// Runs the command for a job; the job is done where it ends with 0.
    pub(super) async fn run(self: Arc<Self>, job: Job) -> Result<(), Failure> {
        let mut environment = self.environment.clone();
        environment.extend([
            ("TENURE_TOKEN", job.fencing_token().to_string()),
            ("TENURE_JOB_ID", job.id().to_owned()),
            ("TENURE_JOB_ATTEMPT", job.attempt().to_string()),
        ]);
        let (stdin, payload) = io::pipe()?;
        let (said, stderr) = io::pipe()?;
        let hold = Hold::Job(&job);
        let streams =
            Streams { stdin: Some(OwnedFd::from(stdin)), stderr: Some(OwnedFd::from(stderr)) };
        let started = Child::start_with(&self.command, &environment, hold, streams).await;
        let child = match started {
            Ok(child) => child,
            Err(error) => {
                let exit = crate::cmd::report_start_error(&error, &self.command, &self.reporter);
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
        let tail = capture_stderr(said, Arc::clone(&self.reporter));
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
            on_request: HandoffAction::Ignore,
            stop_pending: false,
        };
        let ended = supervisor.run().await;
        let why = match ended {
            ChildOutcome::Exited(0) => return Ok(()),
            _ if self.running_jobs.is_stopping() => return Err(Failure::released()),
            ChildOutcome::Exited(code) => format!("exit code {code}"),
            ChildOutcome::Killed { signal, .. } => format!("died of signal {signal}"),
            ChildOutcome::Lost(reason) => format!("{reason}; the command was stopped"),
            ChildOutcome::GuardianDied => {
                "the guardian of the command was killed; so was it".to_owned()
            }
        };
        Err(Failure::retry(match tail.last().await {
            said if said.is_empty() => why,
            said => format!("{why}: {said}"),
        }))
    }
}

/// Gives a command its payload, on a thread of its own: it may never read it.
fn write_payload(mut pipe: PipeWriter, payload: String) {
    // A command that does not want to know closes its end.
    tokio::task::spawn_blocking(move || drop(pipe.write_all(payload.as_bytes())));
}

/// What a command has said last.
struct StderrTail {
    bytes: Arc<Mutex<Vec<u8>>>,
    reading: tokio::task::JoinHandle<()>,
}

/// Passes on what a command says, and keeps the last of it.
fn capture_stderr(mut pipe: PipeReader, reporter: Arc<Reporter>) -> StderrTail {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let tail = Arc::clone(&kept);
    let reading = tokio::task::spawn_blocking(move || {
        let mut bytes = [0; 8192];
        loop {
            let read = match pipe.read(&mut bytes) {
                Ok(0) | Err(_) => return,
                Ok(read) => &bytes[..read],
            };
            reporter.clear_progress();
            // A reader that went away misses the rest; the command goes on.
            let _ = io::stderr().write_all(read);
            let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
            tail.extend_from_slice(read);
            let surplus = tail.len().saturating_sub(STDERR_TAIL_BYTES);
            tail.drain(..surplus);
        }
    });
    StderrTail { bytes: kept, reading }
}

impl StderrTail {
    async fn last(self) -> String {
        let _ = tokio::time::timeout(STDERR_DRAIN_TIMEOUT, self.reading).await;
        let kept = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&kept).trim().to_owned()
    }
}
