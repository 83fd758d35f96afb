//! Settings of a queue that operators change while it runs: its pause, and the tables of its settings and schedules.
//!
//! They are rows of the table `tenure_queues`, in the schema of the queue's table, and tenure's own. Workers read the row
//! once per [`CONTROL_INTERVAL`], not with every claim: a queue without settings costs its claims nothing. A change is
//! also announced on the channel of the queue, so that workers that listen read it at once.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tenure_core::Time;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::Queue;
use super::db::invalid;
use super::job::time;
use super::shared::QueueShared;
use crate::mutex::Mutex;
use crate::store::pg::clock::NOW;
use crate::store::pg::connect::Parameter;
use crate::store::pg::durable::DURABLE;
use crate::store::pg::shape::TableShape;
use crate::{Error, ErrorKind, Result};

/// Name of the table.
pub(super) const QUEUES_TABLE: &str = "tenure_queues";

pub(super) const QUEUES_SHAPE: TableShape = TableShape {
    what: "The settings of tenure's queues in this schema",
    version: "tenure queues, version 1",
    columns: &[
        // Name of the queue's table, without its schema.
        ("queue", "text", "NOT NULL"),
        ("paused_at", "timestamp with time zone", ""),
        ("pause_reason", "text", ""),
        // Time of the last run of the retention, and the id that the next one continues after.
        ("pruned_at", "timestamp with time zone", ""),
        ("prune_after", "text", ""),
    ],
    key: "queue",
    rights: "SELECT, INSERT, UPDATE, DELETE",
    unlogged: false,
};

/// Name of the table of schedules.
pub(super) const SCHEDULES_TABLE: &str = "tenure_schedules";

pub(super) const SCHEDULES_SHAPE: TableShape = TableShape {
    what: "The schedules of tenure's queues in this schema",
    version: "tenure schedules, version 1",
    columns: &[
        ("queue", "text", "NOT NULL"),
        ("name", "text", "NOT NULL"),
        ("cron", "text", "NOT NULL"),
        ("time_zone", "text", "NOT NULL"),
        ("catch_up", "text", "NOT NULL"),
        ("payload", "text", "NOT NULL"),
        ("priority", "integer", "NOT NULL"),
        ("max_attempts", "integer", "NOT NULL"),
        ("next_at", "timestamp with time zone", "NOT NULL"),
        ("last_at", "timestamp with time zone", ""),
    ],
    key: "queue, name",
    rights: "SELECT, INSERT, UPDATE, DELETE",
    unlogged: false,
};

/// Interval at which a worker reads the settings.
pub(super) const CONTROL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which a worker looks for a table of settings that is missing.
const MISSING_TABLE_INTERVAL: Duration = Duration::from_secs(30);
/// Payload of the notification of changed settings.
pub(super) const CONTROLS_CHANGED: &str = "tenure:controls";
/// Maximum length of a reason, in bytes.
const MAX_REASON: usize = 1_000;

/// Pause of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuePause {
    /// Beginning of the pause, by the database's clock.
    pub since: Option<SystemTime>,
    /// Reason that the operator gave.
    pub reason: Option<String>,
}

/// Settings that a worker knows.
#[derive(Debug)]
pub(super) struct Controls {
    state: Mutex<ControlState>,
    callbacks: PauseCallbacks,
}

#[derive(Debug)]
struct ControlState {
    /// Place of the settings; `None` if there is no such table, or it was not looked for yet.
    place: Option<ControlPlace>,
    paused: Option<QueuePause>,
    /// True if a schedule of the queue was due when the settings were read.
    has_due_schedules: bool,
    next_reading: Time,
}

/// The row of a queue's settings.
#[derive(Clone, Debug)]
pub(super) struct ControlPlace {
    /// Quoted name of the schema.
    pub(super) schema: String,
    /// Name of the queue in the column `queue`.
    pub(super) queue: String,
    /// True if the table of schedules exists, too.
    pub(super) has_schedules: bool,
}

impl ControlPlace {
    fn table(&self) -> String {
        format!("{}.{QUEUES_TABLE}", self.schema)
    }
}

/// Callbacks for the beginning and the end of a pause.
#[derive(Clone, Default)]
pub(super) struct PauseCallbacks(Vec<Arc<OnPause>>);

type OnPause = dyn Fn(Option<&QueuePause>) + Send + Sync;

impl PauseCallbacks {
    pub(super) fn push(&mut self, f: impl Fn(Option<&QueuePause>) + Send + Sync + 'static) {
        self.0.push(Arc::new(f));
    }

    fn call(&self, pause: Option<&QueuePause>) {
        for callback in &self.0 {
            if std::panic::catch_unwind(AssertUnwindSafe(|| callback(pause))).is_err() {
                tracing::error!("a callback panicked; the queue goes on");
            }
        }
    }
}

impl std::fmt::Debug for PauseCallbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PauseCallbacks").field(&self.0.len()).finish()
    }
}

impl Controls {
    pub(super) fn new(callbacks: PauseCallbacks, now: Time) -> Self {
        let state =
            ControlState { place: None, paused: None, has_due_schedules: false, next_reading: now };
        Self { state: Mutex::new(state), callbacks }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.state.lock().paused.is_some()
    }

    /// True once for each reading that found a schedule due.
    #[cfg(feature = "schedules")]
    pub(super) fn take_due_schedules(&self) -> bool {
        std::mem::take(&mut self.state.lock().has_due_schedules)
    }

    /// Time at which the settings must be read again.
    pub(super) fn next_reading(&self) -> Time {
        self.state.lock().next_reading
    }

    /// Makes the next claim read the settings.
    pub(super) fn read_soon(&self, now: Time) {
        self.state.lock().next_reading = now;
    }

    /// True once per interval: the caller must read the settings.
    fn are_due(&self, now: Time) -> bool {
        let mut state = self.state.lock();
        let due = now >= state.next_reading;
        if due {
            state.next_reading = now + CONTROL_INTERVAL;
        }
        due
    }

    /// Keeps the settings that were read, and reports a pause that began or ended.
    fn note(&self, paused: Option<&QueuePause>) {
        let before = std::mem::replace(&mut self.state.lock().paused, paused.cloned());
        if before.as_ref() != paused {
            self.callbacks.call(paused);
        }
    }
}

impl QueueShared {
    /// Reads the settings if they were not read for [`CONTROL_INTERVAL`].
    pub(super) async fn refresh_controls(&self) -> Result<()> {
        if !self.controls.are_due(self.db.clock.now()) {
            return Ok(());
        }
        let read = self.read_controls().await;
        if read.is_err() {
            // Claims must not go on with what they know: the next one reads again.
            self.controls.read_soon(self.db.clock.now());
        }
        read.map(drop)
    }

    /// Reads the settings; the pause, if there is one.
    async fn read_controls(&self) -> Result<Option<QueuePause>> {
        let Some(place) = self.control_place().await? else { return Ok(None) };
        let has_due = if place.has_schedules {
            format!(
                "EXISTS (SELECT FROM {}.{SCHEDULES_TABLE} AS s WHERE s.queue = $1 AND s.next_at <= clock_timestamp())",
                place.schema
            )
        } else {
            "false".to_owned()
        };
        let sql = format!(
            "SELECT {NOW} AS now, {} AS paused_at, t.pause_reason, t.paused_at IS NOT NULL AS is_paused, \
                 {has_due} AS has_due_schedules \
             FROM (SELECT) AS one LEFT JOIN {} AS t ON t.queue = $1",
            super::sql::micros("paused_at"),
            place.table()
        );
        let (rows, _) = self.db.ask(&sql, &[(&place.queue, Type::TEXT)], self.db.by()).await?;
        let pause = |row: &Row| QueuePause {
            since: time(row.get("paused_at")),
            reason: row.get("pause_reason"),
        };
        let paused = rows.first().filter(|row| row.get("is_paused")).map(pause);
        self.controls.note(paused.as_ref());
        self.controls.state.lock().has_due_schedules =
            rows.iter().any(|row| row.get("has_due_schedules"));
        Ok(paused)
    }

    /// Place of the settings; `None` if there is no such table.
    pub(super) async fn control_place(&self) -> Result<Option<ControlPlace>> {
        if let Some(place) = self.controls.state.lock().place.clone() {
            return Ok(Some(place));
        }
        let sql = format!(
            "SELECT {NOW} AS now, q.place, q.queue, to_regclass(q.place || '.{QUEUES_TABLE}') IS NOT NULL AS exists, \
                 to_regclass(q.place || '.{SCHEDULES_TABLE}') IS NOT NULL AS has_schedules, \
                 coalesce(has_table_privilege(to_regclass(q.place || '.{QUEUES_TABLE}'), 'SELECT'), true) AS allowed \
             FROM (SELECT format('%I', n.nspname) AS place, c.relname::text AS queue \
                 FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)) AS q"
        );
        let table = self.db.table.quoted();
        let (rows, _) = self.db.ask(&sql, &[(&table, Type::TEXT)], self.db.by()).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        if !row.get::<_, bool>("allowed") {
            // A worker that ignored a pause would be worse than one that does not start.
            let message = format!(
                "the role may not read the table {QUEUES_TABLE}: an owner must GRANT {} on it, or run `tenure schema \
                 --apply` again, which grants them to the roles that may update the jobs",
                QUEUES_SHAPE.rights
            );
            return Err(Error::new(ErrorKind::Denied, message));
        }
        let mut state = self.controls.state.lock();
        if row.get("exists") {
            state.place = Some(ControlPlace {
                schema: row.get("place"),
                queue: row.get("queue"),
                has_schedules: row.get("has_schedules"),
            });
        } else {
            state.next_reading = self.db.clock.now() + MISSING_TABLE_INTERVAL;
        }
        Ok(state.place.clone())
    }
}

impl Queue {
    /// Pauses the queue: within a second, workers of tenure claim no more jobs of it, in all processes, until it is
    /// [resumed](Self::resume). Running jobs go on, and jobs can be enqueued. Workers that use plain SQL do not know of
    /// pauses. A paused queue keeps its first time and gets the new reason.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the table `tenure_queues` is missing: `tenure schema` creates it. `Invalid` if the reason is
    /// longer than 1,000 bytes.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue paused or not.
    pub async fn pause(&self, reason: &str) -> Result<()> {
        if reason.len() > MAX_REASON || reason.contains('\0') {
            return Err(self.at(invalid("invalid reason: give at most 1,000 bytes without NUL")));
        }
        let set = "INSERT INTO @table@ AS t (queue, paused_at, pause_reason) \
             VALUES ($1, clock_timestamp(), nullif($2, '')) ON CONFLICT (queue) DO UPDATE \
             SET paused_at = coalesce(t.paused_at, EXCLUDED.paused_at), pause_reason = EXCLUDED.pause_reason";
        self.set_controls(set, &[(&reason, Type::TEXT)]).await
    }

    /// Resumes a paused queue, and wakes its workers. Does nothing if it is not paused.
    ///
    /// # Errors
    ///
    /// As for [`pause`](Self::pause).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue paused or not.
    pub async fn resume(&self) -> Result<()> {
        let set =
            "UPDATE @table@ AS t SET paused_at = NULL, pause_reason = NULL WHERE t.queue = $1";
        self.set_controls(set, &[]).await
    }

    /// Reads the pause of the queue; `None` if it is not paused.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the server cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn paused(&self) -> Result<Option<QueuePause>> {
        self.0.read_controls().await.map_err(|error| self.at(error))
    }

    /// Changes the row of the settings by a statement on `@table@`, whose first parameter is the queue, and announces it.
    async fn set_controls(&self, statement: &str, rest: &[Parameter<'_>]) -> Result<()> {
        let place = self.control_place().await?;
        let channel = super::sql::channel(&self.0.db.table);
        let statement = statement.replace("@table@", &place.table());
        let sql = format!(
            "WITH set AS ({statement} RETURNING {DURABLE}) \
             SELECT {NOW} AS now, (SELECT count(*) FROM set), pg_notify('{channel}', '{CONTROLS_CHANGED}')::text"
        );
        let queue: Parameter<'_> = (&place.queue, Type::TEXT);
        let parameters: Vec<Parameter<'_>> =
            std::iter::once(queue).chain(rest.iter().cloned()).collect();
        self.request(&sql, &parameters).await?;
        self.0.controls.read_soon(self.0.db.clock.now());
        Ok(())
    }

    /// Place of the settings.
    pub(super) async fn control_place(&self) -> Result<ControlPlace> {
        let place = self.0.control_place().await.map_err(|error| self.at(error))?;
        place.ok_or_else(|| self.missing_table(QUEUES_TABLE))
    }

    /// Error that a table of tenure's own is missing.
    pub(super) fn missing_table(&self, name: &str) -> Error {
        let message = format!(
            "there is no table {name} in the schema of {}: run `{}`",
            self.table(),
            self.0.db.schema_command()
        );
        self.at(Error::new(ErrorKind::Misconfigured, message))
    }
}
