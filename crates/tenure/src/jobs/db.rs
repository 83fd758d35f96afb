//! Database access that queues and checkpoints share: connections, the database's clock, and a check of the table.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use tenure_core::Time;
use tenure_core::jobs::RenewalOutcome;
use tenure_core::lease::{Lease, LeaseTerms};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::options::{
    DEFAULT_CHECKPOINTS_TABLE, DEFAULT_JOBS_TABLE, MIN_LEASE, Options, REQUEST_TIMEOUT,
};
use crate::store::pg::access::TableAccess;
use crate::store::pg::clock::{DbClock, NOW, Reading};
use crate::store::pg::column_map::{ColumnMap, attributes};
use crate::store::pg::connect::{Parameter, PlanRefusals};
use crate::store::pg::failure;
use crate::store::pg::incarnation::{self, FoundIncarnation, Incarnation};
use crate::store::pg::job_columns::{RequiredColumn, problems, schema_command};
use crate::store::pg::pool::{Pool, PooledConnection};
use crate::store::pg::probe::HeldQuestion;
use crate::store::pg::settings::Settings;
use crate::store::pg::table::Table;
use crate::store::pg::version::{self, VERSION};
use crate::{Clock, Error, ErrorKind, Result, identity};

/// Columns of a table, by name.
pub(super) type TableColumns = HashMap<String, TableColumn>;

/// A column of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableColumn {
    /// Type of the column.
    pub(super) kind: String,
    /// True if the column may be null.
    pub(super) may_be_null: bool,
    /// Maximum number of characters, if there is one.
    pub(super) max_chars: Option<i32>,
    /// True if the database fills in a value for rows that have none.
    pub(super) has_default: bool,
    /// True if the database computes the value: it cannot be written.
    pub(super) is_generated: bool,
}

#[derive(Debug)]
pub(super) struct JobDb {
    pub(super) pool: Pool,
    pub(super) clock: Clock,
    pub(super) db_clock: DbClock,
    pub(super) table: Table,
    pub(super) incarnation: Incarnation,
    pub(super) lease: Lease,
    pub(super) options: Options,
    /// Name of this worker in `locked_by`, unique to this process: no other process is mistaken for it after a restart.
    pub(super) worker: String,
    /// Id of the process that connected.
    pid: u32,
    required: &'static [RequiredColumn],
    shape: OnceLock<TableColumns>,
    prepare: Option<bool>,
    plan_refusals: Arc<PlanRefusals>,
    /// True once a writable server has answered. From then on a read-only server is a transient failure: a fail-over
    /// may be under way.
    settled: AtomicBool,
    shown: String,
}

impl JobDb {
    pub(super) fn new(
        url: &str,
        table: &str,
        options: Options,
        required: &'static [RequiredColumn],
    ) -> Result<Self> {
        let (settings, own) = Settings::parse(url, &["table", "poll", "prepare"])?;
        let mut prepare = None;
        for (name, value) in own {
            match (&*name, &*value) {
                ("prepare", "on") => prepare = Some(true),
                ("prepare", "off") => prepare = Some(false),
                ("prepare", _) => {
                    return Err(invalid("invalid prepare: give prepare=on or prepare=off"));
                }
                // Options of lock URLs, which may be the same URL.
                _ => {}
            }
        }
        let table = Table::parse(table, "")?;
        let lease = lease(&options)?;
        let shown = format!("{settings} ({})", table.shown());
        let clock = Clock::system();
        let worker = identity::of_process()?.id.clone();
        Ok(Self {
            pool: Pool::new(settings, clock.clone(), options.connections.clamp(1, 1_000)),
            clock,
            db_clock: DbClock::default(),
            incarnation: Incarnation::default(),
            table,
            lease,
            options,
            worker,
            required,
            shape: OnceLock::new(),
            prepare,
            plan_refusals: Arc::default(),
            settled: AtomicBool::new(false),
            shown,
            pid: std::process::id(),
        })
    }

    /// Connects if necessary, and returns the table's columns.
    pub(super) async fn shape(&self) -> Result<&TableColumns> {
        let by = self.clock.now() + self.lease.request_limit().max(REQUEST_TIMEOUT);
        drop(self.connection(by).await.map_err(|error| error.at(self))?);
        self.shape.get().ok_or_else(|| Error::new(ErrorKind::Unavailable, "not connected").at(self))
    }

    /// Fails in a forked copy of the process that connected. The copy has the worker name and the tokens of its parent,
    /// but does not hold its jobs.
    pub(super) fn check_process(&self) -> Result<()> {
        if std::process::id() == self.pid {
            return Ok(());
        }
        let message = "this is a forked copy of the process that connected: connect again";
        Err(Error::new(ErrorKind::NotHeld, message).at(self))
    }

    /// Takes a connection to a writable server whose table was checked.
    pub(super) async fn connection(&self, by: Time) -> Result<PooledConnection<'_>> {
        self.check_process()?;
        let mut connection = self.pool.take(by).await?;
        if connection.fresh || self.shape.get().is_none() {
            let checked = self.check_connection(&mut connection, by).await;
            checked.map_err(failure::nothing_done)?;
        }
        Ok(connection)
    }

    async fn check_connection(
        &self,
        connection: &mut PooledConnection<'_>,
        by: Time,
    ) -> Result<()> {
        let sent = self.clock.now();
        let name = self.table.quoted();
        let greeting = greeting(self.required);
        let rows = connection.query(&greeting, &[(&name, Type::TEXT)], by).await?;
        let Some(row) = rows.first() else {
            return Err(Error::new(ErrorKind::Unavailable, "the server sent no answer"));
        };
        version::check(row.get("version"))?;
        if row.get("is_standby") {
            return Err(failure::standby(self.settled.load(Ordering::Relaxed)));
        }
        let shape = self.columns(row)?;
        self.incarnation.note(FoundIncarnation::read(row));
        // Behind a pooler the next statement may run on another session, so none can be prepared.
        let direct = match self.prepare {
            Some(prepare) => prepare,
            None => connection.logged_in_to(row.get("pid")),
        };
        connection.allow_plans(direct, &self.plan_refusals);
        self.db_clock.note(Reading::of(&rows, sent, self.clock.now())?);
        self.settled.store(true, Ordering::Relaxed);
        // Another connection may have set the same value first.
        let _ = self.shape.set(shape);
        Ok(())
    }

    /// Checks that the table has the required columns, and returns all its columns.
    fn columns(&self, greeting: &Row) -> Result<TableColumns> {
        let (table, command) = (self.table.shown(), self.schema_command());
        let misconfigured = |message: String| Err(Error::new(ErrorKind::Misconfigured, message));
        let missing = || misconfigured(format!("there is no table {table}: run `{command}`"));
        let Some(names) = greeting.get::<_, Option<Vec<String>>>("column_names") else {
            return missing();
        };
        if let Some(problems) = greeting.get::<_, Option<String>>("problems") {
            let message = format!(
                "the table {table} cannot be used: {problems}; alter the table, or name another one"
            );
            return misconfigured(message);
        }
        let (kinds, filled): (Option<Vec<String>>, Option<Vec<bool>>) =
            (greeting.get("column_types"), greeting.get("columns_not_null"));
        let (chars, defaults): (Option<Vec<Option<i32>>>, Option<Vec<bool>>) =
            (greeting.get("column_chars"), greeting.get("columns_with_default"));
        let generated: Option<Vec<bool>> = greeting.get("columns_generated");
        // The table may be dropped while the statement runs: then only the first of its columns have a value.
        let (Some(kinds), Some(filled), Some(chars), Some(defaults), Some(generated)) =
            (kinds, filled, chars, defaults, generated)
        else {
            return missing();
        };
        let facts = kinds.into_iter().zip(filled).zip(chars.into_iter().zip(defaults));
        let facts = facts.zip(generated);
        let facts = facts.map(|(((kind, filled), (max_chars, has_default)), is_generated)| {
            TableColumn { kind, may_be_null: !filled, max_chars, has_default, is_generated }
        });
        let columns: TableColumns = names.into_iter().zip(facts).collect();
        let mut required = self.required.iter().filter(|column| !column.optional);
        match required.find(|column| !columns.contains_key(column.name)) {
            Some(column) => misconfigured(format!(
                "the table {table} has no column {}: run `{command}`, which adds it",
                column.name
            )),
            None => Ok(columns),
        }
    }

    /// Error of a feature whose optional column the table lacks.
    pub(super) fn column_is_missing(&self, column: &str) -> Error {
        let message = format!(
            "the table {} has no column {column} that tenure can use: run `{}`, which adds it, unless the table has \
             another column of this name",
            self.table.shown(),
            self.schema_command()
        );
        Error::new(ErrorKind::Misconfigured, message)
    }

    /// The command that creates or extends the table.
    pub(super) fn schema_command(&self) -> String {
        if [DEFAULT_JOBS_TABLE, DEFAULT_CHECKPOINTS_TABLE].contains(&&*self.table.shown()) {
            return "tenure schema --apply".to_owned();
        }
        let chunks = self.required.iter().any(|column| column.name == "chunk_hash");
        schema_command(&self.table, if chunks { "--checkpoints" } else { "--queue" })
    }

    /// Cuts the worker's name to the column that holds it. The end of the name is kept: it is unique.
    pub(super) fn fit_worker(&mut self, columns: &TableColumns) {
        let limit = columns.get("locked_by").and_then(|column| column.max_chars);
        if let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) {
            self.worker = last_chars(&self.worker, limit);
        }
    }

    /// Advises how to create the table, if that is missing.
    fn advise(&self, error: Error) -> Error {
        if failure::code(&error) != Some("42P01") {
            return error;
        }
        let message = format!("the table is missing: run `{}`", self.schema_command());
        let server = failure::server_message(&error).unwrap_or_default();
        Error::new(error.kind(), format!("{message} ({server})"))
    }

    /// Sends one request. Every answer has the column `now`, the database's clock.
    pub(super) async fn ask(
        &self,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<(Vec<Row>, Reading)> {
        let mut connection = self.connection(by).await?;
        while !connection.check_current(by).await? {
            drop(connection);
            connection = self.connection(by).await?;
        }
        let answer = self.access().ask(&mut connection, sql, parameters, by).await;
        answer.map_err(|error| self.advise(error))
    }

    /// Sends one request that claims: fills in the epoch, and retries if the server was restarted meanwhile. The claim
    /// counts only once [`confirm`](Self::confirm) has confirmed it, on the connection that is returned.
    pub(super) async fn grant(
        &self,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<(PooledConnection<'_>, Vec<Row>, Reading)> {
        let mut connection = self.connection(by).await?;
        let granted = self.access().grant(&mut connection, sql, parameters, by).await;
        let (rows, reading) = granted.map_err(|error| self.advise(error))?;
        Ok((connection, rows, reading))
    }

    /// Confirms claims. Returns the numbers, from 1, of the rows that must be released, and the reason. An error means
    /// that all of them must.
    pub(super) async fn confirm(
        &self,
        connection: &mut PooledConnection<'_>,
        question: HeldQuestion<'_>,
        by: Time,
    ) -> Result<(Vec<usize>, Option<Error>)> {
        self.pool.primaries().confirm_grant(connection, question, by).await
    }

    /// Sends one request that renews rows. `held` asks another primary for them, `read` reads the outcomes.
    pub(super) async fn renew(
        &self,
        sql: &str,
        parameters: &[Parameter<'_>],
        held: HeldQuestion<'_>,
        read: impl FnOnce(&[Row]) -> Vec<RenewalOutcome>,
        by: Time,
    ) -> Result<(Reading, Vec<RenewalOutcome>)> {
        let mut connection = self.connection(by).await?;
        let (rows, reading) = self.access().ask(&mut connection, sql, parameters, by).await?;
        let outcomes = read(&rows);
        let outcomes = self.pool.primaries().refuse(&mut connection, held, outcomes, by).await?;
        Ok((reading, outcomes))
    }

    fn access(&self) -> TableAccess<'_> {
        let Self { table, clock, db_clock, incarnation, .. } = self;
        let primaries = self.pool.primaries();
        TableAccess { table, clock, db_clock, incarnation, primaries, user: self }
    }

    /// Deadline of a request that has no timeout of its own, from now.
    pub(super) fn by(&self) -> Time {
        self.clock.now() + REQUEST_TIMEOUT
    }
}

fn last_chars(text: &str, limit: usize) -> String {
    text.chars().skip(text.chars().count().saturating_sub(limit)).collect()
}

/// SQL of the first query on every new connection: `$1` is the table. Its columns are null if there is no such table.
fn greeting(required: &[RequiredColumn]) -> String {
    let attributes = attributes("to_regclass($1)");
    let column =
        |value: &str| format!("(SELECT array_agg({value} ORDER BY attnum) FROM {attributes} AS a)");
    format!(
        "SELECT {NOW} AS now, {VERSION} AS version, pg_is_in_recovery() AS is_standby, \
                {} AS column_names, {} AS column_types, {} AS columns_not_null, {} AS column_chars, \
                {} AS columns_with_default, {} AS columns_generated, \
                (SELECT string_agg(problem, ', ') FROM ({}) AS problems) AS problems, \
                pg_backend_pid() AS pid, {}",
        column("attname::text"),
        column("format_type(atttypid, NULL)"),
        column("attnotnull"),
        column("CASE WHEN atttypid = 'varchar'::regtype AND atttypmod >= 4 THEN atttypmod - 4 END"),
        column("atthasdef OR attidentity <> ''"),
        column("attgenerated <> ''"),
        problems("to_regclass($1)", required, &ColumnMap::default()),
        incarnation::query_columns("$1")
    )
}

/// Builds the lease from the options.
fn lease(options: &Options) -> Result<Lease> {
    let Options { lease: ttl, heartbeat, stop_grace, .. } = *options;
    if heartbeat.is_some_and(|every| every.is_zero()) {
        return Err(invalid("invalid heartbeat interval 0: give the time between two heartbeats"));
    }
    if heartbeat.is_some_and(|every| every > ttl / 2) {
        let message = format!(
            "a heartbeat every {:?} leaves no retry before a lease of {ttl:?} ends: give at most half of the lease",
            heartbeat.unwrap_or_default()
        );
        return Err(invalid(&message));
    }
    let factor = heartbeat.map_or(5, |every| ttl.as_nanos().div_ceil(every.as_nanos()));
    let keep_alive = Some(u32::try_from(factor).unwrap_or(u32::MAX));
    let terms = LeaseTerms { keep_alive, stop_grace, min_ttl: MIN_LEASE, ..LeaseTerms::new(ttl) };
    Lease::new(terms).map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))
}

pub(super) fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

impl fmt::Display for JobDb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::pg::job_columns::MIN_WORKER_CHARS;

    #[test]
    fn the_unique_part_of_a_worker_fits_into_the_shortest_column() {
        let (host, unique) = ("host-".repeat(20), "4294967295:89abcdef:c12345");
        let limit = usize::try_from(MIN_WORKER_CHARS).unwrap();
        let name = last_chars(&format!("{host}:{unique}"), limit);
        assert!(name.len() == limit && name.ends_with(unique), "{name}");
        assert_eq!(last_chars("häuser", 3), "ser");
    }
}
