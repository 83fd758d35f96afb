//! The table: what it must look like, and the SQL that makes it so.

use tokio_postgres::Row;

use crate::store::pg::incarnation;
use crate::store::pg::shape::TableShape;
use crate::store::pg::table::Table;
use crate::{Error, ErrorKind, Result};

/// What the comment of the table says: whose it is and in which version.
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

/// Asked of every new connection: the clock, whether it is a standby, what the table says of itself, and where the
/// incarnation is kept.
pub(super) fn greeting(table: &Table) -> String {
    format!(
        "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8, pg_is_in_recovery(), \
                to_regclass('{0}') IS NOT NULL, obj_description(to_regclass('{0}'), 'pg_class'), {1}",
        table.quoted(),
        incarnation::query_columns(&incarnation::literal(&table.quoted()))
    )
}

/// Whether the table is there and one of ours.
pub(super) fn check(greeting: Option<&Row>, table: &Table) -> Result<()> {
    let Some(row) = greeting else { return Ok(()) };
    let (there, says): (bool, Option<String>) = (row.get(2), row.get(3));
    let name = table.shown();
    if !there {
        let message = format!("there is no table {name}: run `tenure schema --locks --apply`");
        return Err(Error::new(ErrorKind::Misconfigured, message));
    }
    match says.as_deref() {
        Some(VERSION) => Ok(()),
        Some(other) if other.starts_with("tenure locks, version ") => {
            let message = format!(
                "the table {name} is \"{other}\" and this tenure knows \"{VERSION}\": use a tenure that fits"
            );
            Err(Error::new(ErrorKind::Misconfigured, message))
        }
        _ => {
            let message = format!(
                "the table {name} is not one of tenure's, or has another shape: name another with table=NAME and run \
                 `tenure schema --locks --apply`"
            );
            Err(Error::new(ErrorKind::Misconfigured, message))
        }
    }
}

/// The SQL that makes it.
pub(super) fn sql(table: &Table) -> String {
    format!("{}\n{}", SHAPE.sql(table), incarnation::sql(table))
}
