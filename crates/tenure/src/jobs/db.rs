//! Database access that queues and checkpoints share: connections, the database's clock, and a check of the table.

use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tenure_core::Time;
use tenure_core::lease::{Lease, LeaseTerms};
use tokio_postgres::Row;
use tokio_postgres::config::Host;
use tokio_postgres::types::Type;

use super::options::{
    DEFAULT_CHECKPOINTS_TABLE, DEFAULT_JOBS_TABLE, MIN_LEASE, Options, REQUEST_TIMEOUT,
};
use crate::store::pg::access::TableAccess;
use crate::store::pg::clock::{DbClock, NOW, Reading};
use crate::store::pg::connect::Parameter;
use crate::store::pg::failure;
use crate::store::pg::incarnation::{self, FoundIncarnation, Incarnation};
use crate::store::pg::pool::{Pool, PooledConnection};
use crate::store::pg::settings::Settings;
use crate::store::pg::table::Table;
use crate::{Clock, Error, ErrorKind, Result, identity};

/// Lists the required columns of a table, each with its accepted types.
pub(super) type RequiredColumns =
    fn() -> Box<dyn Iterator<Item = (&'static str, &'static [&'static str])>>;

/// Types of the columns of a table, by column name.
pub(super) type ColumnTypes = HashMap<String, String>;

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
    required: RequiredColumns,
    shape: OnceLock<ColumnTypes>,
    prepare: Option<bool>,
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
        required: RequiredColumns,
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
            settled: AtomicBool::new(false),
            shown,
            pid: std::process::id(),
        })
    }

    /// Connects if necessary, and returns the types of the table's columns.
    pub(super) async fn shape(&self) -> Result<&ColumnTypes> {
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
        let rows = connection.query(&greeting(), &[(&name, Type::TEXT)], by).await?;
        let Some(row) = rows.first() else {
            return Err(Error::new(ErrorKind::Unavailable, "the server sent no answer"));
        };
        if row.get("is_standby") {
            return Err(failure::standby(self.settled.load(Ordering::Relaxed)));
        }
        let shape = self.column_types(row)?;
        self.incarnation.note(FoundIncarnation::read(row));
        let direct = match self.prepare {
            Some(prepare) => prepare,
            None => self.is_direct(row.get("address"), row.get("port")).await,
        };
        connection.allow_plans(direct);
        self.db_clock.note(Reading::of(&rows, sent, self.clock.now())?);
        self.settled.store(true, Ordering::Relaxed);
        // Another connection may have set the same value first.
        let _ = self.shape.set(shape);
        Ok(())
    }

    /// Checks that the table has the required columns, and returns the types of all its columns.
    fn column_types(&self, greeting: &Row) -> Result<ColumnTypes> {
        let table = self.table.shown();
        let option = match &*table {
            DEFAULT_JOBS_TABLE | DEFAULT_CHECKPOINTS_TABLE => String::new(),
            name if (self.required)().any(|(column, _)| column == "chunk_hash") => {
                format!(" --checkpoints {name}")
            }
            name => format!(" --queue {name}"),
        };
        let (names, kinds): (Option<Vec<String>>, Option<Vec<String>>) =
            (greeting.get("column_names"), greeting.get("column_types"));
        let (Some(names), Some(kinds)) = (names, kinds) else {
            let message = format!("there is no table {table}: run `tenure schema{option} --apply`");
            return Err(Error::new(ErrorKind::Misconfigured, message));
        };
        let shape: ColumnTypes = names.into_iter().zip(kinds).collect();
        for (column, fitting) in (self.required)() {
            match shape.get(column) {
                None => {
                    let message = format!(
                        "the table {table} has no column {column}: run `tenure schema{option} --apply`, which adds it"
                    );
                    return Err(Error::new(ErrorKind::Misconfigured, message));
                }
                Some(kind) if !fitting.contains(&&**kind) => {
                    let message = format!(
                        "the table {table} does not fit: its column {column} is {kind}, not {}",
                        fitting.join(" or ")
                    );
                    return Err(Error::new(ErrorKind::Misconfigured, message));
                }
                Some(_) => {}
            }
        }
        Ok(shape)
    }

    /// True if the session runs at the very address that we connect to. Behind a pooler it does not, and the next
    /// statement may run on another session: then no statement can be prepared.
    async fn is_direct(&self, address: Option<String>, port: i32) -> bool {
        let config = &self.pool.settings().config;
        let ports = config.get_ports();
        if !config.get_hostaddrs().is_empty() {
            return false;
        }
        for (nth, host) in config.get_hosts().iter().enumerate() {
            let dialled = ports.get(nth).or(ports.first()).copied().unwrap_or(5432);
            if i32::from(dialled) != port {
                return false;
            }
            let there = match (host, &address) {
                #[cfg(unix)]
                (Host::Unix(_), None) => true,
                (Host::Tcp(name), Some(address)) => {
                    let found = tokio::net::lookup_host((name.as_str(), dialled)).await;
                    let mut found = found.into_iter().flatten();
                    // With several hosts it is unknown which one answered, so every host must be this server.
                    found.any(|it| it.ip().to_string() == *address)
                }
                _ => false,
            };
            if !there {
                return false;
            }
        }
        true
    }

    /// Sends one request. Every answer has the column `now`, the database's clock.
    pub(super) async fn ask(
        &self,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<(Vec<Row>, Reading)> {
        let mut connection = self.connection(by).await?;
        self.access().ask(&mut connection, sql, parameters, by).await
    }

    /// Sends one request that claims: fills in the epoch, and retries if the server was restarted meanwhile.
    pub(super) async fn grant(
        &self,
        sql: &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<(Vec<Row>, Reading)> {
        let mut connection = self.connection(by).await?;
        self.access().grant(&mut connection, sql, parameters, by).await
    }

    fn access(&self) -> TableAccess<'_> {
        let Self { table, clock, db_clock, incarnation, .. } = self;
        TableAccess { table, clock, db_clock, incarnation, user: self }
    }

    /// Deadline of a request that has no timeout of its own, from now.
    pub(super) fn by(&self) -> Time {
        self.clock.now() + REQUEST_TIMEOUT
    }
}

/// SQL of the first query on every new connection: `$1` is the table. Its columns are null if there is no such table.
fn greeting() -> String {
    format!(
        "SELECT {NOW} AS now, pg_is_in_recovery() AS is_standby, \
                (SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute \
                 WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped) AS column_names, \
                (SELECT array_agg(format_type(atttypid, NULL) ORDER BY attnum) FROM pg_attribute \
                 WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped) AS column_types, \
                host(inet_server_addr()) AS address, \
                coalesce(inet_server_port(), current_setting('port')::int4) AS port, {}",
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
