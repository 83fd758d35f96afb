//! Jobs and checkpoints in rows of PostgreSQL: claimed by lease, freed when their worker is gone, and fenced.
//!
//! A queue is a table, `sync_jobs` unless named otherwise; `tenure schema --apply` makes it, or adds what it lacks. Workers
//! that use plain SQL on the same table share it: they exclude ours and are excluded by them.
//!
//! ```no_run
//! use tenure::jobs::{NewJob, Queue};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
//! let queue = Queue::connect("postgres://app@db.example/app", "sync_jobs").await?;
//! queue.enqueue(NewJob::json(r#"{"report": 7}"#)?.priority(5)).await?;
//! while let Some(job) = queue.claim().await? {
//!     println!("job {}, attempt {}: {}", job.id(), job.attempt(), job.payload());
//!     job.complete().await?;              // `Lost` where another has it by now
//! }
//! # Ok(()) }
//! ```
//!
//! **What is promised**: a job whose worker was killed is claimed again after its lease, and not before. The worker says
//! `lost` before that. Every write names the job's token, so that a late worker changes nothing. What no lease can do is
//! to keep a frozen worker from acting late elsewhere: write [the token](Job::fencing_token) there, or complete the job in
//! the [transaction](JobGuard::complete_in) of its effect.

mod batcher;
mod checkpoints;
mod db;
mod guard;
mod heart;
mod job;
mod manage;
mod notifications;
mod queue;
mod schema;
pub mod sql;
mod summary;
mod sweep;
mod worker;

use std::time::Duration;

use tenure_core::retry::ExponentialBackoff;

use crate::store::pg::pool::Pool;
use crate::store::pg::settings::Settings;
use crate::store::pg::table::Table;
use crate::store::pg::{incarnation, migrate};
use crate::{Clock, Result};

pub use checkpoints::{CheckpointClaim, CheckpointGuard, Checkpoints};
pub use guard::JobGuard;
pub use job::{Enqueued, Job, JobRow, NewJob};
pub use queue::Queue;
pub use summary::QueueSummary;
pub use sweep::Swept;
pub use tenure_core::jobs::JobState;
pub use worker::{Failure, JobOutcome, Progress, Worker, WorkerStats};

/// The table of jobs unless another is named.
pub const DEFAULT_JOBS_TABLE: &str = "sync_jobs";
/// The table of checkpoints unless another is named.
pub const DEFAULT_CHECKPOINTS_TABLE: &str = "sync_checkpoints";

/// How long a request may take that has no limit of its own.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The shortest lease: below it a slow moment of the network or the server would be a loss.
const MIN_LEASE: Duration = Duration::from_secs(1);

/// How a queue or checkpoints are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// How long a claim lasts unless renewed: 5 minutes for jobs, 2 minutes for checkpoints.
    pub lease: Duration,
    /// The pause between two heartbeats; a fifth of the lease for jobs, a quarter for checkpoints.
    pub heartbeat: Option<Duration>,
    /// The time that work needs to stop when its lease ends; see [`Job::ending`].
    pub stop_grace: Duration,
    /// The pause before the next attempt of a job that failed, in [`Worker`].
    pub backoff: ExponentialBackoff,
    /// How often expired leases are looked for, while jobs are claimed.
    pub sweep_every: Duration,
    /// How often an idle [`Worker`] looks for jobs that nobody told it of.
    pub poll: Duration,
    /// The most connections for requests; a [`Worker`] has one more.
    pub connections: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(300),
            heartbeat: None,
            stop_grace: Duration::ZERO,
            backoff: ExponentialBackoff { max: Duration::from_secs(600), ..Default::default() },
            sweep_every: Duration::from_secs(1),
            poll: Duration::from_secs(1),
            connections: 8,
        }
    }
}

impl Options {
    /// The same with another lease.
    #[must_use]
    pub const fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// The same with another pause between heartbeats.
    #[must_use]
    pub const fn heartbeat(self, every: Duration) -> Self {
        Self { heartbeat: Some(every), ..self }
    }

    /// The same with another time to stop.
    #[must_use]
    pub const fn stop_grace(self, span: Duration) -> Self {
        Self { stop_grace: span, ..self }
    }

    /// The same with other pauses between the attempts of a job.
    #[must_use]
    pub const fn backoff(self, backoff: ExponentialBackoff) -> Self {
        Self { backoff, ..self }
    }

    /// The same with another number of connections.
    #[must_use]
    pub const fn connections(self, connections: usize) -> Self {
        Self { connections, ..self }
    }
}

/// The SQL of tables, for a database administrator or to be applied.
///
/// ```
/// let schema = tenure::jobs::Schema::of_queue("sync_jobs")?;
/// assert!(schema.sql().contains("sync_jobs"));
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Schema(String);

impl Schema {
    /// The SQL that makes the table of a queue, or adds what it lacks.
    ///
    /// # Errors
    ///
    /// `Invalid` where the name is none.
    pub fn of_queue(table: &str) -> Result<Self> {
        let table = Table::parse(table, "")?;
        Ok(Self(format!("{}\n{}", schema::jobs(&table), incarnation::sql(&table))))
    }

    /// The SQL that makes the table of checkpoints, or adds what it lacks.
    ///
    /// # Errors
    ///
    /// `Invalid` where the name is none.
    pub fn of_checkpoints(table: &str) -> Result<Self> {
        let table = Table::parse(table, "")?;
        Ok(Self(format!("{}\n{}", schema::checkpoints(&table), incarnation::sql(&table))))
    }

    /// The SQL: safe to run twice and by several at once. It refuses a table that it does not understand. Beside the table
    /// it makes that of the server's incarnation.
    pub fn sql(&self) -> &str {
        &self.0
    }

    /// Runs it.
    ///
    /// # Errors
    ///
    /// `Misconfigured` where there is a table of that name that is not understood, or the server is a standby; `Denied`
    /// without the right to make or change it. Nothing is changed then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it run or not run, nothing in between.
    pub async fn apply(&self, url: &str) -> Result<()> {
        let (settings, _) = Settings::parse(url, &["table", "poll", "prepare"])?;
        let shown = settings.to_string();
        let clock = Clock::system();
        let pool = Pool::new(settings, clock.clone(), 1);
        migrate::apply(&pool, &clock, &self.0).await.map_err(|error| error.at(shown))
    }
}
