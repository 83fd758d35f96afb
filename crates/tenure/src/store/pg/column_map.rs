//! Queues on tables whose columns have other names: a view has the names that tenure uses, and PostgreSQL expands it.

use std::collections::BTreeMap;
#[cfg(feature = "jobs")]
use std::fmt::Write as _;

#[cfg(feature = "jobs")]
use super::table;
#[cfg(feature = "jobs")]
use crate::{Error, ErrorKind, Result};

/// Begin of the comment of a view. The rest is the map, as JSON.
const COMMENT: &str = "tenure: the columns of a table, ";

/// Name of a column in the user's table for each column of tenure's. Columns that are absent have the same name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ColumnMap(BTreeMap<String, String>);

impl ColumnMap {
    /// Name of a column of tenure's in the table.
    pub(crate) fn name<'a>(&'a self, column: &'a str) -> &'a str {
        self.0.get(column).map_or(column, String::as_str)
    }
}

#[cfg(feature = "jobs")]
impl ColumnMap {
    /// Builds a map from pairs of a column of tenure's and its name in the table, which may be in double quotes.
    pub(crate) fn parse<'a>(
        pairs: impl IntoIterator<Item = (&'a str, &'a str)>,
        known: &[&str],
    ) -> Result<Self> {
        let invalid = |message: String| Err(Error::new(ErrorKind::Invalid, message));
        let mut map = BTreeMap::new();
        for (column, name) in pairs {
            if !known.contains(&column) {
                return invalid(format!(
                    "unknown column {column:?}; supported: {}",
                    known.join(", ")
                ));
            }
            let Some(name) = table::parse_column(name) else {
                return invalid(format!(
                    "invalid name of a column {name:?}: give lower-case letters, digits and underscores, or double \
                     quotes around letters, digits, underscores, hyphens and spaces"
                ));
            };
            if map.insert(column.to_owned(), name.to_owned()).is_some() {
                return invalid(format!("the column {column} is mapped twice"));
            }
        }
        let map = Self(map);
        for (nth, column) in known.iter().enumerate() {
            let name = map.name(column);
            if let Some(other) = known[..nth].iter().find(|other| map.name(other) == name) {
                return invalid(format!(
                    "the column {name:?} is mapped to {other} and to {column}"
                ));
            }
        }
        Ok(map)
    }

    /// Reads a map from the pairs that the server found in the comment of a view.
    pub(crate) fn from_comment(columns: Vec<String>, names: Vec<String>) -> Self {
        let differs = |(column, name): &(String, String)| column != name;
        Self(columns.into_iter().zip(names).filter(differs).collect())
    }

    /// True if a column has another name.
    pub(crate) fn has(&self, column: &str) -> bool {
        self.0.contains_key(column)
    }

    /// Name for SQL. Only names that differ need quotes.
    pub(crate) fn sql_name(&self, column: &str) -> String {
        self.0.get(column).map_or_else(|| column.to_owned(), |name| format!("\"{name}\""))
    }

    /// SQL with the names of the table. The text is a constant of ours, in which every word that is the name of a
    /// column of tenure's means that column.
    pub(crate) fn translate(&self, sql: &str) -> String {
        if self.0.is_empty() {
            return sql.to_owned();
        }
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut text = String::with_capacity(sql.len());
        let mut rest = sql;
        while let Some(start) = rest.find(is_word) {
            let (before, from) = rest.split_at(start);
            let (word, after) = from.split_at(from.find(|c| !is_word(c)).unwrap_or(from.len()));
            text.push_str(before);
            text.push_str(&self.sql_name(word));
            rest = after;
        }
        text.push_str(rest);
        text
    }

    /// Comment of a view with these columns: what is read back by [`map_of`].
    pub(crate) fn comment(&self, columns: &[&str]) -> String {
        let mut text = format!("{COMMENT}{{");
        for (nth, column) in columns.iter().enumerate() {
            let comma = if nth == 0 { "" } else { ", " };
            let _ = write!(text, "{comma}\"{column}\": \"{}\"", self.name(column));
        }
        text + "}"
    }
}

/// SQL of the map of a view, as `jsonb`: null for any other relation. `relation` is SQL for its oid.
pub(crate) fn map_of(relation: &str) -> String {
    let comment = format!("obj_description({relation}, 'pg_class')");
    format!(
        "CASE WHEN {comment} ~ '^{COMMENT}[{{](\"[^\"]*\": \"[^\"]*\"(, )?)+[}}]$' \
         THEN substring({comment} FROM '[{{].*')::jsonb END"
    )
}

/// SQL of the table behind a view of ours, as an oid.
pub(crate) fn table_of(view: &str) -> String {
    format!(
        "(SELECT d.refobjid FROM pg_depend AS d JOIN pg_rewrite AS r ON r.oid = d.objid \
          WHERE d.classid = 'pg_rewrite'::regclass AND r.ev_class = {view} AND d.refclassid = 'pg_class'::regclass \
              AND d.refobjid <> r.ev_class AND d.deptype = 'n' LIMIT 1)"
    )
}

/// SQL of the columns of a relation, as in `pg_attribute`. Those of a view of ours are constrained and filled in as the
/// columns of its table are.
pub(crate) fn attributes(relation: &str) -> String {
    let (map, table) = (map_of(relation), table_of(relation));
    format!(
        "(SELECT v.attname, v.attnum, v.atttypid, v.atttypmod, coalesce(b.attnotnull, v.attnotnull) AS attnotnull, \
                 coalesce(b.atthasdef, v.atthasdef) AS atthasdef, coalesce(b.attidentity, v.attidentity) AS attidentity, \
                 coalesce(b.attgenerated, v.attgenerated) AS attgenerated \
          FROM pg_attribute AS v LEFT JOIN pg_attribute AS b ON b.attname = ({map}) ->> v.attname::text \
              AND b.attrelid = {table} AND b.attnum > 0 AND NOT b.attisdropped \
          WHERE v.attrelid = {relation} AND v.attnum > 0 AND NOT v.attisdropped)"
    )
}

#[cfg(all(test, feature = "jobs"))]
mod tests {
    use super::*;

    #[test]
    fn fragments_get_the_names_of_the_table() {
        let known = ["id", "locked_by", "priority"];
        let map = ColumnMap::parse([("id", "job_id"), ("locked_by", "\"Owner\"")], &known).unwrap();
        let sql = "NEW.locked_by <> 'x' AND lower(priority) = paid AND (id)";
        assert_eq!(
            map.translate(sql),
            "NEW.\"Owner\" <> 'x' AND lower(priority) = paid AND (\"job_id\")"
        );
        assert_eq!(ColumnMap::default().translate(sql), sql);
        assert_eq!(
            map.comment(&["id", "priority"]),
            format!("{COMMENT}{{\"id\": \"job_id\", \"priority\": \"priority\"}}")
        );
    }

    #[test]
    fn ambiguous_and_unknown_names_are_refused() {
        let known = ["id", "locked_by", "priority"];
        for pairs in [
            &[("ID", "a")][..],
            &[("id", "a\"b")],
            &[("id", "a'b")],
            &[("id", "A")],
            &[("id", "a"), ("id", "b")],
            &[("id", "a"), ("locked_by", "a")],
            &[("id", "priority")],
        ] {
            let error = ColumnMap::parse(pairs.iter().copied(), &known).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{pairs:?}");
        }
        assert!(ColumnMap::parse([("id", "priority"), ("priority", "id")], &known).is_ok());
    }
}
