//! Schema of the table of locks.

use tokio_postgres::Row;

use crate::store::pg::clock::NOW;
use crate::store::pg::incarnation;
use crate::store::pg::shape::TableShape;
use crate::store::pg::table::Table;
use crate::store::pg::version::{self, VERSION as SERVER_VERSION};
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
    rights: "SELECT, INSERT, UPDATE",
    unlogged: false,
};

/// Comment of the table of waiters.
const WAITERS_VERSION: &str = "tenure waiters, version 1";

/// Marks of waiting claims. They live for seconds, so a crash may lose them.
const WAITERS_SHAPE: TableShape = TableShape {
    what: "The waiters for locks of tenure",
    version: WAITERS_VERSION,
    columns: &[
        ("space", "smallint", "NOT NULL"),
        ("key", "text", "COLLATE \"C\" NOT NULL"),
        ("claim", "bytea", "NOT NULL"),
        ("waiter_id", "text", ""),
        ("waiter_host", "text", ""),
        ("waiter_pid", "bigint", ""),
        ("waiter_note", "text", ""),
        ("since", "timestamp with time zone", "NOT NULL"),
        ("until", "timestamp with time zone", "NOT NULL"),
    ],
    key: "space, key, claim",
    rights: "SELECT, INSERT, UPDATE, DELETE",
    unlogged: true,
};

/// SQL of the first query on every new connection: the clock, whether the server is a standby, the comment of the
/// table, whether waiters can be marked, and the incarnation.
pub(super) fn greeting(table: &Table) -> String {
    format!(
        "SELECT {NOW} AS now, {SERVER_VERSION} AS version, pg_is_in_recovery() AS is_standby, to_regclass('{0}') IS NOT NULL AS table_exists, \
                obj_description(to_regclass('{0}'), 'pg_class') AS comment, {1} AS has_waiters, {2}",
        table.quoted(),
        has_waiters(table),
        incarnation::query_columns(&incarnation::literal(&table.quoted()))
    )
}

/// SQL condition that the table of waiters exists and may be used.
pub(super) fn has_waiters(table: &Table) -> String {
    let waiters = table.waiters().quoted();
    format!(
        "coalesce((SELECT bool_and(has_table_privilege(to_regclass('{waiters}'), r)) \
                   FROM unnest('{{SELECT,INSERT,UPDATE,DELETE}}'::text[]) AS r) \
                  AND obj_description(to_regclass('{waiters}'), 'pg_class') = '{WAITERS_VERSION}', false)"
    )
}

/// Checks that the table exists and has this version.
pub(super) fn check(greeting: Option<&Row>, table: &Table) -> Result<()> {
    let Some(row) = greeting else { return Ok(()) };
    version::check(row.get("version"))?;
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

/// SQL that creates the table, and beside it those of the waiters and of the incarnation.
pub(super) fn sql(table: &Table) -> String {
    let (locks, waiters) = (SHAPE.sql(table), WAITERS_SHAPE.sql(&table.waiters()));
    format!("{locks}\n{waiters}{}\n{}", grants(table), incarnation::sql(table))
}

/// SQL that grants the rights on the table of waiters to all roles that may update the locks.
fn grants(table: &Table) -> String {
    let (locks, waiters) = (table.quoted(), table.waiters().quoted());
    let rights = WAITERS_SHAPE.rights;
    format!(
        "-- Roles that may update the locks are granted these rights here.
DO $tenure$
DECLARE
    role text;
BEGIN
    IF pg_has_role((SELECT relowner FROM pg_class WHERE oid = to_regclass('{waiters}')), 'USAGE') THEN
        FOR role IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
            FROM pg_class AS c, aclexplode(c.relacl) AS a
            WHERE c.oid = to_regclass('{locks}') AND a.privilege_type = 'UPDATE' AND a.grantee <> c.relowner
        LOOP
            EXECUTE format('GRANT {rights} ON %s TO %s', '{waiters}', role);
        END LOOP;
    END IF;
END
$tenure$;
"
    )
}
