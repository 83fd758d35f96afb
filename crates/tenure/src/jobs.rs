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
mod bulk;
mod checkpoints;
mod claims;
mod completions;
mod controls;
mod copy_rows;
mod counters;
mod db;
mod dead_claim;
mod detached;
mod enqueue;
mod guard;
mod heart;
mod import;
mod job;
mod listener;
mod maintenance;
mod manage;
mod migration;
mod notifications;
mod optional_columns;
mod options;
mod pause;
mod pending_progress;
mod queue;
mod retention;
#[cfg(feature = "schedules")]
mod schedules;
mod schema;
mod set_aside;
mod shared;
pub mod sql;
mod sql_function;
mod summary;
mod sweep;
mod worker;

pub use bulk::{JobChange, JobFilter, JobsChanged};
pub use checkpoints::detached::{CheckpointHandle, CheckpointRow};
pub use checkpoints::{CheckpointClaim, CheckpointGuard, Checkpoints};
pub use controls::QueuePause;
pub use dead_claim::ClaimIdentity;
pub use guard::JobGuard;
pub use import::ImportedJobs;
pub use job::{Enqueued, Job, JobRow, NewJob};
pub use migration::{Schema, SchemaPlan, SchemaStage, UndoOptions};
pub use options::{DEFAULT_CHECKPOINTS_TABLE, DEFAULT_JOBS_TABLE, Options};
pub use queue::{Queue, QueueBuilder};
pub use retention::Retention;
#[cfg(feature = "schedules")]
pub use schedules::{NewSchedule, ScheduleRow};
pub use set_aside::JobSetAside;
pub use summary::QueueSummary;
pub use sweep::Swept;
pub use tenure_core::TraceParent;
#[cfg(feature = "schedules")]
pub use tenure_core::jobs::CatchUp;
pub use tenure_core::jobs::{JobState, ProgressLines};
pub use worker::{Failure, JobOutcome, Progress, Worker, WorkerStats};
