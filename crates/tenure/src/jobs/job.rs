//! Jobs: to be enqueued, claimed, and shown.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tenure_core::FencingToken;
use tenure_core::jobs::{JobColumns, JobState};
use tenure_core::keeper::Loss;
use tokio::sync::watch;
use tokio_postgres::Row;

use super::db::invalid;
use super::heart::{self, Look};
use super::schema;
use crate::{Clock, Error, ErrorKind, Result};

/// The largest payload, in bytes: what is larger belongs elsewhere, with its name in the payload.
pub(super) const MAX_PAYLOAD: usize = 1 << 20;
/// The longest unique key, in bytes.
const MAX_KEY: usize = 500;
/// The longest delay.
const MAX_DELAY: Duration = Duration::from_secs(100 * 366 * 24 * 60 * 60);

/// A job to be enqueued.
///
/// ```
/// use std::time::Duration;
/// use tenure::jobs::NewJob;
///
/// let job = NewJob::json(r#"{"report": 7}"#)?
///     .priority(5) // before those with less
///     .delay(Duration::from_secs(3600)) // not in the next hour
///     .max_attempts(3) // then it is given up
///     .unique_key("report 7"); // one open job of this key at a time
/// assert!(NewJob::json("no JSON").is_err());
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct NewJob {
    pub(super) payload: String,
    pub(super) priority: i32,
    pub(super) delay: Duration,
    pub(super) max_attempts: i32,
    pub(super) unique_key: Option<String>,
}

impl NewJob {
    /// A job whose payload is this text of JSON.
    ///
    /// # Errors
    ///
    /// `Invalid` where it is none, or longer than 1 MiB.
    pub fn json(text: impl Into<String>) -> Result<Self> {
        let payload = text.into();
        if payload.len() > MAX_PAYLOAD {
            let message = format!(
                "the payload has {} bytes, and {MAX_PAYLOAD} at most are kept in a row: keep it elsewhere and name it here",
                payload.len()
            );
            return Err(invalid(&message));
        }
        if let Err(error) = serde_json::from_str::<serde::de::IgnoredAny>(&payload) {
            return Err(invalid("the payload is no JSON").because(error));
        }
        Ok(Self {
            payload,
            priority: 0,
            delay: Duration::ZERO,
            max_attempts: schema::MAX_ATTEMPTS,
            unique_key: None,
        })
    }

    /// A job whose payload is this value.
    ///
    /// # Errors
    ///
    /// `Invalid` where it cannot be written as JSON, or is longer than 1 MiB.
    pub fn of(value: &impl Serialize) -> Result<Self> {
        let text = serde_json::to_string(value)
            .map_err(|error| invalid("the payload cannot be written as JSON").because(error))?;
        Self::json(text)
    }

    /// The higher, the earlier; 0 by default.
    #[must_use]
    pub fn priority(self, priority: i32) -> Self {
        Self { priority, ..self }
    }

    /// Not to be claimed before this time has passed.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// How often it is tried before it is given up: 10 times by default.
    #[must_use]
    pub fn max_attempts(self, limit: u32) -> Self {
        Self { max_attempts: i32::try_from(limit).unwrap_or(i32::MAX), ..self }
    }

    /// At most one job of this key is open at a time: enqueueing another gives that one.
    #[must_use]
    pub fn unique_key(self, key: impl Into<String>) -> Self {
        Self { unique_key: Some(key.into()), ..self }
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.max_attempts < 1 {
            return Err(invalid("a job of 0 attempts is never tried: give at least 1"));
        }
        if self.delay > MAX_DELAY {
            return Err(invalid("the delay is longer than a hundred years"));
        }
        match &self.unique_key {
            Some(key) if key.is_empty() || key.len() > MAX_KEY || key.contains('\0') => {
                let message = format!("the unique key must have 1 to {MAX_KEY} bytes, and no NUL");
                Err(invalid(&message))
            }
            _ => Ok(()),
        }
    }
}

/// What became of a job that was to be enqueued.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Enqueued {
    /// Its id.
    pub id: String,
    /// Whether it is new; else there was an open job of the same unique key, and this is its id.
    pub new: bool,
}

/// A claimed job as its handler sees it. A clone shows the same job.
#[derive(Clone)]
pub struct Job(pub(super) Arc<JobData>);

pub(super) struct JobData {
    pub(super) id: String,
    pub(super) payload: String,
    pub(super) attempt: u32,
    pub(super) max_attempts: Option<u32>,
    pub(super) number: i64,
    pub(super) token: FencingToken,
    pub(super) clock: Clock,
    pub(super) stop_grace: Duration,
    pub(super) look: watch::Receiver<Look>,
    pub(super) pid: u32,
}

impl Job {
    /// Its id.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Its payload, as JSON; `null` where the row has none.
    pub fn payload(&self) -> &str {
        &self.0.payload
    }

    /// Its payload as a value.
    ///
    /// # Errors
    ///
    /// `Invalid` where the payload is no such value.
    pub fn payload_as<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.0.payload).map_err(|error| {
            invalid(&format!("the payload of job {} is another", self.id())).because(error)
        })
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// How many attempts it has; `None` where there is no limit.
    pub fn max_attempts(&self) -> Option<u32> {
        self.0.max_attempts
    }

    /// The number that grows with every claim of this job, to be checked by whatever the job changes.
    pub fn fencing_token(&self) -> FencingToken {
        self.0.token
    }

    /// That number as it stands in the row, for [statements](super::sql) of your own.
    pub fn lease_token(&self) -> i64 {
        self.0.number
    }

    /// Whether it is ours at this moment.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long it is ours for certain, unless its lease is renewed or lost before.
    pub fn remaining(&self) -> Duration {
        let Look { deadline, lost } = *self.0.look.borrow();
        // A forked copy of the process has no part in it.
        if lost.is_some() || std::process::id() != self.0.pid {
            return Duration::ZERO;
        }
        deadline.since(self.0.clock.now())
    }

    /// Resolves when it is no longer ours: at the end of its lease, or when the database says so. Work on it should stop.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn lost(&self) -> Loss {
        heart::lost(&self.0.clock, &self.0.look).await
    }

    /// Resolves when it is time to stop: [`kill_after`](super::Options::kill_after) before the lease ends, unless a
    /// heartbeat moves that on; or when it is lost.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn ending(&self) {
        let mut look = self.0.look.clone();
        loop {
            let Look { deadline, lost } = *look.borrow_and_update();
            let end = deadline - self.0.stop_grace;
            if lost.is_some() || heart::until(&self.0.clock, &mut look, end).await {
                return;
            }
        }
    }

    /// Runs `work`, and drops it when the job is lost.
    ///
    /// # Errors
    ///
    /// `Lost` where the job was lost before `work` ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the job stays ours.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            reason = self.lost() => Err(lost(self.id(), &reason.to_string())),
            output = work => Ok(output),
        }
    }
}

/// The error of one who no longer has the job.
pub(super) fn lost(id: &str, why: &str) -> Error {
    Error::new(ErrorKind::Lost, format!("job {id} is no longer ours: {why}"))
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("id", &self.id())
            .field("attempt", &self.attempt())
            .field("token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// A job as its row shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobRow {
    /// Its id.
    pub id: String,
    /// What its columns say of it, by the database's clock.
    pub state: JobState,
    /// The higher, the earlier.
    pub priority: i64,
    /// When it was enqueued.
    pub created_at: Option<SystemTime>,
    /// When it was completed.
    pub completed_at: Option<SystemTime>,
    /// When it was given up.
    pub failed_at: Option<SystemTime>,
    /// Why its last attempt failed.
    pub error: Option<String>,
    /// When its lease ends, or its time comes.
    pub locked_until: Option<SystemTime>,
    /// How long that is from when it was read, by the database's clock; zero where it is past.
    pub left: Option<Duration>,
    /// Who has it.
    pub locked_by: Option<String>,
    /// Its payload, as JSON.
    pub payload: Option<String>,
    /// How often it was claimed.
    pub attempts: i32,
    /// How often it is tried at most.
    pub max_attempts: Option<i32>,
    /// The number of its last claim.
    pub lease_token: i64,
    /// Its unique key.
    pub unique_key: Option<String>,
}

impl JobRow {
    /// Reads what [`shown`](super::sql) selects.
    pub(super) fn read(row: &Row) -> Self {
        let (now, locked_by): (i64, Option<String>) = (row.get(0), row.get(8));
        let ahead: bool = row.get(16);
        // As the database compared it: its end may be no number at all.
        let until: Option<i64> = row.get(7);
        let locked_until = if ahead { Some(i64::MAX) } else { until.map(|until| until.min(now)) };
        let columns = JobColumns {
            completed: row.get(14),
            failed: row.get(15),
            locked_until,
            locked_by: locked_by.as_deref(),
        };
        Self {
            id: row.get(1),
            state: JobState::of(&columns, now),
            priority: row.get(2),
            created_at: time(row.get(3)),
            completed_at: time(row.get(4)),
            failed_at: time(row.get(5)),
            error: row.get(6),
            locked_until: time(until),
            left: until.map(|until| {
                Duration::from_micros(u64::try_from(until.saturating_sub(now)).unwrap_or_default())
            }),
            locked_by,
            payload: row.get(9),
            attempts: row.get(10),
            max_attempts: row.get(11),
            lease_token: row.get(12),
            unique_key: row.get(13),
        }
    }
}

/// Microseconds since 1970 as a time.
pub(super) fn time(micros: Option<i64>) -> Option<SystemTime> {
    let micros = micros?;
    let span = Duration::from_micros(micros.unsigned_abs());
    if micros < 0 { UNIX_EPOCH.checked_sub(span) } else { UNIX_EPOCH.checked_add(span) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_jobs_are_refused() {
        for text in ["", "{", "{'a': 1}", "nope", "{} {}"] {
            assert_eq!(NewJob::json(text).unwrap_err().kind(), ErrorKind::Invalid, "{text:?}");
        }
        let large = format!("\"{}\"", "x".repeat(MAX_PAYLOAD));
        let error = NewJob::json(large).unwrap_err();
        assert!(error.to_string().contains("1048578 bytes"), "{error}");
        let job = NewJob::json("null").unwrap();
        assert!(job.check().is_ok());
        assert!(job.clone().max_attempts(0).check().is_err());
        assert!(job.clone().delay(Duration::MAX).check().is_err());
        assert!(job.clone().unique_key("").check().is_err());
        assert!(job.unique_key("x".repeat(501)).check().is_err());
    }
}
