//! Continuous readings of a job queue, for the page and for `tenure top`.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tenure::Result;
use tenure::jobs::{JobRow, JobState, Options, Queue, QueueSummary};
use tenure_core::Time;
use tenure_core::jobs::{QueueRates, RateWindow};

use crate::mutex::Mutex;

/// A queue that is read again and again.
pub(crate) struct QueueMonitor {
    queue: Queue,
    started: Instant,
    history: Mutex<ReadingHistory>,
}

/// Facts that only a comparison of readings shows.
#[derive(Debug, Default)]
struct ReadingHistory {
    rates: RateWindow,
    /// Time at which a claim was first seen, by job and token. Contains the running jobs of the last reading only.
    claims: HashMap<(String, i64), Time>,
}

/// One reading of a queue.
#[derive(Clone, Debug)]
pub(crate) struct QueueReading {
    pub(crate) summary: QueueSummary,
    /// Jobs per second; `None` before the second reading.
    pub(crate) rates: Option<QueueRates>,
}

impl QueueReading {
    /// Number of jobs in a state.
    pub(crate) fn count(&self, state: JobState) -> u64 {
        self.summary.counts.get(&state.to_string()).copied().unwrap_or(0)
    }

    /// True if the number of jobs in a state is an estimate, or a lower bound.
    fn is_inexact(&self, state: JobState) -> bool {
        self.is_estimate(state) || self.is_at_least(state)
    }

    /// True if the number of jobs in a state is an estimate of the server.
    pub(crate) fn is_estimate(&self, state: JobState) -> bool {
        state == JobState::Completed && self.summary.completed_is_estimate
    }

    /// True if there may be more jobs in a state.
    pub(crate) fn is_at_least(&self, state: JobState) -> bool {
        self.summary.at_least.contains(&state.to_string())
    }
}

impl QueueMonitor {
    pub(crate) async fn connect(url: &str, queue: &str) -> Result<Self> {
        let options = Options::default().connections(1);
        let queue = Queue::connect_with(url, queue, options).await?;
        Ok(Self { queue, started: Instant::now(), history: Mutex::default() })
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Reads the queue, with up to `limit` running and `limit` failed jobs.
    pub(crate) async fn read(&self, limit: usize) -> Result<QueueReading> {
        let summary = self.queue.summary(limit).await?;
        let mut reading = QueueReading { summary, rates: None };
        let now = self.now();
        let mut history = self.history.lock();
        // An estimate, or a number that counting ended at, makes no rate.
        let exact = |state| (!reading.is_inexact(state)).then(|| reading.count(state));
        history.rates.record(exact(JobState::Completed), exact(JobState::Failed), now);
        reading.rates = history.rates.rates();
        let before = std::mem::take(&mut history.claims);
        history.claims = reading
            .summary
            .running
            .iter()
            .map(|job| {
                let claim = (job.id.clone(), job.lease_token);
                let seen = before.get(&claim).copied().unwrap_or(now);
                (claim, seen)
            })
            .collect();
        Ok(reading)
    }

    /// Time since this claim of a job was first seen: the job has been running for at least this time. A row has no
    /// column for the start of its claim.
    pub(crate) fn running_for(&self, job: &JobRow) -> Option<Duration> {
        let history = self.history.lock();
        let seen = history.claims.get(&(job.id.clone(), job.lease_token)).copied();
        let runs = matches!(job.state, JobState::Running | JobState::Expired);
        seen.filter(|_| runs).map(|seen| self.now().since(seen))
    }

    fn now(&self) -> Time {
        Time::ZERO + self.started.elapsed()
    }
}
