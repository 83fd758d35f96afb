//! The table: what it must look like, and the SQL that makes it so.

use std::fmt::Write as _;

use tokio_postgres::Row;

use crate::store::pg::migrate::REFUSED;
use crate::store::pg::table::Table;
use crate::{Error, ErrorKind, Result};

/// What the comment of the table says: whose it is and in which version.
const VERSION: &str = "tenure locks, version 1";

/// Name, type and the rest of each column.
const COLUMNS: &[(&str, &str, &str)] = &[
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
];

/// Asked of every new connection: the clock, whether it is a standby, and what the table says of itself.
pub(super) fn greeting(table: &Table) -> String {
    format!(
        "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8, pg_is_in_recovery(), \
                to_regclass('{0}') IS NOT NULL, obj_description(to_regclass('{0}'), 'pg_class')",
        table.quoted()
    )
}

/// Whether the table is there and one of ours.
pub(super) fn check(greeting: Option<&Row>, table: &Table) -> Result<()> {
    let Some(row) = greeting else { return Ok(()) };
    let (there, says): (bool, Option<String>) = (row.get(2), row.get(3));
    let name = table.shown();
    if !there {
        let message = format!("there is no table {name}: run `tenure schema --apply`");
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
                 `tenure schema --apply`"
            );
            Err(Error::new(ErrorKind::Misconfigured, message))
        }
    }
}

/// One statement that makes the table, or finds it made, or refuses what it finds; nothing else is ever changed.
pub(super) fn sql(table: &Table) -> String {
    let (quoted, shown) = (table.quoted(), table.shown());
    let mut columns = String::new();
    for (name, kind, rest) in COLUMNS {
        let _ = writeln!(columns, "            {name:<12} {}{},", kind, spaced(rest));
    }
    let shape = COLUMNS
        .iter()
        .map(|(name, kind, rest)| {
            format!("{name} {kind}{}", if rest.contains("NOT NULL") { " not null" } else { "" })
        })
        .collect::<Vec<_>>()
        .join(", ");
    let schema = table.schema().map_or_else(String::new, |schema| {
        format!(
            "    IF to_regnamespace('{schema}') IS NULL THEN\n        CREATE SCHEMA \"{schema}\";\n    END IF;\n"
        )
    });
    format!(
        "-- The locks of tenure, in the table {shown}. Safe to run twice, and by several at once.
-- Who uses it needs: GRANT SELECT, INSERT, UPDATE ON {quoted} TO the_role;
DO $tenure$
DECLARE
    version CONSTANT text := '{VERSION}';
    shape CONSTANT text := '{shape}';
    found_version text;
    found_shape text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('tenure schema'));
{schema}    IF to_regclass('{quoted}') IS NULL THEN
        CREATE TABLE {quoted} (
{columns}            PRIMARY KEY (space, key)
        ) WITH (fillfactor = 50);
        EXECUTE format('COMMENT ON TABLE %s IS %L', '{quoted}', version);
        RETURN;
    END IF;
    SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod)
                      || CASE WHEN attnotnull THEN ' not null' ELSE '' END, ', ' ORDER BY attnum)
        INTO found_shape FROM pg_attribute
        WHERE attrelid = to_regclass('{quoted}') AND attnum > 0 AND NOT attisdropped;
    found_version := obj_description(to_regclass('{quoted}'), 'pg_class');
    IF found_version IS DISTINCT FROM version OR found_shape IS DISTINCT FROM shape THEN
        RAISE EXCEPTION 'the table {shown} is not understood: it says \"%\" of itself and has the columns (%)',
                coalesce(found_version, 'nothing'), found_shape
            USING ERRCODE = '{REFUSED}', HINT = 'Nothing was changed. Name another table, or use a tenure that fits.';
    END IF;
END
$tenure$;
",
    )
}

fn spaced(rest: &str) -> String {
    if rest.is_empty() { String::new() } else { format!(" {rest}") }
}
