//! The table that counts the terms of each lock, if the URL names one, and beside it the incarnation of the server.

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

/// The SQL that makes it.
pub(super) fn sql(table: &Table) -> String {
    format!("{}\n{}", SHAPE.sql(table), incarnation::sql(table))
}

/// Whether it is there and ours, and whether we may count in it.
pub(super) fn query(table: &Table) -> String {
    let (table, version) = (table.quoted(), SHAPE.version);
    format!(
        "SELECT (obj_description(to_regclass('{table}'), 'pg_class') = '{version}')::int, \
         (SELECT bool_and(has_table_privilege(to_regclass('{table}'), r)) \
         FROM unnest('{{SELECT,INSERT,UPDATE}}'::text[]) AS r)::int"
    )
}

/// What it means that a term could not be counted. Its lock goes with its session.
pub(super) fn explain(error: Error, table: &Table) -> Error {
    let name = table.shown();
    let (kind, message) = match failure::code(&error) {
        Some("42P01" | "3F000") => {
            let how = "give `tenure schema --apply` the same URL";
            (ErrorKind::Misconfigured, format!("there is no table {name} to count terms in: {how}"))
        }
        Some("42501") => {
            let how = format!("an owner must GRANT SELECT, INSERT, UPDATE ON {name}");
            (ErrorKind::Denied, format!("the role may not count terms in {name}: {how}"))
        }
        Some("42703" | "42804" | "42P10" | "42809") => {
            let how = "name another with terms=NAME";
            (ErrorKind::Misconfigured, format!("the table {name} counts no terms: {how}"))
        }
        _ => return error,
    };
    Error::new(kind, message).because(error)
}
