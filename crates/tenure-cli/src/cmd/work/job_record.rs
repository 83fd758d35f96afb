//! Release of a job whose worker was killed: the record that the worker leaves, and the program that reads it.
//!
//! The record has the URL of the database, which may contain a password. So it is neither an argument nor a variable
//! nor a file with a name: it is anonymous memory, passed as a descriptor to the guardian. The guardian passes it on
//! without reading it, and the command does not inherit it.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use tenure::Key;
use tenure::jobs::{ClaimIdentity, Job, JobOutcome, Options, Queue};

use crate::args::output::Output;
use crate::exit::Exit;
use crate::report::{Event, Reporter};

/// Maximum size of a record in bytes.
const MAX_RECORD_BYTES: u64 = 1 << 20;
/// Reason that is stored with the job.
const WORKER_KILLED: &str = "the worker was killed; the command was killed with it";

/// A claimed job, and how to release it. It has no `Debug`: the URL may contain a password.
#[derive(Serialize, Deserialize)]
pub(super) struct JobRecord {
    url: String,
    table: String,
    job: String,
    attempt: u32,
    lease_token: i64,
    worker: String,
    /// Time after which the lease has ended by itself.
    lease: Duration,
    /// Events are printed as JSON on stderr.
    json: bool,
    /// Only errors are printed.
    quiet: bool,
}

impl JobRecord {
    pub(super) fn new(url: &str, queue: &Queue, job: &Job, output: Output) -> Self {
        let ClaimIdentity { job: id, lease_token, worker, .. } = queue.claim_identity(job);
        Self {
            url: url.to_owned(),
            table: queue.table(),
            job: id,
            attempt: job.attempt(),
            lease_token,
            worker,
            lease: queue.options().lease,
            json: output.json,
            // The descriptor of `--events-fd` ends with the worker.
            quiet: output.quiet || output.events_fd.is_some(),
        }
    }

    /// The record in anonymous memory, to be read from its beginning.
    pub(super) fn into_descriptor(self) -> io::Result<OwnedFd> {
        let mut file = File::from(memfd_create("tenure-job", MemfdFlags::CLOEXEC)?);
        file.write_all(&serde_json::to_vec(&self)?)?;
        file.rewind()?;
        Ok(file.into())
    }

    fn read() -> io::Result<Self> {
        let mut text = Vec::new();
        io::stdin().take(MAX_RECORD_BYTES).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }
}

/// Releases the job that the record on stdin names.
pub(crate) fn release_job() -> Exit {
    let record = match JobRecord::read() {
        Ok(record) => record,
        Err(error) => return crate::cmd::fail("cannot read the record of the job", &error),
    };
    let name = match Key::new(&record.table) {
        Ok(name) => name,
        Err(error) => return crate::cmd::fail("invalid queue name", &error),
    };
    let output = Output { quiet: record.quiet, json: record.json, events_fd: None };
    crate::cmd::on_runtime(async {
        let reporter = Reporter::new(name, output, None);
        let exit = match release(&record).await {
            Ok(outcome) => {
                report_release(&reporter, &record, &outcome);
                Exit::Success
            }
            Err(error) => {
                let id = &record.job;
                let error = error.chain();
                reporter.error(&format!(
                    "job {id} of a killed worker is not released before its lease ends: {error}"
                ));
                Exit::Failed
            }
        };
        reporter.flush().await;
        exit
    })
}

async fn release(record: &JobRecord) -> tenure::Result<JobOutcome> {
    let options = Options::default().connections(1);
    let queue = Queue::builder().options(options).wait_for_store(record.lease);
    let queue = queue.connect(&record.url, &record.table).await?;
    let claim = ClaimIdentity::new(&*record.job, record.lease_token, &*record.worker);
    queue.release_dead(&claim, WORKER_KILLED, record.lease).await
}

fn report_release(reporter: &Reporter, record: &JobRecord, outcome: &JobOutcome) {
    let (outcome, reason) = match outcome {
        JobOutcome::Retried(why) => ("retried", why.clone()),
        JobOutcome::Failed(why) => ("failed", why.clone()),
        // The worker had recorded the outcome, or the lease had ended.
        _ => return,
    };
    let (job, attempt) = (record.job.clone(), record.attempt);
    reporter.log(&Event::JobEnded { job, attempt, outcome, reason: Some(reason) });
}
