//! Schedules: jobs that are enqueued at the times of a cron expression, once over all workers of a queue.
//!
//! A schedule is a row of the table `tenure_schedules`, in the schema of the queue's table. The row has the time of the
//! next slot. A worker that finds it passed enqueues the jobs of the slots that are due and advances the row, in one
//! statement that compares the row's time with the time that it read: of several workers one succeeds. All times are those of
//! the database's clock.

mod calendar;

use std::time::SystemTime;

use tenure_core::jobs::CatchUp;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use self::calendar::{Calendar, rfc3339};
use super::Queue;
use super::controls::{ControlPlace, SCHEDULES_TABLE};
use super::db::invalid;
use super::job::{NewJob, time};
use super::shared::QueueShared;
use super::sql::micros;
use crate::store::pg::clock::NOW;
use crate::store::pg::connect::Parameter;
use crate::store::pg::durable::DURABLE;
use crate::{Error, Result};

/// Maximum length of a schedule's name, in bytes: the unique key of its jobs has the name and a time.
const MAX_NAME: usize = 200;
/// Maximum number of schedules that are read at once.
const MAX_DUE_SCHEDULES: i64 = 100;
/// Maximum number of schedules that are listed.
const MAX_LISTED_SCHEDULES: i64 = 1_000;

/// A schedule to add to a queue.
///
/// ```
/// use tenure::jobs::{CatchUp, NewJob, NewSchedule};
///
/// let report = NewJob::json(r#"{"report": "daily"}"#)?.priority(5);
/// let schedule = NewSchedule::new("daily report", "30 6 * * 1-5", report)?.time_zone("Europe/Berlin")?;
/// # drop(schedule.catch_up(CatchUp::None));
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a schedule does nothing until it is added to a queue"]
pub struct NewSchedule {
    name: String,
    cron: String,
    zone: String,
    catch_up: CatchUp,
    job: NewJob,
    calendar: Calendar,
}

impl NewSchedule {
    /// Creates a schedule of this name in UTC, by a cron expression of five fields or a name such as `@daily`. It enqueues
    /// jobs with the payload, the priority and the maximum number of attempts of `job`.
    ///
    /// # Errors
    ///
    /// `Invalid` if the name is empty or longer than 200 bytes, the expression is invalid, or the job has a delay or a
    /// unique key.
    pub fn new(name: impl Into<String>, cron: impl Into<String>, job: NewJob) -> Result<Self> {
        let (name, cron, zone) = (name.into(), cron.into(), "UTC".to_owned());
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return Err(invalid(
                "invalid name of a schedule: give 1 to 200 bytes without control characters",
            ));
        }
        job.check()?;
        if !job.delay.is_zero() || job.unique_key.is_some() {
            return Err(invalid(
                "the job of a schedule has neither a delay nor a unique key of its own",
            ));
        }
        let calendar = Calendar::parse(&cron, &zone)?;
        Ok(Self { name, cron, zone, catch_up: CatchUp::default(), job, calendar })
    }

    /// Reads the expression in this time zone, by its IANA name.
    ///
    /// A time that is skipped when the clocks are set forward fires at the first moment after the gap. A time that occurs
    /// twice when they are set back fires at the first. Expressions with a wildcard in the minute or the hour fire in
    /// both, and skip what does not exist.
    ///
    /// # Errors
    ///
    /// `Invalid` if the time zone is unknown.
    pub fn time_zone(self, zone: impl Into<String>) -> Result<Self> {
        let zone = zone.into();
        let calendar = Calendar::parse(&self.cron, &zone)?;
        Ok(Self { zone, calendar, ..self })
    }

    /// Sets the policy for slots that passed while no worker ran; [`CatchUp::Last`] otherwise.
    pub fn catch_up(self, catch_up: CatchUp) -> Self {
        Self { catch_up, ..self }
    }
}

/// A schedule of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduleRow {
    /// Name, unique in the queue.
    pub name: String,
    /// Cron expression.
    pub cron: String,
    /// IANA name of the time zone.
    pub time_zone: String,
    /// Policy for missed slots: none, last or all.
    pub catch_up: String,
    /// Next slot.
    pub next_at: Option<SystemTime>,
    /// Last slot that fired.
    pub last_at: Option<SystemTime>,
    /// Payload of its jobs, as JSON text.
    pub payload: String,
    /// Priority of its jobs.
    pub priority: i32,
    /// Maximum number of attempts of its jobs.
    pub max_attempts: i32,
}

impl ScheduleRow {
    fn read(row: &Row) -> Self {
        Self {
            name: row.get("name"),
            cron: row.get("cron"),
            time_zone: row.get("time_zone"),
            catch_up: row.get("catch_up"),
            next_at: time(row.get("next_at")),
            last_at: time(row.get("last_at")),
            payload: row.get("payload"),
            priority: row.get("priority"),
            max_attempts: row.get("max_attempts"),
        }
    }
}

/// Columns that show a schedule.
fn columns() -> String {
    format!(
        "t.name, t.cron, t.time_zone, t.catch_up, {} AS next_at, {} AS last_at, t.payload, t.priority, t.max_attempts",
        micros("next_at"),
        micros("last_at")
    )
}

impl QueueShared {
    /// Enqueues the jobs of all schedules of the queue that are due.
    pub(super) async fn fire_schedules(&self, place: &ControlPlace) -> Result<()> {
        let sql = format!(
            "SELECT {NOW} AS now, {} FROM {}.{SCHEDULES_TABLE} AS t \
             WHERE t.queue = $1 AND t.next_at <= clock_timestamp() ORDER BY t.next_at LIMIT $2::int8",
            columns(),
            place.schema
        );
        let parameters: [Parameter<'_>; 2] =
            [(&place.queue, Type::TEXT), (&MAX_DUE_SCHEDULES, Type::INT8)];
        let (rows, _) = self.db.ask(&sql, &parameters, self.db.by()).await?;
        for row in &rows {
            if let Err(error) = self.fire_schedule(place, row).await {
                let name: String = row.get("name");
                if self.unreadable_schedules.lock().insert(name.clone()) {
                    tracing::warn!(name: "tenure.schedule_failed", queue = %self.db.table.shown(), schedule = name, %error);
                }
            }
        }
        Ok(())
    }

    async fn fire_schedule(&self, place: &ControlPlace, row: &Row) -> Result<()> {
        let (now, from): (i64, i64) = (row.get("now"), row.get("next_at"));
        let (name, cron, zone): (String, String, String) =
            (row.get("name"), row.get("cron"), row.get("time_zone"));
        let catch_up = row.get::<_, String>("catch_up").parse::<CatchUp>();
        let catch_up = catch_up.map_err(|error| invalid(&error))?;
        let calendar = Calendar::parse(&cron, &zone)?;
        let slots = catch_up.due(calendar.passed(now), from, now);
        let next = calendar.next_after(now);
        let keys: Vec<String> =
            slots.iter().map(|slot| format!("schedule {name} {}", rfc3339(*slot))).collect();
        let parameters: [Parameter<'_>; 6] = [
            (&place.queue, Type::TEXT),
            (&name, Type::TEXT),
            (&from, Type::INT8),
            (&next, Type::INT8),
            (&slots, Type::INT8_ARRAY),
            (&keys, Type::TEXT_ARRAY),
        ];
        let sql =
            self.fire_sql.replace("@schedules@", &format!("{}.{SCHEDULES_TABLE}", place.schema));
        let (rows, _) = self.db.ask(&sql, &parameters, self.db.by()).await?;
        if rows.iter().any(|row| row.get::<_, i64>("jobs") > 0) {
            self.restart_scan();
        }
        self.unreadable_schedules.lock().remove(&name);
        Ok(())
    }
}

impl Queue {
    /// SQL that fires a schedule, for tests of two workers that read the same slot.
    #[doc(hidden)]
    pub fn firing_statement(&self) -> String {
        self.0.fire_sql.replace("@schedules@", SCHEDULES_TABLE)
    }

    /// Adds a schedule, or replaces the one of its name. Its first slot is the next one by the database's clock; a
    /// schedule that is replaced by the same expression and time zone keeps its next slot.
    ///
    /// A [`Worker`](super::Worker) of this queue enqueues its jobs: one per slot, over all processes, with a unique key of
    /// the schedule's name and the slot's time.
    ///
    /// # Errors
    ///
    /// `Invalid` if the expression has no slot. `Misconfigured` if the table `tenure_schedules` is missing: `tenure
    /// schema` creates it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the schedule added or not.
    pub async fn add_schedule(&self, schedule: &NewSchedule) -> Result<ScheduleRow> {
        let place = self.schedule_place().await?;
        let rows = self.request(&format!("SELECT {NOW} AS now"), &[]).await?;
        let now: i64 = rows.first().map_or(0, |row| row.get("now"));
        let Some(next) = schedule.calendar.next_after(now) else {
            let message = format!("the cron expression {:?} names no time to come", schedule.cron);
            return Err(self.at(invalid(&message)));
        };
        let NewSchedule { name, cron, zone, catch_up, job, .. } = schedule;
        let catch_up = catch_up.to_string();
        let sql = format!(
            "INSERT INTO {}.{SCHEDULES_TABLE} AS t \
                 (queue, name, cron, time_zone, catch_up, payload, priority, max_attempts, next_at) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 'epoch'::timestamptz + $9 * interval '1 microsecond') \
             ON CONFLICT (queue, name) DO UPDATE SET cron = EXCLUDED.cron, time_zone = EXCLUDED.time_zone, \
                 catch_up = EXCLUDED.catch_up, payload = EXCLUDED.payload, priority = EXCLUDED.priority, \
                 max_attempts = EXCLUDED.max_attempts, \
                 next_at = CASE WHEN (t.cron, t.time_zone) = (EXCLUDED.cron, EXCLUDED.time_zone) THEN t.next_at \
                           ELSE EXCLUDED.next_at END \
             RETURNING {NOW} AS now, {}, {DURABLE}",
            place.schema,
            columns()
        );
        let parameters: [Parameter<'_>; 9] = [
            (&place.queue, Type::TEXT),
            (name, Type::TEXT),
            (cron, Type::TEXT),
            (zone, Type::TEXT),
            (&catch_up, Type::TEXT),
            (&job.payload, Type::TEXT),
            (&job.priority, Type::INT4),
            (&job.max_attempts, Type::INT4),
            (&next, Type::INT8),
        ];
        let rows = self.request(&sql, &parameters).await?;
        rows.first().map(ScheduleRow::read).ok_or_else(|| {
            self.at(Error::new(
                crate::ErrorKind::Unknown,
                "the answer names no schedule: it may be added",
            ))
        })
    }

    /// Lists the schedules of the queue by name, at most a thousand.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the table `tenure_schedules` is missing.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn schedules(&self) -> Result<Vec<ScheduleRow>> {
        let place = self.schedule_place().await?;
        let sql = format!(
            "SELECT {NOW} AS now, {} FROM {}.{SCHEDULES_TABLE} AS t WHERE t.queue = $1 ORDER BY t.name LIMIT $2::int8",
            columns(),
            place.schema
        );
        let parameters: [Parameter<'_>; 2] =
            [(&place.queue, Type::TEXT), (&MAX_LISTED_SCHEDULES, Type::INT8)];
        let rows = self.request(&sql, &parameters).await?;
        Ok(rows.iter().map(ScheduleRow::read).collect())
    }

    /// Removes a schedule. The jobs that it has enqueued stay. False if there is no such schedule.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the table `tenure_schedules` is missing.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the schedule removed or not.
    pub async fn remove_schedule(&self, name: &str) -> Result<bool> {
        let place = self.schedule_place().await?;
        let sql = format!(
            "DELETE FROM {}.{SCHEDULES_TABLE} AS t WHERE t.queue = $1 AND t.name = $2 RETURNING {NOW} AS now, {DURABLE}",
            place.schema
        );
        let parameters: [Parameter<'_>; 2] = [(&place.queue, Type::TEXT), (&name, Type::TEXT)];
        Ok(!self.request(&sql, &parameters).await?.is_empty())
    }

    async fn schedule_place(&self) -> Result<ControlPlace> {
        let place = self.control_place().await?;
        if place.has_schedules { Ok(place) } else { Err(self.missing_table(SCHEDULES_TABLE)) }
    }
}
