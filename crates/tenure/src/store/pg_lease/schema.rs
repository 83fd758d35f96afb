//! Schema of the table of locks.

use tokio_postgres::Row;

use crate::store::pg::clock::NOW;
use crate::store::pg::incarnation;
use crate::store::pg::shape::TableShape;
use crate::store::pg::table::Table;
use crate::{Error, ErrorKind, Result};

/// Comment of the table: its kind and version.
const VERSION: &str = "tenure locks, version 1";

const SHAPE: TableShape = TableShape {
    what: "The locks of tenure",
    version: VERSION,
    columns: &[
        ("space", "smallint", "NOT NULL"),
        ("key", "text", "COLLATE \"C\" NOT NULL"),
        ("epoch", "bigint", "NOT NULL"),
        ("counter", "bigint", "NOT NULL"),
        ("claim", "bytea", ""),
        ("secret", "bytea", ""),
        ("holder_id", "text", ""),
        ("holder_host", "text", ""),
        ("holder_pid", "bigint", ""),
        ("holder_note", "text", ""),
        ("granted_at", "timestamp with time zone", ""),
        ("locked_until", "timestamp with time zone", "NOT NULL"),
        ("ttl", "interval", "NOT NULL"),
        ("slots", "integer", ""),
        ("holders", "jsonb", ""),
    ],
    key: "space, key",
};

/// SQL of the first query on every new connection: the clock, whether the server is a standby, the comment of the
/// table, and the incarnation.
pub(super) fn greeting(table: &Table) -> String {
    format!(
        "SELECT {NOW} AS now, pg_is_in_recovery() AS is_standby, to_regclass('{0}') IS NOT NULL AS table_exists, \
                obj_description(to_regclass('{0}'), 'pg_class') AS comment, {1}",
        table.quoted(),
        incarnation::query_columns(&incarnation::literal(&table.quoted()))
    )
}

/// Checks that the table exists and has this version.
pub(super) fn check(greeting: Option<&Row>, table: &Table) -> Result<()> {
    let Some(row) = greeting else { return Ok(()) };
    let (exists, comment): (bool, Option<String>) = (row.get("table_exists"), row.get("comment"));
    let name = table.shown();
    if !exists {
        let message = format!("there is no table {name}: run `tenure schema --locks --apply`");
        return Err(Error::new(ErrorKind::Misconfigured, message));
    }
    match comment.as_deref() {
        Some(VERSION) => Ok(()),
        Some(other) if other.starts_with("tenure locks, version ") => {
            let message = format!(
                "the table {name} is \"{other}\", this tenure supports \"{VERSION}\": use a matching version of tenure"
            );
            Err(Error::new(ErrorKind::Misconfigured, message))
        }
        _ => {
            let message = format!(
                "the table {name} is not a lock table of tenure: name another with table=NAME and run \
                 `tenure schema --locks --apply`"
            );
            Err(Error::new(ErrorKind::Misconfigured, message))
        }
    }
}

/// SQL that creates the table, and the incarnation's table beside it.
pub(super) fn sql(table: &Table) -> String {
    format!("{}\n{}", SHAPE.sql(table), incarnation::sql(table))
}
