//! Jobs and checkpoints in rows of PostgreSQL: claimed by lease, claimed again when their worker dies, and fenced.
//!
//! A queue is a table, `sync_jobs` by default; `tenure schema --apply` creates it, or adds missing columns and indexes.
//! Workers that use plain SQL can share the table with workers that use this library: they exclude each other.
//!
//! ```no_run
//! use tenure::jobs::{NewJob, Queue};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tenure::Result<()> {
//! let queue = Queue::connect("postgres://app@db.example/app", "sync_jobs").await?;
//! queue.enqueue(NewJob::json(r#"{"report": 7}"#)?.priority(5)).await?;
//! while let Some(job) = queue.claim().await? {
//!     println!("job {}, attempt {}: {}", job.id(), job.attempt(), job.payload());
//!     job.complete().await?;              // `Lost` if another worker has claimed the job by now
//! }
//! # Ok(()) }
//! ```
//!
//! **Promise**: a job whose worker was killed is claimed again after its lease, and not before. A worker that loses its
//! lease reports `lost` before that. Every write names the job's token, so a late worker changes nothing. No lease can
//! keep a frozen worker from acting late elsewhere: write [the token](Job::fencing_token) there, or complete the job in
//! the [transaction](JobGuard::complete_in) of its effect.

mod batcher;
mod checkpoints;
mod claims;
mod completions;
mod db;
mod dead_claim;
mod detached;
mod enqueue;
mod guard;
mod heart;
mod job;
mod listener;
mod manage;
mod notifications;
mod options;
mod queue;
mod schema;
mod set_aside;
mod shared;
pub mod sql;
mod sql_function;
mod summary;
mod sweep;
mod worker;

use crate::store::pg::pool::Pool;
use crate::store::pg::settings::Settings;
use crate::store::pg::table::Table;
use crate::store::pg::{incarnation, migrate};
use crate::{Clock, Result};

pub use checkpoints::detached::{CheckpointHandle, CheckpointRow};
pub use checkpoints::{CheckpointClaim, CheckpointGuard, Checkpoints};
pub use dead_claim::ClaimIdentity;
pub use guard::JobGuard;
pub use job::{Enqueued, Job, JobRow, NewJob};
pub use options::{DEFAULT_CHECKPOINTS_TABLE, DEFAULT_JOBS_TABLE, Options};
pub use queue::{Queue, QueueBuilder};
pub use set_aside::JobSetAside;
pub use summary::QueueSummary;
pub use sweep::Swept;
pub use tenure_core::jobs::JobState;
pub use worker::{Failure, JobOutcome, Progress, Worker, WorkerStats};

/// SQL that creates the tables, to apply or to hand to a database administrator.
///
/// ```
/// let schema = tenure::jobs::Schema::of_queue("sync_jobs")?;
/// assert!(schema.sql().contains("sync_jobs"));
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Schema(String);

impl Schema {
    /// The SQL that creates the table of a queue, or adds missing columns and indexes.
    ///
    /// # Errors
    ///
    /// `Invalid` if the table name is invalid.
    pub fn of_queue(table: &str) -> Result<Self> {
        let table = Table::parse(table, "")?;
        Ok(Self(format!("{}\n{}", schema::jobs(&table), incarnation::sql(&table))))
    }

    /// The SQL that creates the table of checkpoints, or adds missing columns and indexes.
    ///
    /// # Errors
    ///
    /// `Invalid` if the table name is invalid.
    pub fn of_checkpoints(table: &str) -> Result<Self> {
        let table = Table::parse(table, "")?;
        Ok(Self(format!("{}\n{}", schema::checkpoints(&table), incarnation::sql(&table))))
    }

    /// The SQL text. It may run twice and in several sessions at once. It refuses a table with an unknown layout.
    /// It also creates the table of the server's incarnation.
    pub fn sql(&self) -> &str {
        &self.0
    }

    /// Runs the SQL.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if a table of that name has an unknown layout, or the server is a standby; `Denied` without the
    /// right to create or change the table. In these cases nothing is changed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the SQL either applied or not applied, nothing in between.
    pub async fn apply(&self, url: &str) -> Result<()> {
        let (settings, _) = Settings::parse(url, &["table", "poll", "prepare"])?;
        let shown = settings.to_string();
        let clock = Clock::system();
        let pool = Pool::new(settings, clock.clone(), 1);
        migrate::apply(&pool, &clock, &self.0).await.map_err(|error| error.at(shown))
    }
}
