//! Jobs: to enqueue, claimed, and as their rows show them.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tenure_core::jobs::{JobColumns, JobState, progress_text};
use tenure_core::keeper::Loss;
use tenure_core::trace_parent::InvalidTraceParent;
use tenure_core::{FencingToken, TraceParent};
use tokio::sync::watch;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};

use super::db::invalid;
use super::heart::{self, Look};
use super::optional_columns::OptionalColumns;
use super::options::MAX_ATTEMPTS;
use super::pending_progress::PendingProgress;
use crate::mutex::Mutex;
use crate::{Clock, Error, ErrorKind, Result};

/// Maximum size of a payload, and of a result, in bytes. Larger data belongs elsewhere, with a reference to it in the payload.
pub(super) const MAX_PAYLOAD: usize = 1 << 20;
/// Maximum length of a unique key, and of the name of a group, in bytes.
const MAX_KEY: usize = 500;
/// Key of the trace context in the metadata.
const TRACE_KEY: &str = "traceparent";
/// Maximum size of metadata in bytes.
const MAX_META: usize = 16 << 10;
/// Maximum delay.
const MAX_DELAY: Duration = Duration::from_secs(100 * 366 * 24 * 60 * 60);

/// A job to enqueue.
///
/// ```
/// use std::time::Duration;
/// use tenure::jobs::NewJob;
///
/// let job = NewJob::json(r#"{"report": 7}"#)?
///     .priority(5) // before jobs of a lower priority
///     .delay(Duration::from_secs(3600)) // not in the next hour
///     .max_attempts(3) // then it is marked as failed
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
    pub(super) group_key: Option<String>,
    /// A JSON object.
    pub(super) meta: Option<serde_json::Value>,
}

impl NewJob {
    /// Creates a job whose payload is this JSON text.
    ///
    /// # Errors
    ///
    /// `Invalid` if the text is not JSON, or is longer than 1 MiB.
    pub fn json(text: impl Into<String>) -> Result<Self> {
        let payload = checked_json(text.into(), "payload")?;
        Ok(Self {
            payload,
            priority: 0,
            delay: Duration::ZERO,
            max_attempts: MAX_ATTEMPTS,
            unique_key: None,
            group_key: None,
            meta: None,
        })
    }

    /// Creates a job whose payload is this value, serialized as JSON.
    ///
    /// # Errors
    ///
    /// `Invalid` if the value cannot be written as JSON, or is longer than 1 MiB.
    pub fn of(value: &impl Serialize) -> Result<Self> {
        let text = serde_json::to_string(value)
            .map_err(|error| invalid("the payload cannot be written as JSON").because(error))?;
        Self::json(text)
    }

    /// Sets the priority: jobs of a higher priority are claimed first. 0 by default.
    #[must_use]
    pub fn priority(self, priority: i32) -> Self {
        Self { priority, ..self }
    }

    /// Delays the job: it cannot be claimed before this time has passed.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// Sets the number of attempts after which the job is marked as failed: 10 by default.
    #[must_use]
    pub fn max_attempts(self, limit: u32) -> Self {
        Self { max_attempts: i32::try_from(limit).unwrap_or(i32::MAX), ..self }
    }

    /// Sets a unique key. At most one job of a key is open at a time: enqueueing another returns the id of the open
    /// job.
    #[must_use]
    pub fn unique_key(self, key: impl Into<String>) -> Self {
        Self { unique_key: Some(key.into()), ..self }
    }

    /// Sets the group of the job, stored in the column `group_key`: a customer, a host, anything that jobs have in common.
    #[must_use]
    pub fn group_key(self, group: impl Into<String>) -> Self {
        Self { group_key: Some(group.into()), ..self }
    }

    /// Sets metadata of the job: a JSON object about the job itself, apart from its payload. A handler reads it with
    /// [`Job::meta`].
    ///
    /// # Errors
    ///
    /// `Invalid` if the text is no JSON object, or is longer than 16 KiB.
    pub fn meta(self, text: &str) -> Result<Self> {
        if text.len() > MAX_META {
            let message =
                format!("the metadata has {} bytes, the maximum is {MAX_META}", text.len());
            return Err(invalid(&message));
        }
        match serde_json::from_str::<serde_json::Value>(text) {
            Ok(meta) if meta.is_object() => Ok(Self { meta: Some(meta), ..self }),
            Ok(_) => Err(invalid("the metadata is no JSON object")),
            Err(error) => Err(invalid("the metadata is not JSON").because(error)),
        }
    }

    /// Adds the `traceparent` of the W3C Trace Context to the metadata: the trace that the job belongs to. `tenure work`
    /// passes it to the job's command in `TRACEPARENT`.
    ///
    /// # Errors
    ///
    /// `Invalid` if the text is no `traceparent`.
    pub fn traceparent(mut self, text: &str) -> Result<Self> {
        let parent: TraceParent =
            text.parse().map_err(|error: InvalidTraceParent| invalid(&error.to_string()))?;
        let meta = self.meta.get_or_insert_with(|| serde_json::json!({}));
        meta[TRACE_KEY] = parent.as_str().into();
        Ok(self)
    }

    /// Checks the settings, as enqueueing does.
    ///
    /// # Errors
    ///
    /// `Invalid` if the job cannot be enqueued with them.
    pub fn check(&self) -> Result<()> {
        if self.max_attempts < 1 {
            return Err(invalid("a job with 0 attempts never runs: give at least 1"));
        }
        if self.delay > MAX_DELAY {
            return Err(invalid("the delay is longer than a hundred years"));
        }
        for (key, what) in [(&self.unique_key, "unique key"), (&self.group_key, "group key")] {
            if key
                .as_ref()
                .is_some_and(|key| !(1..=MAX_KEY).contains(&key.len()) || key.contains('\0'))
            {
                let message = format!("the {what} must have 1 to {MAX_KEY} bytes and no NUL");
                return Err(invalid(&message));
            }
        }
        Ok(())
    }
}

/// The text, if it is JSON of a bounded size.
fn checked_json(text: String, what: &str) -> Result<String> {
    if text.len() > MAX_PAYLOAD {
        let message = format!(
            "the {what} has {} bytes, the maximum is {MAX_PAYLOAD}: store it elsewhere and put a reference into the job",
            text.len()
        );
        return Err(invalid(&message));
    }
    match serde_json::from_str::<serde::de::IgnoredAny>(&text) {
        Ok(_) => Ok(text),
        Err(error) => Err(invalid(&format!("the {what} is not JSON")).because(error)),
    }
}

/// Result of enqueueing a job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Enqueued {
    /// Id of the job.
    pub id: String,
    /// True if the job was inserted. False if there was an open job of the same unique key; `id` is then that of the
    /// open job.
    pub new: bool,
}

/// A claimed job as its handler sees it. Clones refer to the same claim.
#[derive(Clone)]
pub struct Job(pub(super) Arc<JobData>);

pub(super) struct JobData {
    pub(super) id: String,
    pub(super) payload: String,
    pub(super) meta: Option<String>,
    pub(super) attempt: u32,
    pub(super) max_attempts: Option<u32>,
    pub(super) number: i64,
    pub(super) token: FencingToken,
    pub(super) clock: Clock,
    pub(super) stop_grace: Duration,
    pub(super) look: watch::Receiver<Look>,
    pub(super) progress: Arc<PendingProgress>,
    /// Result that the completion stores.
    pub(super) result: Mutex<Option<String>>,
    pub(super) optional: OptionalColumns,
    pub(super) pid: u32,
}

impl Job {
    /// Id of the job.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Payload as JSON text; `null` if the row has no payload.
    pub fn payload(&self) -> &str {
        &self.0.payload
    }

    /// Deserializes the payload.
    ///
    /// # Errors
    ///
    /// `Invalid` if the payload does not deserialize as `T`.
    pub fn payload_as<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.0.payload).map_err(|error| {
            invalid(&format!("the payload of job {} has another type than expected", self.id()))
                .because(error)
        })
    }

    /// Metadata as JSON text; `None` if the job has none, or the table has no column `meta`.
    pub fn meta(&self) -> Option<&str> {
        self.0.meta.as_deref()
    }

    /// Trace that the job belongs to, if its metadata has a valid `traceparent`.
    pub fn traceparent(&self) -> Option<TraceParent> {
        let meta: serde_json::Value = serde_json::from_str(self.meta()?).ok()?;
        meta.get(TRACE_KEY)?.as_str()?.parse().ok()
    }

    /// Reports the progress of the work, a text of up to 1 KiB. The next heartbeat stores it, in the statement that renews
    /// the lease. A text that is longer is cut.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the table has no column `progress`; `tenure schema` adds it.
    pub fn set_progress(&self, text: &str) -> Result<()> {
        if !self.0.optional.progress {
            return Err(self.column_is_missing("progress"));
        }
        self.0.progress.set(progress_text(text.as_bytes()));
        Ok(())
    }

    /// Sets the result of the job, JSON that its completion stores. Any completion of this claim does so, except one in
    /// SQL. Without a completion the result is lost.
    ///
    /// # Errors
    ///
    /// `Invalid` if the text is not JSON, or is longer than 1 MiB. `Misconfigured` if the table has no column `result`;
    /// `tenure schema` adds it.
    pub fn set_result(&self, text: impl Into<String>) -> Result<()> {
        let text = checked_json(text.into(), "result")?;
        if self.0.optional.result.is_none() {
            return Err(self.column_is_missing("result"));
        }
        *self.0.result.lock() = Some(text);
        Ok(())
    }

    pub(super) fn result(&self) -> Option<String> {
        self.0.result.lock().clone()
    }

    fn column_is_missing(&self, column: &str) -> Error {
        let message = format!(
            "the table of job {} has no column {column} that tenure can use: run `tenure schema`, which adds it",
            self.id()
        );
        Error::new(ErrorKind::Misconfigured, message)
    }

    /// Number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// Maximum number of attempts; `None` if there is no limit.
    pub fn max_attempts(&self) -> Option<u32> {
        self.0.max_attempts
    }

    /// Fencing token of this claim. It grows with every claim of this job; systems that the job writes to should check
    /// it.
    pub fn fencing_token(&self) -> FencingToken {
        self.0.token
    }

    /// Low half of the fencing token, as stored in the column `lease_token`: a parameter of the
    /// [statements](super::sql).
    pub fn lease_token(&self) -> i64 {
        self.0.number
    }

    /// True while this worker holds the job. A local clock check: no I/O.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Time until the deadline of the lease, which renewals extend; zero once the job is lost, and [`Duration::MAX`]
    /// once it [is completed](Self::is_completed). A local clock check: no I/O.
    pub fn remaining(&self) -> Duration {
        let Look { deadline, lost, completed } = *self.0.look.borrow();
        // A forked copy of the process does not hold the job: only the parent renews it.
        if lost.is_some() || std::process::id() != self.0.pid {
            return Duration::ZERO;
        }
        if completed { Duration::MAX } else { deadline.since(self.0.clock.now()) }
    }

    /// True once a renewal found that the job was completed with the token of this claim, by a statement of the handler
    /// or of its command. Then no other worker can claim the job, and the rest of the work has no deadline.
    pub fn is_completed(&self) -> bool {
        self.0.look.borrow().completed
    }

    /// Resolves when the job [is completed](Self::is_completed) by the work itself, at the next renewal. Never resolves
    /// otherwise.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn completed(&self) {
        heart::completed(&self.0.look).await;
    }

    /// Resolves when the job is lost: at the deadline of its lease, or when the database refuses a renewal. Work on the
    /// job should stop. Never resolves once the job [is completed](Self::is_completed).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing; the next call resolves at once.
    pub async fn lost(&self) -> Loss {
        heart::lost(&self.0.clock, &self.0.look).await
    }

    /// Resolves when work must begin to stop: [`stop_grace`](super::Options::stop_grace) before the deadline of the
    /// lease, which heartbeats extend, or when the job is lost.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn ending(&self) {
        let mut look = self.0.look.clone();
        loop {
            let Look { deadline, lost, completed } = *look.borrow_and_update();
            if completed {
                return std::future::pending().await;
            }
            let end = deadline - self.0.stop_grace;
            if lost.is_some()
                || heart::until(&self.0.clock, &mut look, end).await && !look.borrow().completed
            {
                return;
            }
        }
    }

    /// Runs `work` and drops it if the job is lost.
    ///
    /// # Errors
    ///
    /// `Lost` if the job was lost before `work` ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`; the job stays held.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            reason = self.lost() => Err(lost(self.id(), &reason.to_string())),
            output = work => Ok(output),
        }
    }
}

/// Error of a worker that no longer holds the job.
pub(super) fn lost(id: &str, why: &str) -> Error {
    Error::new(ErrorKind::Lost, format!("job {id} was lost: {why}"))
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
    /// Id of the job.
    pub id: String,
    /// State derived from the columns and the database's clock.
    pub state: JobState,
    /// Priority: higher is claimed first.
    pub priority: i64,
    /// Time at which the job was enqueued.
    pub created_at: Option<SystemTime>,
    /// Time at which the job was completed.
    pub completed_at: Option<SystemTime>,
    /// Time at which the job was marked as failed.
    pub failed_at: Option<SystemTime>,
    /// Error of the last failed attempt.
    pub error: Option<String>,
    /// End of the lease, or of the delay.
    pub locked_until: Option<SystemTime>,
    /// Time from the reading of the row to `locked_until`, by the database's clock; zero if that has passed.
    pub left: Option<Duration>,
    /// Worker that holds the job.
    pub locked_by: Option<String>,
    /// Payload as JSON text.
    pub payload: Option<String>,
    /// Number of claims that count as attempts.
    pub attempts: i32,
    /// Maximum number of attempts.
    pub max_attempts: Option<i32>,
    /// Token of the last claim.
    pub lease_token: i64,
    /// Unique key, if the job has one.
    pub unique_key: Option<String>,
    /// Group, if the job has one.
    pub group_key: Option<String>,
    /// Last progress that its worker reported.
    pub progress: Option<String>,
    /// Result of the completed job, as JSON text.
    pub result: Option<String>,
    /// Metadata, as JSON text.
    pub meta: Option<String>,
}

impl JobRow {
    /// Reads the columns that the statements `show` and `list` select.
    pub(super) fn read(row: &Row) -> Self {
        let text = |column: &str| row.get::<_, Option<LossyText>>(column).map(|text| text.0);
        let (now, locked_by): (i64, Option<String>) = (row.get("now"), text("locked_by"));
        let ahead: bool = row.get("lock_is_ahead");
        // `locked_until` may be infinite, and is then not selected as a number. So the comparison that the database
        // made decides, and the number only says how far away the end is.
        let until: Option<i64> = row.get("locked_until");
        let locked_until = if ahead { Some(i64::MAX) } else { until.map(|until| until.min(now)) };
        let columns = JobColumns {
            completed: row.get("completed"),
            failed: row.get("failed"),
            locked_until,
            locked_by: locked_by.as_deref(),
        };
        Self {
            id: text("id").unwrap_or_default(),
            state: JobState::of(&columns, now),
            priority: row.get("priority"),
            created_at: time(row.get("created_at")),
            completed_at: time(row.get("completed_at")),
            failed_at: time(row.get("failed_at")),
            error: text("error_message"),
            locked_until: time(until),
            left: until.map(|until| {
                Duration::from_micros(u64::try_from(until.saturating_sub(now)).unwrap_or_default())
            }),
            locked_by,
            payload: text("payload"),
            attempts: row.get("attempts"),
            max_attempts: row.get("max_attempts"),
            lease_token: row.get("lease_token"),
            unique_key: text("unique_key"),
            group_key: text("group_key"),
            progress: text("progress"),
            result: text("result"),
            meta: text("meta"),
        }
    }
}

/// Text that the statement selects as bytes, which may be no UTF-8. Such bytes are replaced.
struct LossyText(String);

impl<'a> FromSql<'a> for LossyText {
    fn from_sql(
        _: &Type,
        raw: &'a [u8],
    ) -> std::result::Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(String::from_utf8_lossy(raw).into_owned()))
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::BYTEA
    }
}

/// Converts microseconds since 1970 to a time.
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
        assert!(job.clone().unique_key("x".repeat(501)).check().is_err());
        assert!(job.clone().group_key("a\0").check().is_err());
        for meta in ["", "7", "[]", "{", &format!("{{\"a\": \"{}\"}}", "x".repeat(MAX_META))] {
            assert_eq!(
                job.clone().meta(meta).unwrap_err().kind(),
                ErrorKind::Invalid,
                "{meta:.20}"
            );
        }
    }
}
