//! Optional columns of a queue: its jobs can be worked on without them.

use super::db::TableColumns;
use crate::store::pg::job_columns::JOBS;

/// The optional columns that a table has, in a form that can be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OptionalColumns {
    pub(super) group_key: bool,
    pub(super) progress: bool,
    /// Type of `result`, if there is such a column.
    pub(super) result: Option<&'static str>,
    /// Type of `meta`, if there is such a column.
    pub(super) meta: Option<&'static str>,
}

impl OptionalColumns {
    /// Finds the optional columns among the columns of a table. A column of another type, that must not be null, or that
    /// the database computes is the user's own.
    pub(super) fn of(columns: &TableColumns) -> Self {
        let kind = |name: &str| {
            let column = columns.get(name).filter(|it| it.may_be_null && !it.is_generated)?;
            let known = JOBS.iter().find(|known| known.name == name)?;
            known.types.iter().copied().find(|kind| *kind == column.kind)
        };
        Self {
            group_key: kind("group_key").is_some(),
            progress: kind("progress").is_some(),
            result: kind("result"),
            meta: kind("meta"),
        }
    }

    /// SQL of the value in the row `t`, as text; null if the table has no such column.
    pub(super) fn text(&self, name: &str) -> &'static str {
        match name {
            "group_key" if self.group_key => "t.group_key",
            "progress" if self.progress => "t.progress",
            "result" if self.result.is_some() => "t.result::text",
            "meta" if self.meta.is_some() => "t.meta::text",
            _ => "NULL::text",
        }
    }

    /// Columns that a new job may have, with their types.
    pub(super) fn enqueued(&self) -> Vec<(&'static str, &'static str)> {
        let group_key = self.group_key.then_some(("group_key", "text"));
        group_key.into_iter().chain(self.meta.map(|kind| ("meta", kind))).collect()
    }
}
