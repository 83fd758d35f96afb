//! A table to create or change, and how.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::super::controls::{QUEUES_SHAPE, QUEUES_TABLE, SCHEDULES_SHAPE, SCHEDULES_TABLE};
use super::super::schema::TableDefinition;
use crate::store::pg::column_map::ColumnMap;
use crate::store::pg::incarnation;
use crate::store::pg::shape::TableShape;
use crate::store::pg::table::Table;

/// A table of jobs or checkpoints, as it should be.
#[derive(Clone)]
pub(super) struct SchemaTarget {
    pub(super) table: Table,
    pub(super) definition: Arc<TableDefinition>,
    /// SQL for any state of the table.
    pub(super) sql: String,
    pub(super) mapped: Option<MappedTable>,
    pub(super) lock_timeout: Duration,
    pub(super) on_progress: Option<ProgressHandler>,
}

/// Handler of lines about the progress.
pub(super) type ProgressHandler = Arc<dyn Fn(&str) + Send + Sync>;

/// A table whose columns have other names. The queue is a view of it.
#[derive(Clone, Debug)]
pub(super) struct MappedTable {
    pub(super) table: Table,
    pub(super) map: ColumnMap,
}

impl SchemaTarget {
    /// Names of the tables of tenure's own beside the table, and the SQL that creates each and grants rights on it.
    pub(super) fn tables_beside(&self) -> Vec<(&'static str, String)> {
        let shapes: &[(&'static str, TableShape)] = if self.definition.has_attempts {
            &[(QUEUES_TABLE, QUEUES_SHAPE), (SCHEDULES_TABLE, SCHEDULES_SHAPE)]
        } else {
            &[]
        };
        let beside = |(name, shape): &(&'static str, TableShape)| {
            (*name, shape.sql_beside(name, &self.table))
        };
        let mut tables: Vec<_> = shapes.iter().map(beside).collect();
        tables.push((incarnation::TABLE, incarnation::sql(&self.table)));
        tables
    }

    /// Passes a line to the handler of the caller.
    pub(super) fn report(&self, line: &str) {
        if let Some(handler) = &self.on_progress {
            handler(line);
        }
    }
}

impl fmt::Debug for SchemaTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, mapped, lock_timeout, .. } = self;
        f.debug_struct("SchemaTarget")
            .field("table", table)
            .field("mapped", mapped)
            .field("lock_timeout", lock_timeout)
            .finish_non_exhaustive()
    }
}

/// Extent of [`Schema::undo`](super::Schema::undo).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UndoOptions {
    /// Also removes the columns that were added, with their data.
    pub drop_columns: bool,
    /// Does not refuse while jobs are running.
    pub force: bool,
}

impl UndoOptions {
    /// Also removes the columns that were added, with their data: payloads and numbers of attempts are lost.
    #[must_use]
    pub fn drop_columns(mut self, drop: bool) -> Self {
        self.drop_columns = drop;
        self
    }

    /// Does not refuse while jobs are running.
    #[must_use]
    pub fn force(mut self, force: bool) -> Self {
        self.force = force;
        self
    }
}
