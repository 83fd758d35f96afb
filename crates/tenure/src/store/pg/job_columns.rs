//! Columns of the tables of jobs and checkpoints: their definitions, and the check of tables that exist.

use super::column_map::{ColumnMap, attributes};
#[cfg(feature = "jobs")]
use super::table::Table;

/// A column that tenure uses.
#[derive(Debug)]
pub(crate) struct RequiredColumn {
    pub(crate) name: &'static str,
    /// SQL that defines the column; `None` if the column must exist already, because no default can stand in for it.
    #[cfg_attr(not(feature = "jobs"), expect(dead_code, reason = "only checks without jobs"))]
    pub(crate) definition: Option<&'static str>,
    /// Accepted types.
    pub(crate) types: &'static [&'static str],
    /// Number of characters that the column must hold.
    min_chars: u32,
    /// True if the column must not be null: a row without it could not be named.
    not_null: bool,
    /// True if the table can be used without the column: then only the feature that needs it is missing. A column of the
    /// same name and another type belongs to the user, and counts as missing.
    pub(crate) optional: bool,
}

const fn column(
    name: &'static str,
    definition: &'static str,
    types: &'static [&'static str],
) -> RequiredColumn {
    let definition = Some(definition);
    RequiredColumn { name, definition, types, min_chars: 0, not_null: false, optional: false }
}

const fn optional(
    name: &'static str,
    definition: &'static str,
    types: &'static [&'static str],
) -> RequiredColumn {
    RequiredColumn { optional: true, ..column(name, definition, types) }
}

const fn existing(name: &'static str, types: &'static [&'static str]) -> RequiredColumn {
    RequiredColumn { name, definition: None, types, min_chars: 0, not_null: false, optional: false }
}

/// Accepted types of an id.
pub(crate) const NAME_TYPES: &[&str] =
    &["bigint", "integer", "smallint", "uuid", "text", "character varying"];
const TEXT_TYPES: &[&str] = &["text", "character varying"];
const TIME_TYPES: &[&str] = &["timestamp with time zone"];
const JSON_TYPES: &[&str] = &["jsonb", "json"];
const INTEGER_TYPES: &[&str] = &["bigint", "integer", "smallint"];
/// Definition of `created_at` for an existing table. PostgreSQL computes `now()` once, so a large table is not
/// rewritten.
const CREATED_AT_ADDED: &str = "timestamp with time zone NOT NULL DEFAULT now()";

/// Shortest `locked_by` that holds the unique part of a worker's name. Longer names are cut to the column.
pub(crate) const MIN_WORKER_CHARS: u32 = 32;

const LOCKED_BY: RequiredColumn =
    RequiredColumn { min_chars: MIN_WORKER_CHARS, ..column("locked_by", "text", TEXT_TYPES) };

/// Columns of a queue.
pub(crate) const JOBS: &[RequiredColumn] = &[
    RequiredColumn { not_null: true, ..existing("id", NAME_TYPES) },
    column("priority", "integer NOT NULL DEFAULT 0", INTEGER_TYPES),
    column("created_at", CREATED_AT_ADDED, TIME_TYPES),
    column("completed_at", "timestamp with time zone", TIME_TYPES),
    column("failed_at", "timestamp with time zone", TIME_TYPES),
    column("error_message", "text", TEXT_TYPES),
    column("locked_until", "timestamp with time zone", TIME_TYPES),
    LOCKED_BY,
    column("payload", "jsonb", JSON_TYPES),
    column("attempts", "integer NOT NULL DEFAULT 0", &["integer"]),
    // The default is that of `NewJob`; a test compares them.
    column("max_attempts", "integer DEFAULT 10", &["integer"]),
    column("lease_token", "bigint NOT NULL DEFAULT 0", &["bigint"]),
    column("unique_key", "text", TEXT_TYPES),
    optional("group_key", "text", TEXT_TYPES),
    optional("progress", "text", &["text"]),
    optional("result", "jsonb", JSON_TYPES),
    optional("meta", "jsonb", JSON_TYPES),
];

/// Columns of checkpoints.
pub(crate) const CHECKPOINTS: &[RequiredColumn] = &[
    existing("matrix_id", NAME_TYPES),
    existing("chunk_hash", TEXT_TYPES),
    column("locked_until", "timestamp with time zone", TIME_TYPES),
    LOCKED_BY,
    column("last_synced_at", "timestamp with time zone", TIME_TYPES),
    column("row_count", "bigint", &["bigint", "integer"]),
    column("lease_token", "bigint NOT NULL DEFAULT 0", &["bigint"]),
];

/// Version of the trigger, as its comment. A trigger of another version is replaced.
pub(crate) const TRIGGER_VERSION: &str = "tenure: counts claims, version 2";

/// Version of the function that enqueues, as its comment. A function of another version is replaced.
#[cfg(feature = "jobs")]
pub(crate) const ENQUEUE_VERSION: &str = "tenure: enqueues a job, version 2";

/// SQL query of the problems of a table's columns, one row each. `table` is SQL for its oid, or for that of a view of
/// ours. Missing columns are no problem: they can be added. Optional columns are none either: the table can be used
/// without them.
pub(crate) fn problems(table: &str, columns: &[RequiredColumn], map: &ColumnMap) -> String {
    let row = |column: &RequiredColumn| {
        let types: Vec<String> = column.types.iter().map(|kind| format!("'{kind}'")).collect();
        let RequiredColumn { name, min_chars, not_null, .. } = column;
        let name = map.name(name);
        format!("('{name}', ARRAY[{}], {min_chars}, {not_null})", types.join(", "))
    };
    let required = columns.iter().filter(|column| !column.optional);
    let required = required.map(row).collect::<Vec<_>>().join(", ");
    let attributes = attributes(table);
    format!(
        "SELECT CASE
            WHEN format_type(a.atttypid, NULL) <> ALL (k.kinds) THEN
                format('the column %s is %s, not %s', a.attname, format_type(a.atttypid, NULL),
                    array_to_string(k.kinds, ' or '))
            WHEN a.atttypmod - 4 < k.chars AND a.atttypmod >= 4 THEN
                format('the column %s holds %s characters, and %s are needed', a.attname, a.atttypmod - 4, k.chars)
            WHEN k.not_null AND NOT a.attnotnull THEN format('the column %s may be null', a.attname)
            END AS problem
        FROM {attributes} AS a
            JOIN (VALUES {required}) AS k (name, kinds, chars, not_null) ON k.name = a.attname"
    )
}

/// The command that creates or extends a table, for messages.
#[cfg(feature = "jobs")]
pub(crate) fn schema_command(table: &Table, option: &str) -> String {
    let name = table.shown();
    // Double quotes of the name must reach the command.
    let name = if name.contains('"') { format!("'{name}'") } else { name };
    format!("tenure schema {option} {name} --apply")
}
