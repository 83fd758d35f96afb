//! Table that counts the terms of each lock, if the URL names one, and the table of the server's incarnation beside it.

use crate::store::pg::failure;
use crate::store::pg::incarnation;
use crate::store::pg::shape::TableShape;
use crate::store::pg::table::Table;
use crate::{Error, ErrorKind};

const SHAPE: TableShape = TableShape {
    what: "The terms of leaders on advisory locks",
    version: "tenure terms, version 1",
    columns: &[
        ("key1", "integer", "NOT NULL"),
        ("key2", "integer", "NOT NULL"),
        ("terms", "bigint", "NOT NULL"),
    ],
    key: "key1, key2",
};

/// SQL that creates the table, and the incarnation's table beside it.
pub(super) fn sql(table: &Table) -> String {
    format!("{}\n{}", SHAPE.sql(table), incarnation::sql(table))
}

/// SQL that returns whether the table exists and is tenure's, and whether the role may use it.
pub(super) fn query(table: &Table) -> String {
    let (table, version) = (table.quoted(), SHAPE.version);
    format!(
        "SELECT (obj_description(to_regclass('{table}'), 'pg_class') = '{version}')::int AS is_ours, \
         (SELECT bool_and(has_table_privilege(to_regclass('{table}'), r)) \
         FROM unnest('{{SELECT,INSERT,UPDATE}}'::text[]) AS r)::int AS allowed"
    )
}

/// Converts the error of a term that could not be counted. The lock is freed with its session.
pub(super) fn explain(error: Error, table: &Table) -> Error {
    let name = table.shown();
    let (kind, message) = match failure::code(&error) {
        Some("42P01" | "3F000") => {
            let how = "run `tenure schema --apply` with the same URL";
            (ErrorKind::Misconfigured, format!("there is no table {name} to count terms in: {how}"))
        }
        Some("42501") => {
            let how = format!("an owner must GRANT SELECT, INSERT, UPDATE ON {name}");
            (ErrorKind::Denied, format!("the role may not count terms in {name}: {how}"))
        }
        Some("42703" | "42804" | "42P10" | "42809") => {
            let how = "name another with terms=NAME";
            (ErrorKind::Misconfigured, format!("the table {name} is not a table of terms: {how}"))
        }
        _ => return error,
    };
    Error::new(kind, message).because(error)
}
