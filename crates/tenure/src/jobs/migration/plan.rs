//! Stages of a change: computed from the state of a table, without a connection.

use std::fmt;
use std::time::Duration;

use super::super::schema::{ADDED_COLUMN, function, named, trigger};
use super::super::sql_function;
use super::facts::{RelationFacts, TableFacts, ViewFacts};
use super::target::{SchemaTarget, UndoOptions};
use crate::store::pg::job_columns::TRIGGER_VERSION;

/// System columns that statements identify a row by. A table has them by itself, a view must name them.
const ROW_IDENTITY: [&str; 2] = ["tableoid", "ctid"];

/// Statements that change a table, in stages.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SchemaPlan {
    /// Name of the table.
    pub table: String,
    /// The stages, in order. Empty if there is nothing to do.
    pub stages: Vec<SchemaStage>,
    /// Columns that were added and are kept, because their removal was not requested.
    pub kept_columns: Vec<String>,
    lock_timeout: Duration,
}

/// One stage of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchemaStage {
    /// Description of the stage.
    pub title: String,
    /// SQL statements, without a semicolon at their end.
    pub statements: Vec<String>,
    /// True if the statements are one transaction. Otherwise each is executed alone, because PostgreSQL refuses it
    /// inside a transaction.
    pub in_transaction: bool,
}

impl SchemaStage {
    fn transaction(title: impl Into<String>, statements: Vec<String>) -> Self {
        Self { title: title.into(), statements, in_transaction: true }
    }

    fn alone(title: impl Into<String>, statements: Vec<String>) -> Self {
        Self { title: title.into(), statements, in_transaction: false }
    }
}

impl SchemaPlan {
    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// Plan that creates a missing table.
    pub(super) fn create(schema: &SchemaTarget) -> Self {
        let sql = schema.sql.trim_end().trim_end_matches(';').to_owned();
        Self::new(schema, vec![SchemaStage::transaction("create the table", vec![sql])])
    }

    /// Plan that adds what a table lacks.
    pub(super) fn add(schema: &SchemaTarget, facts: &TableFacts) -> Self {
        let mut stages = Vec::new();
        stages.extend(columns(schema, facts));
        stages.extend(facts.view.as_ref().and_then(|view| self::view(schema, facts, view)));
        stages.extend(indexes(schema, facts));
        stages.extend(functions(schema, facts));
        stages.extend(triggers(schema, facts));
        let is_missing = |name: &str| !facts.beside.iter().any(|found| found == name);
        stages.extend(stages_beside(schema, is_missing));
        Self::new(schema, stages)
    }

    /// Plan that removes what [`add`](Self::add) has added.
    pub(super) fn remove(schema: &SchemaTarget, facts: &TableFacts, options: UndoOptions) -> Self {
        let mut stages = Vec::new();
        stages.extend(drop_triggers(schema, facts));
        stages.extend(drop_functions(schema, facts));
        stages.extend(drop_indexes(schema, facts));
        let added: Vec<String> = facts
            .columns
            .iter()
            .filter(|column| column.was_added)
            .map(|column| column.name.clone())
            .collect();
        let (dropped, kept_columns) =
            if options.drop_columns { (added, Vec::new()) } else { (Vec::new(), added) };
        // The view is dropped last: until then it shows an interrupted run which table it is.
        stages.extend(drop_view_and_columns(schema, facts, &dropped));
        Self { kept_columns, ..Self::new(schema, stages) }
    }

    fn new(schema: &SchemaTarget, stages: Vec<SchemaStage>) -> Self {
        let (table, lock_timeout) = (schema.table.shown(), schema.lock_timeout);
        Self { table, stages, kept_columns: Vec::new(), lock_timeout }
    }
}

/// The stages that create the chosen tables of tenure's own, and grant rights on them.
pub(super) fn stages_beside(
    schema: &SchemaTarget,
    choose: impl Fn(&str) -> bool,
) -> Vec<SchemaStage> {
    let tables = schema.tables_beside().into_iter().filter(|(name, _)| choose(name));
    let stage = |(name, sql): (&str, String)| {
        let sql = sql.trim_end().trim_end_matches(';').to_owned();
        SchemaStage::transaction(format!("create the table {name}"), vec![sql])
    };
    tables.map(stage).collect()
}

fn columns(schema: &SchemaTarget, facts: &TableFacts) -> Option<SchemaStage> {
    let quoted = &facts.root()?.quoted;
    let missing = schema.definition.columns.iter().filter_map(|column| {
        let definition = column.definition?;
        (!facts.has_column(facts.map.name(column.name))).then_some((column.name, definition))
    });
    let missing: Vec<_> = missing.collect();
    if missing.is_empty() {
        return None;
    }
    // One statement, so that the table is locked once. Defaults are constants: no row is rewritten.
    let added: Vec<String> = missing
        .iter()
        .map(|(name, definition)| format!("ADD COLUMN {name} {definition}"))
        .collect();
    let mut statements = vec![format!("ALTER TABLE {quoted}\n    {}", added.join(",\n    "))];
    statements.extend(
        missing
            .iter()
            .map(|(name, _)| format!("COMMENT ON COLUMN {quoted}.{name} IS '{ADDED_COLUMN}'")),
    );
    Some(SchemaStage::transaction("add columns, without a rewrite of the table", statements))
}

fn view(schema: &SchemaTarget, facts: &TableFacts, view: &ViewFacts) -> Option<SchemaStage> {
    let names = schema.definition.column_names();
    let comment = facts.map.comment(&names);
    let mut columns: Vec<&str> = view.columns.iter().map(String::as_str).collect();
    // PostgreSQL appends columns to a view, and changes no order.
    let missing = ROW_IDENTITY
        .into_iter()
        .chain(names)
        .filter(|name| !view.columns.iter().any(|column| column == name));
    let missing: Vec<&str> = missing.collect();
    if missing.is_empty() && view.comment.as_deref() == Some(&*comment) {
        return None;
    }
    columns.extend(missing);
    let column = |column: &&str| {
        let name = facts.map.sql_name(column);
        if name == **column { name } else { format!("{name} AS {column}") }
    };
    let columns: Vec<String> = columns.iter().map(column).collect();
    let (queue, table) = (schema.table.quoted(), &facts.root()?.quoted);
    let mut statements = Vec::new();
    if let Some(schema) = schema.table.schema() {
        statements.push(format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\""));
    }
    statements.push(format!(
        "CREATE OR REPLACE VIEW {queue} AS SELECT {} FROM {table}",
        columns.join(", ")
    ));
    statements.push(format!("COMMENT ON VIEW {queue} IS '{comment}'"));
    Some(SchemaStage::transaction("create the view with tenure's names of the columns", statements))
}

fn indexes(schema: &SchemaTarget, facts: &TableFacts) -> Option<SchemaStage> {
    let definition = &schema.definition;
    let priority = facts.map.name("priority");
    let found = facts.columns.iter().find(|column| column.name == priority);
    let priority_may_be_null = found.is_some_and(|column| column.may_be_null);
    let mut statements = Vec::new();
    for (nth, table) in facts.tree.iter().enumerate() {
        for index in &definition.indexes {
            // PostgreSQL cannot enforce a unique index over several tables.
            let is_needed = index.needed.holds(priority_may_be_null) && (nth == 0 || !index.unique);
            if is_needed {
                let content = index.content(&facts.map);
                statements.extend(create_index(table, index.suffix, index.kind(), &content));
            }
        }
    }
    let table = facts.root()?;
    if definition.may_add_key && !facts.is_keyed {
        let key: Vec<String> = definition.key.iter().map(|it| facts.map.sql_name(it)).collect();
        let content = format!("({})", key.join(", "));
        if facts.is_partitioned {
            // PostgreSQL creates no index of a partitioned table concurrently.
            let name = named(&table.name, "key");
            let sql = format!("CREATE UNIQUE INDEX \"{name}\" ON {} {content}", table.quoted);
            return Some(SchemaStage::transaction("create the key", vec![sql]));
        }
        statements.extend(create_index(table, "key", "UNIQUE INDEX", &content));
    }
    (!statements.is_empty())
        .then(|| SchemaStage::alone("create indexes, while the table is in use", statements))
}

/// Statements that create an index, unless there is one: an invalid index of an interrupted run is dropped first.
fn create_index(table: &RelationFacts, suffix: &str, kind: &str, content: &str) -> Vec<String> {
    let mut statements = Vec::new();
    let existing = table.indexes.iter().find(|index| is_of(&index.name, suffix));
    match existing {
        Some(index) if index.is_valid => return statements,
        Some(index) => statements.push(drop_index(table, &index.name)),
        None => {}
    }
    let name = named(&table.name, suffix);
    statements.push(format!("CREATE {kind} CONCURRENTLY \"{name}\" ON {} {content}", table.quoted));
    statements
}

fn drop_index(table: &RelationFacts, name: &str) -> String {
    format!("DROP INDEX CONCURRENTLY IF EXISTS {}.\"{name}\"", table.schema)
}

/// True if the name is that of an object of ours.
fn is_of(name: &str, suffix: &str) -> bool {
    name.strip_suffix(suffix).is_some_and(|rest| rest.ends_with("_tenure_"))
}

fn functions(schema: &SchemaTarget, facts: &TableFacts) -> Option<SchemaStage> {
    let definition = &schema.definition;
    let mut statements = Vec::new();
    if !missing_triggers(schema, facts).is_empty() || !facts.functions.contains(&"claimed") {
        let claimed = function(&schema.table, "claimed");
        statements.push(definition.claimed_function(&claimed, &facts.map));
    }
    if definition.has_attempts && !facts.has_current_add {
        let add = function(&schema.table, "add");
        statements.extend(sql_function::statements(&schema.table, &add));
    }
    (!statements.is_empty()).then(|| SchemaStage::transaction("create functions", statements))
}

/// Tables that lack the trigger, or have another version of it.
fn missing_triggers<'a>(schema: &SchemaTarget, facts: &'a TableFacts) -> Vec<&'a RelationFacts> {
    let name = trigger_name(schema);
    let is_missing = |table: &&RelationFacts| {
        !table.triggers.iter().any(|(trigger, comment)| {
            *trigger == name && comment.as_deref() == Some(TRIGGER_VERSION)
        })
    };
    facts.tree.iter().filter(is_missing).collect()
}

fn trigger_name(schema: &SchemaTarget) -> String {
    named(schema.table.name(), "claimed")
}

/// One stage per table, so that no transaction waits for the lock of a second table.
fn triggers(schema: &SchemaTarget, facts: &TableFacts) -> Vec<SchemaStage> {
    let (name, function) = (trigger_name(schema), function(&schema.table, "claimed"));
    let stage = |table: &RelationFacts| {
        let quoted = &table.quoted;
        let mut statements = Vec::new();
        if table.triggers.iter().any(|(trigger, _)| *trigger == name) {
            statements.push(format!("DROP TRIGGER \"{name}\" ON {quoted}"));
        }
        statements.push(trigger(&name, quoted, &function, &facts.map));
        statements
            .push(format!("COMMENT ON TRIGGER \"{name}\" ON {quoted} IS '{TRIGGER_VERSION}'"));
        SchemaStage::transaction(format!("create the trigger of {quoted}"), statements)
    };
    missing_triggers(schema, facts).into_iter().map(stage).collect()
}

fn drop_triggers(schema: &SchemaTarget, facts: &TableFacts) -> Vec<SchemaStage> {
    let name = trigger_name(schema);
    let found = facts.tree.iter().filter(|it| it.triggers.iter().any(|(found, _)| *found == name));
    let stage = |table: &RelationFacts| {
        let sql = format!("DROP TRIGGER \"{name}\" ON {}", table.quoted);
        SchemaStage::transaction(format!("drop the trigger of {}", table.quoted), vec![sql])
    };
    found.map(stage).collect()
}

fn drop_functions(schema: &SchemaTarget, facts: &TableFacts) -> Option<SchemaStage> {
    let drop = |suffix: &&str| format!("DROP FUNCTION {}", function(&schema.table, suffix));
    let statements: Vec<String> = facts.functions.iter().map(drop).collect();
    (!statements.is_empty()).then(|| SchemaStage::transaction("drop functions", statements))
}

fn drop_indexes(schema: &SchemaTarget, facts: &TableFacts) -> Option<SchemaStage> {
    let definition = &schema.definition;
    let mut suffixes: Vec<&str> = definition.indexes.iter().map(|index| index.suffix).collect();
    if definition.may_add_key {
        suffixes.push("key");
    }
    let mut statements = Vec::new();
    for table in &facts.tree {
        let ours = |name: &str| suffixes.iter().any(|suffix| is_of(name, suffix));
        let names = table.indexes.iter().map(|index| &index.name).filter(|name| ours(name));
        statements.extend(names.map(|name| drop_index(table, name)));
    }
    if statements.is_empty() {
        return None;
    }
    if facts.is_partitioned {
        // PostgreSQL drops no index of a partitioned table concurrently.
        let plain = statements.iter().map(|sql| sql.replacen(" CONCURRENTLY", "", 1)).collect();
        return Some(SchemaStage::transaction("drop the key", plain));
    }
    Some(SchemaStage::alone("drop indexes, while the table is in use", statements))
}

fn drop_view_and_columns(
    schema: &SchemaTarget,
    facts: &TableFacts,
    dropped: &[String],
) -> Option<SchemaStage> {
    let mut statements = Vec::new();
    let mut title = "drop the view".to_owned();
    if facts.view.as_ref().is_some_and(|view| !view.columns.is_empty()) {
        statements.push(format!("DROP VIEW {}", schema.table.quoted()));
    }
    if !dropped.is_empty() {
        let quoted = &facts.root()?.quoted;
        let drops: Vec<String> =
            dropped.iter().map(|name| format!("DROP COLUMN \"{name}\"")).collect();
        statements.push(format!("ALTER TABLE {quoted}\n    {}", drops.join(",\n    ")));
        "drop the columns that were added: THEIR DATA IS LOST".clone_into(&mut title);
    }
    (!statements.is_empty()).then(|| SchemaStage::transaction(title, statements))
}

/// The plan as SQL for `psql`.
impl fmt::Display for SchemaPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, stages, kept_columns, lock_timeout } = self;
        if stages.is_empty() {
            writeln!(f, "-- {table}: nothing to do")?;
        }
        for (nth, SchemaStage { title, statements, in_transaction }) in stages.iter().enumerate() {
            writeln!(f, "-- {table}, stage {} of {}: {title}", nth + 1, stages.len())?;
            if *in_transaction {
                let limit = lock_timeout.as_millis();
                writeln!(f, "BEGIN;\nSET LOCAL lock_timeout = '{limit}ms';")?;
            }
            for statement in statements {
                writeln!(f, "{statement};")?;
            }
            if *in_transaction {
                writeln!(f, "COMMIT;")?;
            }
        }
        if !kept_columns.is_empty() {
            let columns = kept_columns.join(", ");
            writeln!(f, "-- {table}: kept with their data, though they were added: {columns}")?;
        }
        Ok(())
    }
}
