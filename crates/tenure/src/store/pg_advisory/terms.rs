//! Table that counts the terms of each lock, if the URL names one, and the table of the server's incarnation beside it.

use super::options::KeyForm;
use crate::store::pg::failure;
use crate::store::pg::incarnation;
use crate::store::pg::shape::TableShape;
use crate::store::pg::table::Table;
use crate::{Error, ErrorKind};

/// Definition of the table. A pair and a 64-bit number may have the same bits, so each key form has its own table.
fn shape(form: KeyForm) -> TableShape {
    TableShape {
        what: "The terms of leaders on advisory locks",
        version: match form {
            KeyForm::Pair => "tenure terms, version 1",
            KeyForm::Bigint => "tenure terms of 64-bit keys, version 1",
        },
        columns: match form {
            KeyForm::Pair => &[
                ("key1", "integer", "NOT NULL"),
                ("key2", "integer", "NOT NULL"),
                ("terms", "bigint", "NOT NULL"),
            ],
            KeyForm::Bigint => &[("key", "bigint", "NOT NULL"), ("terms", "bigint", "NOT NULL")],
        },
        key: form.key_columns(),
        rights: "SELECT, INSERT, UPDATE",
        unlogged: false,
    }
}

/// SQL that creates the table, and the incarnation's table beside it.
pub(super) fn sql(table: &Table, form: KeyForm) -> String {
    format!("{}\n{}", shape(form).sql(table), incarnation::sql(table))
}

/// SQL that returns whether the table exists and is tenure's for keys of this form, and whether the role may use it.
pub(super) fn query(table: &Table, form: KeyForm) -> String {
    let (table, version) = (table.quoted(), shape(form).version);
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
            let message =
                format!("the table {name} is not a table of terms for this key form: {how}");
            (ErrorKind::Misconfigured, message)
        }
        _ => return error,
    };
    Error::new(kind, message).because(error)
}
