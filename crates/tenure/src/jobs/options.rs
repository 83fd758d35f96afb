//! Settings of queues and checkpoints.

use std::time::Duration;

use tenure_core::retry::ExponentialBackoff;

/// Default name of the table of jobs.
pub const DEFAULT_JOBS_TABLE: &str = "sync_jobs";
/// Default name of the table of checkpoints.
pub const DEFAULT_CHECKPOINTS_TABLE: &str = "sync_checkpoints";

/// Default number of attempts of a job.
pub(super) const MAX_ATTEMPTS: i32 = 10;
/// Time limit of a request that has no limit of its own.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Shortest lease: with a shorter lease, a short delay of the network or the server would lose the job.
pub(super) const MIN_LEASE: Duration = Duration::from_secs(1);

/// Settings of a queue or of checkpoints.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// Time that a claim lasts unless renewed: 5 minutes for jobs, 2 minutes for checkpoints.
    pub lease: Duration,
    /// Interval between two heartbeats; by default a fifth of the lease for jobs, a quarter for checkpoints.
    pub heartbeat: Option<Duration>,
    /// Time that the work needs to stop before its lease ends; see [`Job::ending`](super::Job::ending).
    pub stop_grace: Duration,
    /// Delay of a [`Worker`](super::Worker) before the next attempt of a job that failed.
    pub backoff: ExponentialBackoff,
    /// Interval between two sweeps for expired leases, while jobs are claimed.
    pub sweep_every: Duration,
    /// Interval at which an idle [`Worker`](super::Worker) polls for jobs of which no notification arrived.
    pub poll: Duration,
    /// Maximum number of connections for requests; a [`Worker`](super::Worker) has one more.
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
    /// The same options with another lease.
    #[must_use]
    pub const fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// The same options with another interval between heartbeats.
    #[must_use]
    pub const fn heartbeat(self, every: Duration) -> Self {
        Self { heartbeat: Some(every), ..self }
    }

    /// The same options with another time to stop.
    #[must_use]
    pub const fn stop_grace(self, span: Duration) -> Self {
        Self { stop_grace: span, ..self }
    }

    /// The same options with other delays between the attempts of a job.
    #[must_use]
    pub const fn backoff(self, backoff: ExponentialBackoff) -> Self {
        Self { backoff, ..self }
    }

    /// The same options with another maximum number of connections.
    #[must_use]
    pub const fn connections(self, connections: usize) -> Self {
        Self { connections, ..self }
    }
}
