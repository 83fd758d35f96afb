//! Execution of stages on one session, with bounded waits for locks.

use std::time::Duration;

use tenure_core::Time;
use tenure_core::jobs::DELAYED_HOLDER;

use super::facts::TableFacts;
use super::plan::{SchemaPlan, SchemaStage, stages_beside};
use super::target::{SchemaTarget, UndoOptions};
use crate::store::pg::connect::PgConnection;
use crate::store::pg::durable::DURABLE;
use crate::store::pg::pooler::{self, SessionBinding};
use crate::store::pg::settings::Settings;
use crate::store::pg::{failure, migrate};
use crate::{Clock, Error, ErrorKind, Result};

/// Time limit of a request that only reads, or that changes the catalog.
const REQUEST_LIMIT: Duration = Duration::from_secs(120);
/// Time limit of an index. That of a large table takes long, and waits for the transactions before it.
const INDEX_LIMIT: Duration = Duration::from_secs(6 * 3_600);
/// Attempts to get the lock of a stage.
const LOCK_ATTEMPTS: u32 = 40;
/// Shortest pause between two attempts, in which readers and writers proceed.
const MIN_PAUSE: Duration = Duration::from_millis(200);
/// Longest wait for another session that changes tables.
const TURN_LIMIT: Duration = Duration::from_secs(1_800);
/// Pause between two questions whether the other session has finished.
const TURN_PAUSE: Duration = Duration::from_millis(200);
/// Repetitions of plan and execution: another session may have changed the table in between.
const MAX_ROUNDS: u32 = 5;

/// SQL of the number of the lock that this session holds while it changes a table.
///
/// It differs from the number that transactions take. `CREATE INDEX CONCURRENTLY` waits for every transaction that was
/// open before it. One that waits for a lock of this session at that time would never end.
const SESSION_LOCK: &str = "hashtext('tenure schema stages')";

/// SQL that fails as a lock does if another session changes tables in one transaction, as earlier versions do.
const CHECK_TRANSACTION_LOCK: &str = "DO $tenure$ BEGIN \
    IF NOT pg_try_advisory_xact_lock(hashtext('tenure schema')) THEN \
        RAISE EXCEPTION 'another session changes the schema' USING ERRCODE = '55P03'; \
    END IF; END $tenure$";

/// A connection for changes of tables.
pub(super) struct MigrationSession {
    connection: PgConnection,
    binding: SessionBinding,
    clock: Clock,
}

impl MigrationSession {
    /// Connects to a writable server.
    pub(super) async fn open(settings: &Settings, clock: Clock) -> Result<Self> {
        let by = clock.now() + REQUEST_LIMIT;
        let (mut connection, binding) = pooler::open(settings, &clock, by, None).await?;
        migrate::check_server(&mut connection, by).await?;
        Ok(Self { connection, binding, clock })
    }

    pub(super) async fn plan(&mut self, schema: &SchemaTarget) -> Result<SchemaPlan> {
        let by = self.by();
        Ok(match TableFacts::read(&mut self.connection, schema, by).await? {
            None => SchemaPlan::create(schema),
            Some(facts) => SchemaPlan::add(schema, &facts),
        })
    }

    pub(super) async fn apply(&mut self, schema: &SchemaTarget) -> Result<()> {
        let mut has_turn = false;
        for _ in 0..MAX_ROUNDS {
            let by = self.by();
            let Some(facts) = TableFacts::read(&mut self.connection, schema, by).await? else {
                // A new table has no users yet: all of it or nothing. The script itself excludes other sessions.
                return self.run_script(schema).await;
            };
            let plan = SchemaPlan::add(schema, &facts);
            if plan.is_empty() {
                // Grants to roles that have been given the table since then.
                for stage in stages_beside(schema, |_| true) {
                    self.transaction(schema, &stage).await?;
                }
                return Ok(());
            }
            if !has_turn {
                self.wait_for_turn(schema).await?;
                has_turn = true;
            } else if facts.has_index_in_progress() {
                self.pause(schema, "an index is being created by another session").await;
            } else {
                self.execute(schema, &plan).await?;
            }
        }
        let message = "the table is changed by other sessions at the same time: run it again";
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    pub(super) async fn undo_plan(
        &mut self,
        schema: &SchemaTarget,
        options: UndoOptions,
    ) -> Result<SchemaPlan> {
        let facts = self.existing(schema).await?;
        Ok(SchemaPlan::remove(schema, &facts, options))
    }

    pub(super) async fn undo(&mut self, schema: &SchemaTarget, options: UndoOptions) -> Result<()> {
        self.wait_for_turn(schema).await?;
        let facts = self.existing(schema).await?;
        if !options.force {
            self.refuse_running(schema, &facts).await?;
        }
        let plan = SchemaPlan::remove(schema, &facts, options);
        if self.execute(schema, &plan).await? {
            return Ok(());
        }
        let message = "other sessions lock the table: run it again, and it continues";
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    async fn existing(&mut self, schema: &SchemaTarget) -> Result<TableFacts> {
        let by = self.by();
        TableFacts::read(&mut self.connection, schema, by).await?.ok_or_else(|| {
            let message = format!("there is no table {}", schema.table.shown());
            Error::new(ErrorKind::Misconfigured, message)
        })
    }

    /// Refuses while a worker holds a row.
    async fn refuse_running(&mut self, schema: &SchemaTarget, facts: &TableFacts) -> Result<()> {
        let needed = ["locked_by", "locked_until"];
        let Some(root) = facts.root() else { return Ok(()) };
        // Columns that an earlier, interrupted run has dropped.
        if needed.iter().any(|column| !facts.has_column(facts.map.name(column))) {
            return Ok(());
        }
        let held = facts.map.translate(&format!(
            "locked_by <> '{DELAYED_HOLDER}' AND locked_until > clock_timestamp()"
        ));
        let sql = format!("SELECT count(*) AS held FROM {} WHERE {held}", root.quoted);
        let by = self.by();
        let rows = self.connection.simple(&sql, by).await?;
        match rows.first().and_then(|row| row.get("held")) {
            Some("0") => Ok(()),
            held => {
                let message = format!(
                    "{} rows of {} are held by workers: stop the workers first, or force it",
                    held.unwrap_or("some"),
                    schema.table.shown()
                );
                Err(Error::new(ErrorKind::Invalid, message))
            }
        }
    }

    /// Executes the stages. Returns false if a deadlock with another session has ended one: the rest must be planned
    /// again.
    async fn execute(&mut self, schema: &SchemaTarget, plan: &SchemaPlan) -> Result<bool> {
        let concurrent = plan.stages.iter().any(|stage| !stage.in_transaction);
        if concurrent && !self.binding.has_own_session() {
            let message = "a pooler in transaction mode is in between, and indexes of a table in use need a session of \
                           their own: connect to the server itself, or to a pool in session mode";
            return Err(Error::new(ErrorKind::Misconfigured, message));
        }
        for stage in &plan.stages {
            schema.report(&stage.title);
            if stage.in_transaction {
                self.transaction(schema, stage).await?;
            } else if !self.concurrently(schema, stage).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until no other session changes tables in stages. The wait is a series of short statements: a statement
    /// that waited would hold back the indexes of the other session.
    async fn wait_for_turn(&mut self, schema: &SchemaTarget) -> Result<()> {
        if !self.binding.has_own_session() {
            return Ok(());
        }
        let end = self.clock.now() + TURN_LIMIT;
        let mut has_waited = false;
        loop {
            let sql = format!("SELECT pg_try_advisory_lock({SESSION_LOCK})::int AS locked");
            let by = self.by();
            let rows = self.connection.simple(&sql, by).await?;
            if rows.first().and_then(|row| row.get("locked")) == Some("1") {
                return Ok(());
            }
            if self.clock.now() >= end {
                let message =
                    "another session has been changing tables for too long: run it again later";
                return Err(Error::new(ErrorKind::Unavailable, message));
            }
            if !has_waited {
                schema.report("another session changes tables: waiting");
                has_waited = true;
            }
            self.clock.sleep_until(self.clock.now() + TURN_PAUSE).await;
        }
    }

    /// Creates a missing table, or completes one that another session has just created, in one transaction.
    async fn run_script(&mut self, schema: &SchemaTarget) -> Result<()> {
        let by = self.by();
        migrate::run(&mut self.connection, &schema.sql, by).await
    }

    /// Runs a stage in one transaction. If a lock is not free in time, the transaction is rolled back and repeated.
    async fn transaction(&mut self, schema: &SchemaTarget, stage: &SchemaStage) -> Result<()> {
        let limit = schema.lock_timeout.as_millis();
        // The statement as a whole is limited as well: with tables that inherit it waits for several locks.
        let sql = format!(
            "SELECT {DURABLE}; SET LOCAL lock_timeout = '{limit}ms'; SET LOCAL statement_timeout = '{}ms'; \
             {CHECK_TRANSACTION_LOCK}; {}",
            limit.saturating_mul(2).max(1_000),
            stage.statements.join("; ")
        );
        for attempt in 1..=LOCK_ATTEMPTS {
            let by = self.by();
            let error = match self.connection.run(&sql, by).await {
                Ok(()) => return Ok(()),
                Err(error) if is_lock_failure(&error) => error,
                Err(error) => return Err(migrate::explain(error)),
            };
            if attempt == LOCK_ATTEMPTS {
                let message = format!(
                    "the table was locked by other sessions in {LOCK_ATTEMPTS} attempts to {}: end their \
                     transactions, or give more time with --lock-timeout, and run it again; it continues there",
                    stage.title
                );
                return Err(Error::new(ErrorKind::Unavailable, message).because(error));
            }
            let limit = schema.lock_timeout;
            let line =
                format!("{}: no lock within {limit:?}, {attempt} of {LOCK_ATTEMPTS}", stage.title);
            self.pause(schema, &line).await;
        }
        Ok(())
    }

    /// Runs each statement of a stage alone. They block neither readers nor writers, and may wait for old transactions.
    /// Returns false after a deadlock, for instance with an earlier version that changes the table in one transaction.
    async fn concurrently(&mut self, schema: &SchemaTarget, stage: &SchemaStage) -> Result<bool> {
        // The server ends the statement even if this process is gone by then.
        let limit = INDEX_LIMIT.as_millis();
        let by = self.by();
        let settings = format!("SET lock_timeout = 0; SET statement_timeout = '{limit}ms'");
        self.connection.run(&settings, by).await?;
        for statement in &stage.statements {
            schema.report(statement.lines().next().unwrap_or(statement));
            let by = self.clock.now() + INDEX_LIMIT + REQUEST_LIMIT;
            let created = self.connection.run(statement, by).await;
            if let Err(error) = created {
                self.drop_invalid(statement).await;
                if !is_lock_failure(&error) {
                    return Err(error);
                }
                self.pause(schema, "another session changes the table").await;
                return Ok(false);
            }
        }
        let by = self.by();
        self.connection.run("RESET lock_timeout; RESET statement_timeout", by).await?;
        Ok(true)
    }

    /// Drops the invalid index that a failed statement has left. Such a unique index would still refuse rows. If this
    /// fails as well, the next run drops it.
    async fn drop_invalid(&mut self, statement: &str) {
        let Some(name) = statement.split("CONCURRENTLY ").nth(1).filter(|it| it.starts_with('"'))
        else {
            return;
        };
        let table = name.split(" ON ").nth(1).unwrap_or_default();
        let (Some(index), Some((schema, _))) = (name.split('"').nth(1), table.split_once('.'))
        else {
            return;
        };
        let by = self.clock.now() + INDEX_LIMIT;
        let sql = format!("DROP INDEX CONCURRENTLY IF EXISTS {schema}.\"{index}\"");
        if let Err(error) = self.connection.run(&sql, by).await {
            tracing::warn!(name: "tenure.invalid_index", index, %error);
        }
    }

    /// Waits before the next attempt, not shorter than the wait for a lock: readers and writers that queued behind it
    /// proceed meanwhile.
    async fn pause(&self, schema: &SchemaTarget, reason: &str) {
        schema.report(reason);
        let pause = MIN_PAUSE.max(schema.lock_timeout);
        self.clock.sleep_until(self.clock.now() + pause).await;
    }

    fn by(&self) -> Time {
        self.clock.now() + REQUEST_LIMIT
    }
}

/// True if a lock was not free in time, or a deadlock was detected.
fn is_lock_failure(error: &Error) -> bool {
    matches!(failure::code(error), Some("55P03" | "40P01"))
}
