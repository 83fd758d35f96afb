//! Creation and change of tables: what a table lacks, and the stages that add or remove it while the table is in use.

mod facts;
mod plan;
mod session;
mod target;

use std::sync::Arc;
use std::time::Duration;

use super::schema::{self, TableDefinition};
use crate::store::pg::column_map::ColumnMap;
use crate::store::pg::settings::Settings;
use crate::store::pg::table::Table;
use crate::{Clock, Error, ErrorKind, Result};

use session::MigrationSession;
use target::{MappedTable, SchemaTarget};

pub use plan::{SchemaPlan, SchemaStage};
pub use target::UndoOptions;

/// Default of [`Schema::lock_timeout`].
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Table of a queue or of checkpoints: creates it, or adds what an existing table lacks, while that is in use.
///
/// A missing table is created in one transaction. An existing one is changed in stages: columns without a rewrite of
/// the table, indexes concurrently, then functions and trigger. No statement waits for a lock, and thereby blocks
/// readers and writers, for longer than [`lock_timeout`](Self::lock_timeout). After an interruption the next run
/// continues.
///
/// ```
/// let schema = tenure::jobs::Schema::of_queue("sync_jobs")?;
/// assert!(schema.sql().contains("sync_jobs"));
/// # Ok::<(), tenure::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Schema(SchemaTarget);

impl Schema {
    /// The schema of a queue.
    ///
    /// # Errors
    ///
    /// `Invalid` if the table name is invalid.
    pub fn of_queue(table: &str) -> Result<Self> {
        Self::new(table, schema::jobs())
    }

    /// The schema of a table of checkpoints.
    ///
    /// # Errors
    ///
    /// `Invalid` if the table name is invalid.
    pub fn of_checkpoints(table: &str) -> Result<Self> {
        Self::new(table, schema::checkpoints())
    }

    fn new(table: &str, definition: TableDefinition) -> Result<Self> {
        let table = Table::parse(table, "")?;
        let mut target = SchemaTarget {
            table,
            definition: Arc::new(definition),
            sql: String::new(),
            mapped: None,
            lock_timeout: LOCK_TIMEOUT,
            on_progress: None,
        };
        let mut parts = vec![schema::script(&target.definition, &target.table)];
        parts.extend(target.tables_beside().into_iter().map(|(_, sql)| sql));
        target.sql = parts.join("\n");
        Ok(Self(target))
    }

    /// Keeps the rows in an existing table whose columns have other names. `columns` are pairs of tenure's name and the
    /// table's. Columns that are not named have the same name in both.
    ///
    /// The queue is then a view of that table, which PostgreSQL expands in every statement. Indexes and trigger are
    /// created on the table. The map is stored with the view: later calls need not repeat it.
    ///
    /// ```
    /// let schema = tenure::jobs::Schema::of_queue("tasks_queue")?
    ///     .mapped("app.tasks", [("id", "task_id"), ("locked_by", "owner"), ("locked_until", "leased_until")])?;
    /// # Ok::<(), tenure::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Invalid` if a name is invalid, unknown or used twice.
    pub fn mapped<'a>(
        mut self,
        table: &str,
        columns: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self> {
        let table = Table::parse(table, "")?;
        if table == self.0.table {
            let message = format!("the queue needs another name than its table {}", table.shown());
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let map = ColumnMap::parse(columns, &self.0.definition.column_names())?;
        self.0.mapped = Some(MappedTable { table, map });
        Ok(self)
    }

    /// Longest wait for a lock on the table: 1 s by default. Readers and writers queue behind a statement that waits
    /// for a lock. A statement that does not get its lock is repeated, after a pause.
    #[must_use]
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.0.lock_timeout = timeout.max(Duration::from_millis(1));
        self
    }

    /// Handler of lines about the progress of [`apply`](Self::apply) and [`undo`](Self::undo): stages, and waits for
    /// locks.
    #[must_use]
    pub fn on_progress(mut self, handler: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.0.on_progress = Some(Arc::new(handler));
        self
    }

    /// SQL for any state of the table, to hand to a database administrator: creates the table, or adds what it lacks,
    /// in one transaction. It may run twice and in several sessions at once. It refuses a table with an unknown layout.
    /// It also creates the tables of the server's incarnation and, for a queue, of the settings and the schedules
    /// of queues.
    ///
    /// It does not know of [mapped](Self::mapped) columns; [`plan`](Self::plan) does.
    pub fn sql(&self) -> &str {
        &self.0.sql
    }

    /// The statements that [`apply`](Self::apply) would execute now. Nothing is changed.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the table cannot be used, or the server is a standby.
    ///
    /// # Cancel safety
    ///
    /// Only reads.
    pub async fn plan(&self, url: &str) -> Result<SchemaPlan> {
        let (mut session, shown) = self.open(url).await?;
        session.plan(&self.0).await.map_err(|error| error.at(shown))
    }

    /// Creates the table, or adds what it lacks.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if the table cannot be used, or the server is a standby; `Denied` without the right to create or
    /// change the table. In these cases nothing is changed. `Unavailable` if a lock was not free in any attempt: stages
    /// before it are applied, and the next call continues.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the stage in progress either applied or not, and the server may finish an index that
    /// it has begun. The next call continues.
    pub async fn apply(&self, url: &str) -> Result<()> {
        let (mut session, shown) = self.open(url).await?;
        session.apply(&self.0).await.map_err(|error| error.at(shown))
    }

    /// The statements that [`undo`](Self::undo) would execute now. Nothing is changed.
    ///
    /// # Errors
    ///
    /// `Misconfigured` if there is no such table.
    ///
    /// # Cancel safety
    ///
    /// Only reads.
    pub async fn undo_plan(&self, url: &str, options: UndoOptions) -> Result<SchemaPlan> {
        let (mut session, shown) = self.open(url).await?;
        session.undo_plan(&self.0, options).await.map_err(|error| error.at(shown))
    }

    /// Removes what [`apply`](Self::apply) has added to a table: trigger, functions, indexes, the view of a
    /// [mapped](Self::mapped) table, and with [`drop_columns`](UndoOptions::drop_columns) the added columns. The table
    /// itself, columns that it had before, and the table of the server's incarnation are kept.
    ///
    /// # Errors
    ///
    /// `Invalid` while jobs are running, unless [forced](UndoOptions::force); otherwise as [`apply`](Self::apply).
    ///
    /// # Cancel safety
    ///
    /// As [`apply`](Self::apply).
    pub async fn undo(&self, url: &str, options: UndoOptions) -> Result<()> {
        let (mut session, shown) = self.open(url).await?;
        session.undo(&self.0, options).await.map_err(|error| error.at(shown))
    }

    async fn open(&self, url: &str) -> Result<(MigrationSession, String)> {
        let (settings, _) = Settings::parse(url, &["table", "poll", "prepare"])?;
        let shown = settings.to_string();
        let session = MigrationSession::open(&settings, Clock::system()).await;
        session.map(|session| (session, shown.clone())).map_err(|error| error.at(shown))
    }
}
