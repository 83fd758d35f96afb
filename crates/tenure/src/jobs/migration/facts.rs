//! State of a table and of the objects around it, as the catalog of the server has them.

use tenure_core::Time;
use tokio_postgres::types::Type;

use super::super::schema::{ADDED_COLUMN, REFUSAL_HINT, descendants, function};
use super::super::sql_function;
use super::target::{MappedTable, SchemaTarget};
use crate::store::pg::column_map::{self, ColumnMap};
use crate::store::pg::connect::PgConnection;
use crate::{Error, ErrorKind, Result};

/// Ends of the names of functions of a table: `add` enqueues, `claimed` is called by the trigger.
const FUNCTIONS: [&str; 2] = ["add", "claimed"];

/// An existing table.
#[derive(Debug)]
pub(super) struct TableFacts {
    /// Names of its columns that differ from tenure's.
    pub(super) map: ColumnMap,
    /// The view that is the queue, if the table's columns have other names.
    pub(super) view: Option<ViewFacts>,
    pub(super) columns: Vec<ColumnFacts>,
    /// The table itself first, then those that inherit from it.
    pub(super) tree: Vec<RelationFacts>,
    pub(super) is_partitioned: bool,
    /// True if a unique index covers the key.
    pub(super) is_keyed: bool,
    /// Existing functions of the table, by the ends of their names.
    pub(super) functions: Vec<&'static str>,
    /// True if the function that enqueues has the present version.
    pub(super) has_current_add: bool,
    /// Names of the existing tables of tenure's own beside the table.
    pub(super) beside: Vec<String>,
}

/// The view of a table with other names.
#[derive(Debug)]
pub(super) struct ViewFacts {
    /// Its columns, in order. Empty if the view is missing.
    pub(super) columns: Vec<String>,
    pub(super) comment: Option<String>,
}

#[derive(Debug)]
pub(super) struct ColumnFacts {
    pub(super) name: String,
    pub(super) may_be_null: bool,
    /// True if tenure added the column.
    pub(super) was_added: bool,
}

/// One table of the tree.
#[derive(Debug)]
pub(super) struct RelationFacts {
    /// Quoted name, with its schema.
    pub(super) quoted: String,
    /// Quoted name of its schema.
    pub(super) schema: String,
    pub(super) name: String,
    pub(super) indexes: Vec<IndexFacts>,
    /// Names and comments of its triggers.
    pub(super) triggers: Vec<(String, Option<String>)>,
}

#[derive(Debug)]
pub(super) struct IndexFacts {
    pub(super) name: String,
    /// False if its creation was interrupted, or is in progress.
    pub(super) is_valid: bool,
    /// True while a session creates it.
    pub(super) is_in_progress: bool,
}

impl TableFacts {
    pub(super) fn root(&self) -> Option<&RelationFacts> {
        self.tree.first()
    }

    /// True while a session creates an index.
    pub(super) fn has_index_in_progress(&self) -> bool {
        self.tree.iter().flat_map(|table| &table.indexes).any(|index| index.is_in_progress)
    }

    /// True if the table has a column of this name.
    pub(super) fn has_column(&self, name: &str) -> bool {
        self.columns.iter().any(|column| column.name == name)
    }

    /// Reads the facts; `None` if there is no such table. Fails if the table cannot be used.
    pub(super) async fn read(
        connection: &mut PgConnection,
        schema: &SchemaTarget,
        by: Time,
    ) -> Result<Option<Self>> {
        let Some(found) = find(connection, schema, by).await? else { return Ok(None) };
        let FoundTable { oid, map, view } = found;
        let definition = &schema.definition;
        let sql = format!(
            "SELECT (SELECT string_agg(problem, ', ') FROM ({}) AS problems) AS problems, \
                    (SELECT c.relkind = 'p' FROM pg_class AS c WHERE c.oid = $1) AS is_partitioned, {} AS is_keyed, \
                    to_regproc($2) IS NOT NULL AS add, to_regproc($3) IS NOT NULL AS claimed, \
                    coalesce({}, false) AS add_is_current, \
                    (SELECT coalesce(array_agg(c.relname::text), '{{}}') FROM pg_class AS c WHERE c.relname = ANY ($5) \
                        AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass($4))) AS beside, \
                    array_agg(a.attname::text ORDER BY a.attnum) AS names, \
                    array_agg(NOT a.attnotnull ORDER BY a.attnum) AS may_be_null, \
                    array_agg(coalesce(col_description(a.attrelid, a.attnum) = '{ADDED_COLUMN}', false) ORDER BY a.attnum) AS added \
             FROM pg_attribute AS a WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped",
            definition.refusals("$1::oid", &map),
            definition.is_keyed("$1::oid", &map),
            sql_function::is_current("$2"),
        );
        let tree = tree(connection, oid, by).await?;
        let [add, claimed] = FUNCTIONS.map(|suffix| function(&schema.table, suffix));
        // Other tables are kept beside the queue, whose view may be missing yet.
        let queue = match &view {
            Some(view) if view.columns.is_empty() => {
                schema.mapped.as_ref().map_or_else(String::new, |it| it.table.quoted())
            }
            _ => schema.table.quoted(),
        };
        let beside: Vec<&str> = schema.tables_beside().into_iter().map(|(name, _)| name).collect();
        let parameters: &[(&(dyn tokio_postgres::types::ToSql + Sync), Type)] = &[
            (&oid, Type::OID),
            (&add, Type::TEXT),
            (&claimed, Type::TEXT),
            (&queue, Type::TEXT),
            (&beside, Type::TEXT_ARRAY),
        ];
        let rows = connection.query(&sql, parameters, by).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        if let Some(problems) = row.get::<_, Option<String>>("problems") {
            return Err(refused(schema, &problems));
        }
        let names: Vec<String> = row.get("names");
        let (nulls, added): (Vec<bool>, Vec<bool>) = (row.get("may_be_null"), row.get("added"));
        let columns = names.into_iter().zip(nulls.into_iter().zip(added));
        let facts = Self {
            columns: columns
                .map(|(name, (may_be_null, was_added))| ColumnFacts {
                    name,
                    may_be_null,
                    was_added,
                })
                .collect(),
            tree,
            is_partitioned: row.get("is_partitioned"),
            is_keyed: row.get("is_keyed"),
            functions: FUNCTIONS.into_iter().filter(|suffix| row.get(*suffix)).collect(),
            has_current_add: row.get("add_is_current"),
            beside: row.get("beside"),
            map,
            view,
        };
        facts.check_duplicates(connection, schema, by).await?;
        Ok(Some(facts))
    }

    /// Refuses a table if one that inherits from it has a row of the same key.
    async fn check_duplicates(
        &self,
        connection: &mut PgConnection,
        schema: &SchemaTarget,
        by: Time,
    ) -> Result<()> {
        let Some(root) = self.root().filter(|_| self.tree.len() > 1) else { return Ok(()) };
        let sql = schema.definition.duplicates(&root.quoted, &self.map);
        match connection.simple(&sql, by).await?.first() {
            Some(row) => {
                let of = |column: &&str| {
                    let value = row.get(self.map.name(column)).unwrap_or_default();
                    format!("{column} {value}")
                };
                let key: Vec<String> = schema.definition.key.iter().map(of).collect();
                let key = key.join(", ");
                let problem = format!("a table that inherits from it has the {key}, too");
                Err(refused(schema, &problem))
            }
            None => Ok(()),
        }
    }
}

struct FoundTable {
    oid: u32,
    map: ColumnMap,
    view: Option<ViewFacts>,
}

/// Finds the table of a queue: the relation of that name, or the table behind its view.
async fn find(
    connection: &mut PgConnection,
    schema: &SchemaTarget,
    by: Time,
) -> Result<Option<FoundTable>> {
    let map = column_map::map_of("to_regclass($1)");
    let table = column_map::table_of("to_regclass($1)");
    let sql = format!(
        "SELECT q.oid, q.kind, q.comment, q.map IS NOT NULL AS is_view_of_ours, to_regclass($2)::oid AS named_table, \
             CASE WHEN q.map IS NOT NULL THEN q.base END AS viewed_table, \
             ARRAY(SELECT m.key FROM jsonb_each_text(q.map) AS m ORDER BY m.key) AS mapped_columns, \
             ARRAY(SELECT m.value FROM jsonb_each_text(q.map) AS m ORDER BY m.key) AS mapped_names, \
             ARRAY(SELECT a.attname::text FROM pg_attribute AS a WHERE a.attrelid = q.oid AND a.attnum > 0 \
                   AND NOT a.attisdropped ORDER BY a.attnum) AS view_columns \
         FROM (SELECT to_regclass($1)::oid AS oid, (SELECT c.relkind::text FROM pg_class AS c WHERE c.oid = to_regclass($1)) AS kind, \
                   obj_description(to_regclass($1), 'pg_class') AS comment, {map} AS map, {table} AS base) AS q"
    );
    let named = schema.mapped.as_ref().map(|it| it.table.quoted());
    let queue = schema.table.quoted();
    let rows = connection.query(&sql, &[(&queue, Type::TEXT), (&named, Type::TEXT)], by).await?;
    let Some(row) = rows.first() else {
        return Err(Error::new(ErrorKind::Unavailable, "the server sent no answer"));
    };
    let (oid, is_ours): (Option<u32>, bool) = (row.get("oid"), row.get("is_view_of_ours"));
    let view = || ViewFacts { columns: row.get("view_columns"), comment: row.get("comment") };
    let misconfigured = |message: String| Err(Error::new(ErrorKind::Misconfigured, message));
    if let Some(MappedTable { table, map }) = &schema.mapped {
        if oid.is_some() && !is_ours {
            return misconfigured(format!(
                "{} exists already, and is no view of tenure's: give the queue another name than that",
                schema.table.shown()
            ));
        }
        let Some(oid) = row.get("named_table") else {
            return misconfigured(format!("there is no table {}", table.shown()));
        };
        return Ok(Some(FoundTable { oid, map: map.clone(), view: Some(view()) }));
    }
    if is_ours {
        let map = ColumnMap::from_comment(row.get("mapped_columns"), row.get("mapped_names"));
        let Some(oid) = row.get("viewed_table") else {
            return misconfigured(format!("the view {} has no table", schema.table.shown()));
        };
        return Ok(Some(FoundTable { oid, map, view: Some(view()) }));
    }
    Ok(oid.map(|oid| FoundTable { oid, map: ColumnMap::default(), view: None }))
}

/// The table, and those that inherit from it.
async fn tree(connection: &mut PgConnection, oid: u32, by: Time) -> Result<Vec<RelationFacts>> {
    let sql = format!(
        "SELECT format('%I.%I', n.nspname, r.relname) AS quoted, format('%I', n.nspname) AS schema, \
             r.relname::text AS name, x.names AS indexes, x.valid AS indexes_valid, x.in_progress AS indexes_in_progress, \
             t.names AS triggers, t.comments AS trigger_comments \
         FROM (SELECT c.oid, c.relname, c.relnamespace FROM pg_class AS c WHERE c.oid = $1 \
               UNION ALL SELECT * FROM ({}) AS d) AS r JOIN pg_namespace AS n ON n.oid = r.relnamespace, \
             LATERAL (SELECT array_agg(c.relname::text ORDER BY c.oid) AS names, array_agg(i.indisvalid ORDER BY c.oid) AS valid, \
                 array_agg(EXISTS (SELECT FROM pg_stat_progress_create_index AS p WHERE p.index_relid = c.oid) ORDER BY c.oid) \
                     AS in_progress \
                 FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid WHERE i.indrelid = r.oid) AS x, \
             LATERAL (SELECT array_agg(g.tgname::text ORDER BY g.oid) AS names, \
                 array_agg(obj_description(g.oid, 'pg_trigger') ORDER BY g.oid) AS comments \
                 FROM pg_trigger AS g WHERE g.tgrelid = r.oid AND NOT g.tgisinternal) AS t \
         ORDER BY r.oid <> $1, r.oid",
        descendants("$1::oid")
    );
    let rows = connection.query(&sql, &[(&oid, Type::OID)], by).await?;
    let relation = |row: &tokio_postgres::Row| {
        let names = |column: &str| row.get::<_, Option<Vec<String>>>(column).unwrap_or_default();
        let flags = |column: &str| row.get::<_, Option<Vec<bool>>>(column).unwrap_or_default();
        let comments: Option<Vec<Option<String>>> = row.get("trigger_comments");
        let states = flags("indexes_valid").into_iter().zip(flags("indexes_in_progress"));
        let indexes = names("indexes").into_iter().zip(states);
        RelationFacts {
            quoted: row.get("quoted"),
            schema: row.get("schema"),
            name: row.get("name"),
            indexes: indexes
                .map(|(name, (is_valid, is_in_progress))| IndexFacts {
                    name,
                    is_valid,
                    is_in_progress,
                })
                .collect(),
            triggers: names("triggers").into_iter().zip(comments.unwrap_or_default()).collect(),
        }
    };
    Ok(rows.iter().map(relation).collect())
}

fn refused(schema: &SchemaTarget, problems: &str) -> Error {
    let shown = schema.mapped.as_ref().map_or(&schema.table, |it| &it.table).shown();
    let message = format!(
        "the table {shown} cannot hold {}: {problems}; nothing was changed: {REFUSAL_HINT}",
        schema.definition.what
    );
    Error::new(ErrorKind::Misconfigured, message)
}
