//! Reading and changing the settings of a queue: its pause.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::Queue;
use super::controls::{
    CONTROLS_CHANGED, ControlPlace, QUEUES_SHAPE, QUEUES_TABLE, QueuePause, SCHEDULES_TABLE,
};
use super::db::invalid;
use super::job::time;
use super::shared::QueueShared;
use crate::store::pg::clock::NOW;
use crate::store::pg::connect::Parameter;
use crate::store::pg::durable::DURABLE;
use crate::{Error, ErrorKind, Result};

/// Interval at which a worker looks for a table of settings that is missing.
const MISSING_TABLE_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum length of a reason, in bytes.
const MAX_REASON: usize = 1_000;

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
