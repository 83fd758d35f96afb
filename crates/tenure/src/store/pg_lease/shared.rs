//! State that the store, its holds and its watchers share.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tenure_core::Time;
use tokio_postgres::Row;

use super::renewal_queue::{LeaseQueue, LeaseRenewer};
use super::schema;
use super::sql::LeaseStatements;
use crate::store::pg::access::TableAccess;
use crate::store::pg::clock::{DbClock, Reading};
use crate::store::pg::connect::{Parameter, PgConnection};
use crate::store::pg::failure;
use crate::store::pg::incarnation::{FoundIncarnation, Incarnation};
use crate::store::pg::pool::{Pool, PooledConnection};
use crate::store::pg::settings::Settings;
use crate::store::pg::table::Table;
use crate::store::pg::watch::WatchRegistry;
use crate::{Clock, Error, Result};

/// Timeout of a request that has none of its own.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Default name of the table.
pub(super) const DEFAULT_TABLE: &str = "tenure_locks";
/// Maximum number of connections for requests; one more listens while keys are watched.
const MAX_CONNECTIONS: usize = 4;

#[derive(Debug)]
pub(super) struct LeaseShared {
    pub(super) pool: Pool,
    pub(super) clock: Clock,
    pub(super) db_clock: DbClock,
    plain_sql: LeaseStatements,
    marking_sql: LeaseStatements,
    /// True once the table of waiters was found.
    has_waiters: AtomicBool,
    warned: AtomicBool,
    pub(super) table: Table,
    pub(super) incarnation: Incarnation,
    pub(super) renewer: Arc<LeaseRenewer>,
    pub(super) watch: WatchRegistry,
    pub(super) poll: Option<Duration>,
    shown: String,
    /// True once a writable server has answered. From then on a read-only server is a transient failure: a fail-over
    /// may be under way.
    settled: AtomicBool,
    /// Number of holds of this process.
    holds: Arc<AtomicUsize>,
    secrets: (RandomState, RandomState),
}

impl LeaseShared {
    pub(super) fn new(settings: Settings, table: Table, poll: Option<Duration>) -> Self {
        let shown = if table.shown() == DEFAULT_TABLE {
            settings.to_string()
        } else {
            format!("{settings}?table={}", table.shown())
        };
        let (clock, holds) = (Clock::system(), Arc::new(AtomicUsize::new(0)));
        Self {
            pool: Pool::new(settings, clock.clone(), MAX_CONNECTIONS),
            db_clock: DbClock::default(),
            plain_sql: LeaseStatements::new(&table, false),
            marking_sql: LeaseStatements::new(&table, true),
            has_waiters: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            incarnation: Incarnation::default(),
            table,
            renewer: LeaseRenewer::new(LeaseQueue::new(Arc::clone(&holds)), clock.clone()),
            watch: WatchRegistry::default(),
            clock,
            poll,
            shown,
            settled: AtomicBool::new(false),
            holds,
            secrets: (RandomState::new(), RandomState::new()),
        }
    }

    /// Takes a connection to a writable server whose table was checked.
    pub(super) async fn connection(&self, by: Time) -> Result<PooledConnection<'_>> {
        let mut connection = self.pool.take(by).await?;
        if connection.fresh || !self.db_clock.is_known() {
            let sent = self.clock.now();
            let greeting = schema::greeting(&self.table);
            let rows = connection.query(&greeting, &[], by).await.map_err(failure::nothing_done)?;
            let reading = Reading::of(&rows, sent, self.clock.now())?;
            if rows.first().is_some_and(|row| row.get("is_standby")) {
                return Err(failure::standby(self.settled.load(Ordering::Relaxed)));
            }
            schema::check(rows.first(), &self.table)?;
            if let Some(row) = rows.first() {
                self.incarnation.note(FoundIncarnation::read(row));
                self.note_waiters(row.get("has_waiters"));
            }
            self.settled.store(true, Ordering::Relaxed);
            self.db_clock.note(reading);
        }
        Ok(connection)
    }

    /// Statements for the table, as it was found.
    pub(super) fn sql(&self) -> &LeaseStatements {
        if self.has_waiters.load(Ordering::Relaxed) { &self.marking_sql } else { &self.plain_sql }
    }

    fn note_waiters(&self, found: bool) {
        self.has_waiters.store(found, Ordering::Relaxed);
        if !found && !self.warned.swap(true, Ordering::Relaxed) {
            let table = self.table.waiters().shown();
            tracing::warn!(
                name: "tenure.no_waiters_table", store = %self, table,
                "waiters are not shown, and holders are not asked to hand off: run `tenure schema --locks --apply`"
            );
        }
    }

    /// Sends one request. Every answer has the column `now`, the database's clock.
    pub(super) async fn ask(
        &self,
        sql: fn(&LeaseStatements) -> &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<(Vec<Row>, Reading)> {
        // Connects first: only then it is known which tables exist.
        let mut connection = self.connection(by).await?;
        while !connection.check_current(by).await? {
            drop(connection);
            connection = self.connection(by).await?;
        }
        self.ask_on(&mut connection, sql, parameters, by).await
    }

    /// Sends one request on a connection.
    pub(super) async fn ask_on(
        &self,
        connection: &mut PgConnection,
        sql: fn(&LeaseStatements) -> &str,
        parameters: &[Parameter<'_>],
        by: Time,
    ) -> Result<(Vec<Row>, Reading)> {
        let statements = self.sql();
        match self.access().ask(connection, sql(statements), parameters, by).await {
            Err(error) if self.lost_waiters(statements, &error) => {
                self.access().ask(connection, sql(self.sql()), parameters, by).await
            }
            answered => answered,
        }
    }

    /// True if a statement failed because the table of waiters was dropped or replaced, or its rights were revoked, since
    /// it was found. The failed statement has changed nothing, and [`sql`](Self::sql) now does without that table: send
    /// the statement again. Waiters are a convenience; no hold may end because they cannot be read.
    pub(super) fn lost_waiters(&self, statements: &LeaseStatements, error: &Error) -> bool {
        let refused = matches!(failure::code(error), Some("42P01" | "42501" | "42703"));
        let lost = statements.marks && refused;
        if lost {
            self.note_waiters(false);
        }
        lost
    }

    pub(super) fn access(&self) -> TableAccess<'_> {
        let Self { table, clock, db_clock, incarnation, .. } = self;
        let primaries = self.pool.primaries();
        TableAccess { table, clock, db_clock, incarnation, primaries, user: self }
    }

    /// Secret of a claim: the same each time the claim is sent, and unpredictable to other processes.
    pub(super) fn secret(&self, claim: u128) -> [u8; 16] {
        let (high, low) = (self.secrets.0.hash_one(claim), self.secrets.1.hash_one(claim));
        (u128::from(high) << 64 | u128::from(low)).to_be_bytes()
    }

    pub(super) fn holds(&self) -> usize {
        self.holds.load(Ordering::Relaxed)
    }

    pub(super) fn hold_began(&self) {
        self.holds.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn hold_ended(&self) {
        self.holds.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Display for LeaseShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}
